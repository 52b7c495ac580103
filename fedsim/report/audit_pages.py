# SPDX-License-Identifier: Apache-2.0
"""A page for each audit: the verdict in words, the errors against what the claim allows, the bounds, and the gap."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedsim.audit.estimate import Estimate, Fixed, HeldOut
from fedsim.audit.estimation.bayesian import epsilon_bayesian
from fedsim.audit.limits.tradeoff import Curve, approximate_dp, gaussian, sampled_gaussian
from fedsim.audit.verdict import Claim, Verdict
from fedsim.errors import FedsimError, counted
from fedsim.privacy.claim import PrivacyClaim
from fedsim.privacy.rounding import p_value_text, rounded_down, rounded_up
from fedsim.report import words
from fedsim.report.attack_files import AttackFiles
from fedsim.report.audit_bounds import bounds_table, gap_table, sides
from fedsim.report.audit_density import density_figure
from fedsim.report.audit_estimates import curves_named, estimates_figure
from fedsim.report.audit_figures import View, roc_figure, trade_off_figure
from fedsim.report.audit_files import Audit
from fedsim.report.audit_sum import sum_blocks
from fedsim.report.blocks import Block, Bullets, Definitions, Fact, Paragraph, Section, Tone
from fedsim.report.privacy_spent import full_claim
from fedsim.report.standing import (
    LEAKS,
    Leak,
    Standing,
    allowance,
    allowed_by,
    auc_interval,
    leak_of_game,
    outcome,
    tone,
)

DEEDS = {
    "example-canaries": "Some examples of the audited clients gave way to canaries, each present by a fair coin, with"
    " the largest gradient that clipping lets through. The auditor looks for them in all that the server received.",
    "client-canaries": "Some clients gave way to canaries, each present by a fair coin, which send the largest update"
    " that clipping lets through. The auditor looks for them in all that the server received.",
    "transcript": "No canaries: the auditor looks for the examples of the run themselves, in the updates that its"
    " transcript keeps.",
    "game": "Many models were trained, each in one of two worlds as a fair coin said, and the adversary guesses which.",
    "mechanism": "The mechanism was run many times on neighbouring data sets, each time on one of two as a fair coin"
    " said. The auditor learned on some runs what tells the outputs apart, and counted it on others.",
    "one-run-sum": "Unit vectors are each added to a sum by a fair coin, with Gaussian noise; the auditor guesses from"
    " the noisy sum which were in. Of the scenario only the seed matters.",
}
MEANINGS = {
    "consistent": "consistent: nothing speaks against the claim, and an adversary with a fair chance looked; no proof"
    " of privacy",
    "violated": "violated: what was seen is next to impossible if the claim holds",
    "inconclusive": "inconclusive: too little was seen to tell",
}
ONE_CLIENT = (
    "The game plays the training of one client alone: the local steps of all its rounds, one after the other, on as"
    " many rows as it holds, without other clients and without averaging in between. It does not play the federation."
)
_TELLING = ("violated", "consistent", "inconclusive")
"""A verdict that is inconclusive says nothing against one that is not."""


def audit_pages(audits: Sequence[Audit], attacks: Sequence[AttackFiles] = ()) -> tuple[Section, ...]:
    """One section for each audit; the attacks on the same run stand beside the bounds."""
    return tuple(_page(audit, attacks, number, len(audits)) for number, audit in enumerate(audits, start=1))


def audit_facts(audits: Sequence[Audit], leak: Leak = "unknown", *, explain: bool = True) -> tuple[Fact, ...]:
    """For the row at the top: what became of the claim for each unit, and each game that no claim can be held against.

    `leak` is what attacks on the same run have shown; `explain` adds what the claim allows, where no other fact does.
    """
    judged = [(audit, audit.verdict) for audit in audits if audit.verdict is not None]
    units = dict.fromkeys(verdict.claim.unit for _, verdict in judged)
    places = {id(audit): f"audit-{number}" for number, audit in enumerate(audits, start=1)}
    facts = (_fact([pair for pair in judged if pair[1].claim.unit == unit], leak, places, explain) for unit in units)
    bare = (audit for audit in audits if audit.verdict is None and audit.numbers.game is not None)
    return (*facts, *(_game_fact(audit, places[id(audit)]) for audit in bare))


def _fact(judged: list[tuple[Audit, Verdict]], leak: Leak, places: Mapping[int, str], explain: bool) -> Fact:
    audit, verdict = min(judged, key=lambda pair: _TELLING.index(outcome(pair[0])))
    others = Counter(other.status for _, other in judged if other is not verdict)
    also = "".join(f"; {counted(times, 'other audit')} {status}" for status, times in others.items())
    note = f"{verdict.claim}, by {audit.name}: {'; '.join(_proved(verdict))}{also}."
    note += f" {verdict.reason}" if verdict.status == "violated" else ""
    note += "" if outcome(audit) == verdict.status else " Its adversary is an ordinary one: no evidence for the claim."
    note += f" {allowance(verdict.claim)}." if explain else ""
    return Fact(
        "Audit of the claim", verdict.status, note, wide=True, tone=_tone(audit, leak), anchor=places[id(audit)]
    )


def _tone(audit: Audit, leak: Leak = "unknown") -> Tone:
    """The colour of one audit, from its verdict, what its claim allows, and what leaked."""
    game = leak_of_game(audit) if audit.numbers.game is not None else "unknown"
    shown = max(leak, game, key=LEAKS.index)
    if audit.verdict is None:
        return tone(Standing(None, "inconclusive" if audit.numbers.game is not None else "untested", shown))
    return tone(Standing(allowed_by(audit.verdict.claim), outcome(audit), shown))


def _game_fact(audit: Audit, anchor: str) -> Fact:
    numbers, (low, high) = audit.numbers, auc_interval(audit)
    auc = 0.5 if numbers.auc is None else numbers.auc
    note = (
        f"by the adversary of {audit.name}, where a coin has 0.5 (interval {low:.2f} to {high:.2f},"
        f" {counted(numbers.trials, 'trial')}); it is held against no claim. {ONE_CLIENT}"
    )
    return Fact(f"Game {audit.name.removeprefix('the game ')}", f"AUC {auc:.2f}", note, True, _tone(audit), anchor)


def _proved(verdict: Verdict) -> list[str]:
    """The first bound of either tier: it was named before the run."""
    found = {estimate.tier: estimate for estimate in reversed(verdict.estimates)}
    return [
        f"tier {tier} proves ε ≥ {rounded_down(found[tier].lower)} at the same δ with {_sure(found[tier])}"
        + (f", where {curves_named(found[tier])}" if curves_named(found[tier]) else "")
        for tier in ("A", "B")
        if tier in found
    ]


def _sure(estimate: Estimate) -> str:
    return "no confidence" if estimate.confidence is None else f"{100 * estimate.confidence:g}% confidence"


def _page(audit: Audit, attacks: Sequence[AttackFiles], number: int, total: int) -> Section:
    anchor, verdict = f"audit-{number}", audit.verdict
    blocks: list[Block | None] = [
        Paragraph(DEEDS.get(audit.kind, f"The audit is called {audit.kind}.")),
        Paragraph(ONE_CLIENT) if audit.numbers.game is not None else None,
        Paragraph(audit.sentence, _tone(audit)),
        Definitions(tuple(_words(audit)), "The verdict") if verdict is not None else None,
        *_bounds(audit, attacks, anchor),
        *_errors(audit, anchor),
        *sum_blocks(anchor, audit.numbers.rows, audit.numbers.outcomes),
        *_assumptions(audit),
        Bullets("What the audit says of itself", audit.numbers.notes) if audit.numbers.notes else None,
    ]
    title = f"Audit {number}: {audit.name}" if total > 1 else f"Audit: {audit.name}"
    return Section(anchor, title, tuple(block for block in blocks if block is not None))


# --- in words -------------------------------------------------------------------------------------------------------


def _words(audit: Audit) -> Iterable[tuple[str, str]]:
    verdict, numbers = audit.verdict, audit.numbers
    if verdict is None:
        return
    claim = numbers.claim if numbers.claim is not None and _same(numbers.claim, verdict.claim) else None
    said = f", {full_claim(claim)}" if claim else f" at δ = {verdict.claim.delta:g} ({_unit(verdict.claim)})"
    game = ", as the claim of the run reads for the two worlds of this game" if numbers.game else ""
    yield "Claim", f"ε ≤ {rounded_up(verdict.claim.epsilon)}{said}{game}"
    ordinary = "" if outcome(audit) == verdict.status else "; its adversary is an ordinary one, and no evidence for it"
    yield "Verdict", MEANINGS[verdict.status] + ordinary
    yield "Proved", "; ".join(_proved(verdict)) + f" ({_unit(verdict.claim)})"
    yield (
        "p-value",
        (
            f"{p_value_text(verdict.p_value)}: at most so probable is what was seen, if the claim holds; below"
            f" {1 - verdict.confidence:.2g} it is called violated"
        ),
    )
    yield (
        "Power",
        (
            f"a mechanism of {verdict.factor:g} times the claimed ε would have been caught with probability"
            f" {rounded_down(verdict.power, 2)}"
        ),
    )
    if verdict.evidence:
        yield "Evidence", verdict.evidence
    if numbers.chances and claim is not None and claim.sample_rate < 1:
        rate = numbers.joined / numbers.chances
        yield "Sampling", f"canaries joined a batch in {rate:.4f} of all cases, claimed is {claim.sample_rate:g}"
    if numbers.game is not None:
        played = numbers.game
        data = " and ".join(played.data)
        yield "Game", f"{played.asks} Data: {data}; challenge: {played.challenge}; sees: {played.sees}."
    if verdict.settle:
        yield "To settle it", verdict.settle


def _unit(claim: Claim) -> str:
    return f"{claim.adjacency} one {claim.unit}"


def _same(full: PrivacyClaim, claim: Claim) -> bool:
    return Claim.of(full) == claim


def _assumptions(audit: Audit) -> list[Block]:
    if audit.verdict is None:
        return []
    blocks: list[Block] = []
    for tier in ("A", "B"):
        found = [one for one in _estimates(audit, audit.verdict) if one.tier == tier]
        items = dict.fromkeys(assumption for one in found for assumption in one.assumptions)
        if items:
            blocks.append(Bullets(f"Tier {tier} holds if", tuple(items)))
    return blocks


# --- figures and tables ---------------------------------------------------------------------------------------------


def _bounds(audit: Audit, attacks: Sequence[AttackFiles], anchor: str) -> list[Block | None]:
    verdict = audit.verdict
    if verdict is None:
        return []
    drawing = estimates_figure(anchor, verdict.claim, _estimates(audit, verdict))
    return [drawing, gap_table(verdict), bounds_table(audit, attacks)]


def _estimates(audit: Audit, verdict: Verdict) -> list[Estimate]:
    """Those of the verdict, and one more of tier B from the counts of a test whose threshold is not of these trials."""
    counts = audit.numbers.sharpest
    if counts is None or not counts.usable or any("Bayesian" in one.method for one in verdict.estimates):
        return list(verdict.estimates)
    cells = counts.tp, counts.fp, counts.tn, counts.fn
    selection = HeldOut() if audit.kind in ("game", "mechanism") else Fixed()
    found = epsilon_bayesian(*cells, verdict.claim.delta, verdict.confidence, selection=selection)
    return [*verdict.estimates, found]


def _errors(audit: Audit, anchor: str) -> list[Block | None]:
    claim = None if audit.verdict is None else audit.verdict.claim
    views, said = list(_views(audit, claim)), "nothing" if claim is None else str(claim)
    caution = (
        "The line of what was measured is that of the trials that were made, at thresholds that nobody fixed"
        " beforehand: it may touch the edge by luck, and proves nothing by itself; the verdict rests on the bounds"
        " above."
    )
    return [
        trade_off_figure(anchor, views, said, caution),
        roc_figure(anchor, views, said, caution),
        None if claim is None else density_figure(anchor, claim, audit.numbers.sharpest),
    ]


def _views(audit: Audit, claim: Claim | None) -> Iterable[View]:
    numbers, full = audit.numbers, audit.numbers.claim
    ins, outs = sides(audit)
    title = audit.name if audit.kind in ("game", "mechanism") else "the whole run"
    allowed = None if claim is None else approximate_dp(claim.epsilon, claim.delta)
    counts = tuple(found for found in (numbers.counts, numbers.counts_guessed) if found is not None)
    whole = View(title, numbers.trade_off, allowed, "its (ε, δ)", counts=counts, least=_least(ins, outs))
    yield whole if full is None else dataclasses.replace(whole, releases=releases_of(full))
    if full is not None and full.noise_multiplier > 0:
        yield View(
            "one step, of those that joined",
            numbers.trade_off_step,
            gaussian(1 / full.noise_multiplier),
            f"Gaussian noise of {words.number(full.noise_multiplier)} times the sensitivity",
            least=_least(numbers.scores_in, numbers.scores_out),
        )


def _least(ins: int, outs: int) -> float:
    """The smallest false positive rate that there is to be seen, if it is known."""
    return 1 / max(10, outs) if min(ins, outs) > 0 else 1e-3


def releases_of(claim: PrivacyClaim) -> Curve | None:
    """The trade-off curve of the releases that a claim names; None for what has none that is known here."""
    known = "gaussian" in claim.mechanism.lower() and claim.sampling != "fixed size"
    if not known or claim.adjacency != "add/remove" or not claim.noise_multiplier or not claim.compositions:
        return None
    if claim.sample_rate == 1:
        return gaussian(math.sqrt(claim.compositions) / claim.noise_multiplier)
    try:
        return sampled_gaussian(claim.noise_multiplier, claim.sample_rate, claim.compositions)
    except FedsimError:
        return None
