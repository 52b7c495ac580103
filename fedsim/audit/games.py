# SPDX-License-Identifier: Apache-2.0
"""Privacy games: every inference risk as one game with four parts (Salem et al., IEEE S&P 2023, Table 1).

In a game somebody picks the training data and the challenge, a coin decides which of two worlds is trained in, and the
adversary, who sees something, guesses. Its advantage is P[says 1 | world 1] − P[says 1 | world 0]. Games are data: what
differs between membership inference and differential privacy is who picks what, and who sees what.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from fedsim.errors import AuditError
from fedsim.scenario import GameName

Picker = Literal["random", "adversary", "parameter", "nobody"]
"""random: drawn from the data; adversary: whatever is worst; parameter: fixed by the game; nobody: there is none."""
View = Literal["black box", "white box", "every round", "transcript"]
"""What is seen: outputs of the model; its weights; its weights after every round; all that the server received."""
Stake = Literal["record", "subject", "distribution"]
"""Whose secret is at stake: one row, one person with many rows, or a property of where the rows come from."""


@dataclass(frozen=True)
class Game:
    """Who picks the data, who picks the challenge, what is seen, and what is at stake."""

    name: GameName
    data: tuple[Picker, ...]
    challenge: Picker
    sees: View
    stakes: tuple[Stake, ...]
    asks: str
    """What the adversary is asked."""
    source: str
    """The game's number in Salem et al. 2023."""
    coin: float = 0.5
    """The probability of the first of the two worlds."""

    @property
    def about(self) -> str:
        """One line for people."""
        data = " and ".join(self.data)
        return f"{self.name}: {self.asks} Data: {data}; challenge: {self.challenge}; sees: {self.sees}."


_R: tuple[Picker, ...] = ("random",)
_RECORD: tuple[Stake, ...] = ("record",)

GAMES: dict[GameName, Game] = {
    game.name: game
    for game in (
        Game("MI", _R, "random", "white box", _RECORD, "Was this row in the training data?", "Game 2"),
        Game("MI-skew", _R, "random", "white box", _RECORD, "Was it, if few rows are members?", "Game 2", 0.1),
        Game("MI-BB", _R, "random", "black box", _RECORD, "Was it, told by the model's outputs only?", "Game 2"),
        Game("MI-Adv", _R, "adversary", "white box", _RECORD, "Was the row there that is easiest to see?", "Game 2"),
        Game("MI-Diff", _R, "random", "black box", _RECORD, "Was it, given how hard the row is anyway?", "Game 3"),
        Game("MI-Pois", ("random", "adversary"), "random", "black box", _RECORD,
             "Was it, if some of the data is poisoned?", "Game 3"),
        Game("MI-User", _R, "parameter", "black box", ("subject",), "Did this client take part?", "Game 4"),
        Game("MM", _R, "random", "white box", ("record", "distribution"),
             "Was it, if members and others come from different distributions?", "Game 11"),
        Game("MI-SQ", ("adversary",), "random", "black box", _RECORD,
             "Was it, if the adversary picked all the other rows?", "Game 17"),
        Game("AI", _R, "random", "white box", _RECORD, "What is the unknown attribute of this row?", "Game 5"),
        Game("Inv", _R, "random", "white box", _RECORD, "What does the row with this label look like?", "Game 5"),
        Game("RC", ("parameter",), "random", "white box", _RECORD,
             "Which row is it, if all the others are known?", "Game 6"),
        Game("RC-Untarg", _R, "nobody", "black box", _RECORD, "Which rows are in the data? Any will do.", "Game 7"),
        Game("RC-Targ", _R, "random", "black box", _RECORD, "How does this row go on?", "Game 7"),
        Game("PI", _R, "nobody", "white box", ("distribution",),
             "Which of two distributions is the data from?", "Game 8"),
        Game("MI-Subj", _R, "random", "white box", ("subject", "distribution"),
             "Were rows of this subject used, be they other ones than those at hand?", "Game 9"),
        Game("DPD", ("adversary",), "adversary", "every round", _RECORD,
             "Which of two neighbouring data sets was it, both the worst there are?", "Game 10"),
        # The seed's copy of this row of the table is not legible; as in the paper's text, all is fixed beforehand.
        Game("SMI", ("parameter",), "parameter", "white box", _RECORD,
             "Which of two fixed neighbouring data sets was it?", "Game 10"),
    )
}  # fmt: skip


def game_named(name: str) -> Game:
    """The game of that name."""
    for game in GAMES.values():
        if game.name == name:
            return game
    raise AuditError(f"game is {name!r}; it must be one of {', '.join(GAMES)}")


# --- what one risk says about another -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """A reduction: whoever wins `of` wins `by` as well, so that a bound on `by` bounds `of`; or that there is none."""

    of: GameName
    by: GameName
    holds: bool
    """False: a separation; `by` may be hopeless for the adversary and `of` easy."""
    why: str
    factor: float = 1.0
    """The advantage in `of` is at most this times that in `by`."""


_RELATIONS = (
    Relation("MI", "MI-Adv", True, "an adversary who may pick the challenge may pick a random one"),
    Relation("MI-Adv", "DPD", True, "who picks all the data may draw it at random, and ignore what it need not see"),
    Relation("SMI", "DPD", True, "the two data sets are two that the adversary of DPD could have picked"),
    Relation("MI", "SMI", True, "on average over the data: some fixed data is at least as bad as random data"),
    Relation("MI-skew", "MI", True, "how many rows are members changes neither of the two rates"),
    Relation("MI-BB", "MI", True, "the outputs of a model follow from its weights"),
    Relation("MI-Diff", "MI-BB", True, "knowing the difficulty is one way to play"),
    Relation("MI-SQ", "DPD", True, "the data is one that the adversary of DPD could have picked"),
    Relation("MI-Pois", "DPD", True, "poisoned data is data that the adversary of DPD could have picked"),
    Relation("AI", "MI", True, "say member if the guess of the attribute is right (Yeom et al. 2018)"),
    Relation("Inv", "MI", True, "say member if the guess of the row is right"),
    Relation("RC", "SMI", True, "say member if the reconstruction is near (U-ReRo: Guerra-Balboa et al. 2024)"),
    Relation("RC-Targ", "MI-BB", True, "say member if the row goes on as the reconstruction does"),
    Relation("MI", "RC", False, "one bit may leak though no row can be rebuilt"),
    Relation("MI", "AI", False, "membership may leak of rows whose attributes are public or easily imputed"),
    Relation("DPD", "MI", False, "random rows may be safe and the worst one not"),
    Relation("PI", "DPD", False, "what holds of all rows together is not hidden by hiding one of them"),
    Relation("PI", "MI", False, "what holds of all rows together is not hidden by hiding one of them"),
    Relation("MI-Subj", "DPD", False, "a subject with k rows is hidden by k·ε only (group privacy)"),
    Relation("MI-User", "DPD", False, "a client with k rows is hidden by k·ε only; claim client_dp for it"),
    Relation("MM", "DPD", False, "where members come from another distribution, that alone tells them apart"),
)


def relations() -> tuple[Relation, ...]:
    """The reductions and separations between risks; advantages are against the world without the row."""
    return _RELATIONS


def bounded_by(risk: GameName, by: GameName) -> float | None:
    """Adv(risk) ≤ so many times Adv(by), by a chain of reductions; None if nothing follows."""
    queue, best = deque([(risk, 1.0)]), {risk: 1.0}
    while queue:
        name, factor = queue.popleft()
        for relation in _RELATIONS:
            if relation.holds and relation.of == name and relation.by not in best:
                best[relation.by] = factor * relation.factor
                queue.append((relation.by, best[relation.by]))
    return best.get(by)


def is_bounded_by_dp(risk: GameName) -> bool:
    """Whether example-level differential privacy bounds a risk at all."""
    return bounded_by(risk, "DPD") is not None
