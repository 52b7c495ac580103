# SPDX-License-Identifier: Apache-2.0
"""What audits have left in the folder of a run: settings, verdicts, and the rates and counts behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsim.audit.results import audit_paths
from fedsim.audit.scores.shares import Share
from fedsim.audit.verdict import Verdict
from fedsim.errors import FedsimError, RunError
from fedsim.privacy.claim import PrivacyClaim
from fedsim.privacy.loss import Floats

Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Many = Annotated[int, Field(ge=0)]


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Rates(_Object):
    """The errors of a test at some of its thresholds, from the strictest to the most lenient."""

    fpr: tuple[Rate, ...] = ()
    fnr: tuple[Rate, ...] = ()

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        if len(self.fpr) != len(self.fnr):
            raise ValueError(f"fpr has {len(self.fpr)} values and fnr {len(self.fnr)}")
        return self

    def __len__(self) -> int:
        """How many points there are."""
        return len(self.fpr)

    @property
    def arrays(self) -> tuple[Floats, Floats]:
        """(FPR, FNR) with both ends: never "in", and always."""
        return np.array([0.0, *self.fpr, 1.0]), np.array([1.0, *self.fnr, 0.0])


class Counts(_Object):
    """What a test came to whose threshold was fixed beforehand, or chosen on other trials; `rule` says which test."""

    tp: Many
    fp: Many
    tn: Many
    fn: Many
    rule: str = ""

    @property
    def hits(self) -> Share:
        """Of the trials with the record in, those that were called so: the TPR."""
        return Share(self.tp, self.tp + self.fn)

    @property
    def misses(self) -> Share:
        """The FNR."""
        return Share(self.fn, self.tp + self.fn)

    @property
    def alarms(self) -> Share:
        """The FPR."""
        return Share(self.fp, self.fp + self.tn)

    @property
    def right(self) -> Share:
        """The accuracy."""
        return Share(self.tp + self.tn, self.tp + self.fp + self.tn + self.fn)

    @property
    def usable(self) -> bool:
        """Whether there were trials of both kinds."""
        return self.tp + self.fn > 0 and self.fp + self.tn > 0


class SumRow(_Object):
    """One point of the one-run-sum experiment: mean and standard deviation over `repeats` audits."""

    question: Literal["Q2.1", "Q2.2", "Q2.3"]
    varied: str
    value: Number
    repeats: int
    true_epsilon: Number
    delta: Number
    asked: Number
    asked_sd: Number
    corrected: Number
    corrected_sd: Number
    registered: Number
    registered_sd: Number
    valid: Number
    valid_sd: Number


class SumOutcome(_Object):
    """What one audit of that experiment was made of."""

    question: str
    epsilon: Number
    canaries: int
    dimension: int


class GamePlayed(_Object):
    """Who picks what, and what is seen (Salem et al. 2023)."""

    name: str
    asks: str = ""
    sees: str = ""
    challenge: str = ""
    data: tuple[str, ...] = ()


class Ends(_Object):
    """A number with its interval, at the confidence of the audit."""

    value: Number
    low: Number
    high: Number


class RateAt(_Object):
    """The TPR of a game where the FPR is on average at most `at`, at a threshold chosen on other trials.

    None where so few trials cannot resolve that FPR; `needed` trials can.
    """

    at: Rate
    hits: Ends | None = None
    alarms: Ends | None = None
    needed: Many = 0


class AuditNumbers(_Object):
    """The numbers of an audit; each kind has those of its own."""

    claim: PrivacyClaim | None = None
    canaries: Many = 0
    included: Many = 0
    scores_in: Many = 0
    scores_out: Many = 0
    joined: Many = 0
    chances: Many = 0
    p_values: dict[str, Rate] = {}
    trade_off: Rates = Rates()
    trade_off_step: Rates = Rates()
    counts: Counts | None = None
    counts_guessed: Counts | None = None
    """Of the test that says "in" only where the auditor guesses so: few, and sure."""
    game: GamePlayed | None = None
    trials: Many = 0
    ins: Many = 0
    """Of the trials of a game, those with the record in."""
    advantage: Number | None = None
    allowed_advantage: Rate | None = None
    advantage_interval: tuple[Number, Number] | None = None
    auc: Rate | None = None
    auc_interval: tuple[Rate, Rate] | None = None
    rates: tuple[RateAt, ...] = ()
    looks_at: str = ""
    """What the adversary of a game makes its score of."""
    scope: str = ""
    """What a game plays, and what of the federation it leaves out."""
    rows: tuple[SumRow, ...] = ()
    outcomes: tuple[SumOutcome, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sharpest(self) -> Counts | None:
        """The counts that tell most about ε: where false alarms are rare."""
        return self.counts_guessed or self.counts


class Audit(_Object):
    """One audit. Without a claim that bears on what was played there is no verdict."""

    kind: str
    target: str = ""
    """Of a mechanism, module:function."""
    settings: dict[str, Any] = {}
    sentence: str
    verdict: Verdict | None = None
    numbers: AuditNumbers = AuditNumbers()

    @property
    def name(self) -> str:
        """For headings: a game and a mechanism by their own names."""
        if self.target:
            return f"the mechanism {self.target}"
        return f"the game {self.numbers.game.name}" if self.numbers.game else self.kind.replace("-", " ")


class AuditDocument(_Object):
    """One file with results."""

    audits: tuple[Audit, ...]


def read_audit_files(run: Path) -> tuple[Audit, ...]:
    """The audits of a run in order, none where it was not audited; RunError for a file that cannot be read."""
    return tuple(audit for path in audit_paths(run) for audit in _read(path))


def _read(path: Path) -> tuple[Audit, ...]:
    try:
        return AuditDocument.model_validate_json(path.read_bytes()).audits
    except (ValidationError, FedsimError, OSError, ValueError, TypeError) as error:
        why = " ".join(_first(error).split())[:120].rstrip(".")
        raise RunError(f"{path} is damaged ({why}); remove it, and audit again with `fedsim audit`") from error


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
