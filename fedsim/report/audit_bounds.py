# SPDX-License-Identifier: Apache-2.0
"""Two tables of an audit: what the claim allows beside what was achieved, and why less was proved than is claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedsim.audit.bounds import (
    amplified,
    attribute_advantage,
    attribute_success,
    membership_accuracy,
    membership_advantage,
    rero,
    rero_claim,
    tpr_at_fpr,
)
from fedsim.audit.scores.comparison import pooled
from fedsim.audit.scores.shares import Share, clopper_pearson
from fedsim.audit.verdict import Claim, Verdict
from fedsim.privacy.rounding import rounded_down, rounded_up
from fedsim.report.attack_files import AttackFiles
from fedsim.report.audit_files import Audit, Counts
from fedsim.report.blocks import Table

EVEN = (0.5, 0.5)
ALARMS = (0.001, 0.01, 0.1)
BLIND = (0.1, 0.001)
COLUMNS = ("success", "allowed, at most", "measured", "95% interval", "of which kind the bound is")
Row = tuple[str, str, str, str, str]
NARROW = "\N{NO-BREAK SPACE}"
NOTE = (
    "A dash: this audit did not try it, and the bound holds all the same. Intervals are those of independent trials,"
    " those of a difference hold for both rates together. TPR at an FPR is that of a threshold chosen on other trials"
    " in a game; elsewhere it is read off the measured curve, at a threshold that was picked by looking at it, and is"
    " no proof."
)
PARTS = {
    "accountant": "the accountant: what it claims beyond the exact ε of the mechanism",
    "threat_model": "the threat model: what the adversary was not shown",
    "score": "the score: what the event or the guesses that were counted leave unused",
    "statistics": "statistics: what more canaries, trials or rounds would gain",
}


def bounds_table(audit: Audit, attacks: Sequence[AttackFiles]) -> Table | None:
    """Every notion of success that the claim bounds, with what was measured of it."""
    verdict = audit.verdict
    if verdict is None:
        return None
    rows = (
        *_membership(audit, verdict.claim),
        *_attribute(verdict.claim),
        *_reconstruction(audit, attacks, verdict.claim),
    )
    return Table(f"What {verdict.claim} allows, and what was achieved", COLUMNS, rows, NOTE)


def _membership(audit: Audit, claim: Claim) -> Iterator[Row]:
    pair, numbers = (claim.epsilon, claim.delta), audit.numbers
    allowed = membership_advantage(*pair) if numbers.allowed_advantage is None else numbers.allowed_advantage
    low, high = numbers.advantage_interval or _difference(numbers.counts)
    advantage = _measured(numbers.counts)
    accuracy = None if advantage is None else (1 + advantage) / 2
    ends = (None, None) if low is None or high is None else ((1 + low) / 2, (1 + high) / 2)
    kind = "both worlds equally likely, the adversary knows all the rest"
    yield _row("membership advantage, TPR − FPR", allowed, advantage, (low, high), kind)
    yield _row("accuracy, half of the trials with the record in", membership_accuracy(*pair), accuracy, ends, kind)
    for alarms in ALARMS:
        share, interval = _hits_at(audit, alarms)
        yield _row(f"TPR at FPR {100 * alarms:g}%", tpr_at_fpr(*pair, alarms), share, interval, "edge of the region")


def _attribute(claim: Claim) -> Iterator[Row]:
    kind = "two equally likely values, exact (linear program)"
    success = attribute_success(claim.epsilon, claim.delta, EVEN, adjacency=claim.adjacency)
    yield _row("an attribute guessed right", success, None, (None, None), kind)
    more = attribute_advantage(claim.epsilon, claim.delta, EVEN, adjacency=claim.adjacency)
    yield _row("the same, beyond the same guesses about somebody else", more, None, (None, None), kind)


def _reconstruction(audit: Audit, attacks: Sequence[AttackFiles], claim: Claim) -> Iterator[Row]:
    said = f"ε ≤ {rounded_up(claim.epsilon)} at δ = {claim.delta:g} per {claim.unit} ({claim.adjacency})"
    scores = [score for files in attacks for score in files.scores]
    for one in pooled([comparison for score in scores for comparison in score.comparisons]):
        if one.claim == said:
            kind = f"from {one.rests_on}; blind guessing {rounded_up(100 * one.kappa, 1)}%"
            yield _row(f"{one.success}, by an attack", one.allowed, one.measured.share, one.measured.interval, kind)
    full = audit.numbers.claim
    for kappa in BLIND:
        allowed, kind = rero(claim.epsilon, kappa, delta=claim.delta, adjacency=claim.adjacency), "(ε, δ)"
        if full is not None and Claim.of(full) == claim:
            allowed, rests_on = rero_claim(full, kappa)
            kind = f"{rests_on}, of a unit that may not have been drawn" if amplified(full) else rests_on
        name = f"a reconstruction that blind guessing gets with {100 * kappa:g}%"
        yield _row(name, allowed, None, (None, None), f"reconstruction robustness, from the {kind}")


def _measured(counts: Counts | None) -> float | None:
    return None if counts is None or not counts.usable else counts.hits.share - counts.alarms.share


def _difference(counts: Counts | None) -> tuple[float | None, float | None]:
    """The interval of TPR − FPR: each rate is given half of the error."""
    if counts is None or not counts.usable:
        return None, None
    hits = clopper_pearson(counts.hits.right, counts.hits.of, 0.975)
    alarms = clopper_pearson(counts.alarms.right, counts.alarms.of, 0.975)
    return hits[0] - alarms[1], hits[1] - alarms[0]


def _hits_at(audit: Audit, alarms: float) -> tuple[float | None, tuple[float | None, float | None]]:
    """The hits where there are at most so many false alarms, and their interval; None: too few trials to tell.

    Of a game at a threshold that was chosen on other trials; else the most of any threshold.
    """
    if audit.numbers.game is not None and audit.numbers.advantage_interval is not None:
        found = next((one.hits for one in audit.numbers.rates if one.at == alarms), None)
        return (found.value, (found.low, found.high)) if found else (None, (None, None))
    share = _most_hits(audit, alarms)
    return (share.share, share.interval) if share else (None, (None, None))


def _most_hits(audit: Audit, alarms: float) -> Share | None:
    ins, outs = sides(audit)
    rates = audit.numbers.trade_off
    if not ins or not outs or alarms * outs < 1 or not len(rates):
        return None
    allowed = [1 - fnr for fpr, fnr in zip(rates.fpr, rates.fnr, strict=True) if fpr <= alarms]
    return Share(round(max(allowed, default=0.0) * ins), ins)


def sides(audit: Audit) -> tuple[int, int]:
    """Of how many trials in and out the curve of an audit is; 0 where the file does not tell."""
    numbers = audit.numbers
    if numbers.canaries:
        return numbers.included, numbers.canaries - numbers.included
    return numbers.ins, numbers.trials - numbers.ins if numbers.ins else 0


def _row(name: str, allowed: float, measured: float | None, ends: tuple[float | None, float | None], kind: str) -> Row:
    low, high = ends
    interval = "–" if low is None or high is None else f"{_percent(low)[:-1]} to {_percent(high)}".replace(" ", NARROW)
    return (name, f"{rounded_up(100 * allowed, 1)}%", "–" if measured is None else _percent(measured), interval, kind)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%".replace("-", "−")


# --- the gap --------------------------------------------------------------------------------------------------------


def gap_table(verdict: Verdict) -> Table | None:
    """From the claim down to the bound that was proved, part by part, in units of ε."""
    parts = {name: getattr(verdict.gap, name) for name in PARTS}
    known = {name: part for name, part in parts.items() if part is not None and math.isfinite(part)}
    first = verdict.estimates[0] if verdict.estimates else None
    if not known or first is None or math.isinf(first.lower):
        return None
    rest = verdict.claim.epsilon - first.lower - sum(known.values())
    rows = [("claimed", rounded_up(verdict.claim.epsilon))]
    rows += [(PARTS[name], _signed(-part)) for name, part in known.items()]
    rows += [("not explained by these", _signed(-rest))] if abs(rest) >= 5e-4 else []
    rows.append((f"proved by {first.method} (tier {first.tier})", rounded_down(first.lower)))
    about = f"ε at δ = {verdict.claim.delta:g}, {verdict.claim.adjacency} one {verdict.claim.unit}"
    note = "A part with a plus says that more was seen than the claim leaves room for; a small one may be chance."
    return Table("From the claim to what was proved", ("", about), tuple(rows), note)


def _signed(part: float) -> str:
    return f"{part:+.3f}".replace("-", "−") if abs(part) >= 5e-4 else "0.000"
