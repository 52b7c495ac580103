# SPDX-License-Identifier: Apache-2.0
"""The audits of a scenario: how its privacy claim is put to the test."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fedsim.scenario.numbers import Count, Delta, Seed, Share
from fedsim.scenario.section import Section

GameName = Literal[
    "MI", "MI-skew", "MI-BB", "MI-Adv", "MI-Diff", "MI-Pois", "MI-User", "MI-SQ", "MM",
    "AI", "Inv", "RC", "RC-Untarg", "RC-Targ", "PI", "MI-Subj", "DPD", "SMI",
]  # fmt: skip

LANGUAGE_GAMES: frozenset[GameName] = frozenset({"RC-Targ", "RC-Untarg"})
"""Games of language models, played with text; all others are played with images and tables."""


class _Audit(Section):
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """A true claim is found violated with probability of at most one minus this."""
    seed: Seed | None = None
    """Of the audit's own coins and of the run that it makes; null: one that follows from the scenario's seed."""


class _Canaries(_Audit):
    canaries: Count | None = None
    """How many there are; each is present by a fair coin."""
    guess_share: Share = 0.07
    """The share of the canaries about which tier A guesses: those it is surest of. Fixed before the run."""


class ExampleCanaries(_Canaries):
    """Examples with the largest gradient that clipping allows, in every client that the claim is about, in one run.

    Tier B reads every step by itself and composes (Nasr et al. 2023), tier A guesses who was in (Steinke et al. 2023,
    Mahloujifar et al. 2024). Needs defence.example_dp with Poisson batches, and one local step in a round. `canaries`
    is for each client; null: half of its examples, which give way to them.
    """

    kind: Literal["example-canaries"]
    """Audits defence.example_dp."""


class ClientCanaries(_Canaries):
    """Clients that send the largest update that clipping allows, in one run (after Andrew et al. 2023).

    Needs defence.client_dp with Gaussian noise. `canaries` is for the whole population; null: a quarter of it,
    or fewer where fewer clients take part, or the model has room for fewer.
    """

    kind: Literal["client-canaries"]
    """Audits defence.client_dp."""


class TranscriptAudit(_Audit):
    """The examples of a run themselves, in the updates that its transcript keeps: no canaries, no training anew.

    One score for each update (tier B). Needs defence.example_dp with Poisson batches, one local step in a round, and
    the truth about the batches, which simulations keep.
    """

    kind: Literal["transcript"]
    """Audits a finished run."""


class GameAudit(_Audit):
    """A privacy game (Salem et al. 2023), played by replicas: all trials are trained at once."""

    kind: Literal["game"]
    """What an adversary of flesh and blood achieves, beside what the claim allows."""
    game: GameName = "MI"
    """Which one; `fedsim.audit.games` describes all of them."""
    trials: Annotated[int, Field(ge=20, le=1_000_000)] = 500
    """How often it is played."""


class OneRunSum(_Audit):
    """The audit of a noisy sum in one run (IIT Madras DA5001/6400, homework 3, questions 2.1 to 2.3)."""

    kind: Literal["one-run-sum"]
    """Of the mechanism alone: of the scenario only the seed matters."""
    questions: tuple[Literal["Q2.1", "Q2.2", "Q2.3"], ...] = Field(("Q2.1", "Q2.2", "Q2.3"), min_length=1)
    """By the budget, by the number of canaries, by the dimension."""
    repeats: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Audits for each point; of those with thousands of canaries fewer."""
    delta: Delta = 1e-6
    """The delta that the noise is calibrated to."""


AuditSection = Annotated[
    Annotated[ExampleCanaries | ClientCanaries | TranscriptAudit | GameAudit | OneRunSum, Field(discriminator="kind")],
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]
