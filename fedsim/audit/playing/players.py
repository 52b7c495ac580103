# SPDX-License-Identifier: Apache-2.0
"""Who plays which game, and what that adversary looks at: at most what the game shows, and sometimes less."""

from __future__ import annotations

from functools import partial

from fedsim.audit.games import GAMES
from fedsim.audit.playing import language, people, rows, white_box, worst_case
from fedsim.audit.playing.shadows import Player
from fedsim.scenario import GameName

PLAYERS: dict[GameName, Player] = {
    "MI": partial(rows.membership, weights=True),
    "MI-BB": partial(rows.membership, weights=False),
    "MI-skew": partial(rows.membership, weights=True, coin=GAMES["MI-skew"].coin),
    "MI-Diff": rows.difference,
    "MI-Pois": rows.poisoned,
    "MI-SQ": rows.adversarial_data,
    "AI": rows.attribute,
    "Inv": partial(rows.candidates, same_label=True, fixed=False),
    "RC": partial(rows.candidates, same_label=False, fixed=True),
    "MI-Adv": partial(worst_case.canary, fixed=False),
    "SMI": partial(worst_case.canary, fixed=True),
    "DPD": worst_case.distinguish,
    "PI": people.property_of_data,
    "MI-User": people.user,
    "MI-Subj": people.subject,
    "MM": people.mismatch,
    "RC-Targ": language.completion,
    "RC-Untarg": language.extraction,
}

_OUTPUTS = "the model's outputs"
_OUTPUTS_ONLY = "the model's outputs only, though the game shows the weights: a better adversary may see more"
_OWN_WEIGHTS = "the final weights, along the canary's own coordinates"

LOOKS_AT: dict[GameName, str] = {
    **dict.fromkeys(PLAYERS, _OUTPUTS),
    **dict.fromkeys(("MI", "MI-skew", "MM", "Inv", "RC"), white_box.LOOKS_AT),
    **dict.fromkeys(("AI", "PI"), _OUTPUTS_ONLY),
    **dict.fromkeys(("MI-Adv", "SMI"), _OWN_WEIGHTS),
    "DPD": "every step, along the canary's own coordinates: the log-likelihood ratio, which is the best there is",
}
"""What the adversary of each game makes its score of."""
