# SPDX-License-Identifier: Apache-2.0
"""Audit somebody else's DP code: any `mechanism(dataset, rng)`.

    from fedsim.audit import Claim, audit_mechanism

    def noisy_sum(records, rng):
        return np.clip(records, 0, 1).sum() + rng.laplace(scale=1 / 0.5)

    print(audit_mechanism(noisy_sum, Claim(epsilon=0.5)).sentence())

The auditor runs the mechanism on neighbouring data sets and learns to tell its outputs apart. All pairs are tried with
a few runs, the promising ones with more. Three times an event is written down and counted on runs that nobody has seen
(`STAGES`); each time has its part of the error probability, divided among the pairs that are tested. So a claim that
holds is called violated with probability at most 1 − confidence, however many pairs and scores were looked at.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedsim.audit.blackbox.distinguishing import epsilon_distinguishing
from fedsim.audit.blackbox.making import Made, made_pairs
from fedsim.audit.blackbox.pairs import Domain, Pair, as_pairs
from fedsim.audit.blackbox.reach import caught, enough, settling
from fedsim.audit.blackbox.running import Mechanism, run, runs_on, seeded
from fedsim.audit.blackbox.search import FEWEST, Audit, Count, count_in_stages, search
from fedsim.audit.blackbox.tier_b import gap_of, model_based
from fedsim.audit.blackbox.witness import recipe, witness
from fedsim.audit.verdict import POWER, Claim, ClaimLike, Verdict, decide
from fedsim.errors import AuditError

_EACH, _MOST = 400, 300
"""Runs for which one more made pair is looked at, and the most of those."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A mechanism with its claim and, where the worst cases are known, its data sets."""

    mechanism: Mechanism
    claim: Claim
    pairs: Sequence[Any] | None = None
    domain: Domain | None = None
    like: Any = None
    exact_epsilon: float | None = None
    """The exact ε at δ, where it is known; it explains a part of the gap."""
    trials: int | None = None
    """Runs that suffice, where that is known."""


def audit_mechanism(
    mechanism: Mechanism | Subject,
    claim: ClaimLike | None = None,
    pairs: Sequence[Any] | None = None,
    *,
    trials: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    domain: Domain | Collection[float] | None = None,
    like: Any = None,
    factor: float = 2.0,
    exact_floats: bool = False,
) -> Verdict:
    """Whether a mechanism keeps its claim, by at most `trials` runs of it.

    Args:
        mechanism: called with a data set and a `numpy.random.Generator`; returns anything (`outputs`). It may have a
            method `batch(dataset, rng, trials)` that returns that many outputs at once, which is faster.
        claim: ε, δ, unit and adjacency: a `Claim` or a `PrivacyClaim`.
        pairs: neighbouring data sets (first, second). Without them, worst-case arrays are made (`worst_pairs`).
        trials: runs of the mechanism, all together; by default so many that the verdict can be `consistent`, between
            100,000 and a million: 100,000 for ε = 1 at δ = 0, 190,000 at δ = 10⁻⁵.
        confidence: a true claim is refuted with probability at most 1 − confidence.
        seed: of everything random here. A mechanism with randomness of its own is seeded through numpy and torch.
        domain: what a record may hold, for made pairs: (low, high), a set of values, or a `Domain`. Within it a refusal
            counts as an output. Without it numbers from −1000 to 1000 are invented, and a refusal of a record among
            them is not held against the claim; the verdict is then `inconclusive` unless something else refutes it.
        like: an example data set, for made pairs: records of that shape, as many as it has (and one fewer under
            add/remove), its own among them. Without records, as np.zeros((0, 4)), it gives the shape only.
        factor: a mechanism this many times worse than claimed must be caught for the verdict `consistent`.
        exact_floats: also look at single bits: every ε-DP mechanism on plain floating-point numbers is then violated
            (Mironov 2012), which is true, and seldom the question.
    """
    subject = _subject(mechanism, claim, pairs, domain, like)
    return examine(subject, trials=trials, confidence=confidence, seed=seed, factor=factor, exact_floats=exact_floats)[
        0
    ]


def examine(
    subject: Subject,
    *,
    trials: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    factor: float = 2.0,
    exact_floats: bool = False,
) -> tuple[Verdict, Count | None]:
    """The verdict of `audit_mechanism`, and the count that it rests on; None where there was nothing to count."""
    if not 0 < confidence < 1:
        raise AuditError(f"confidence is {confidence!r}; it must lie between 0 and 1, such as 0.95")
    if factor <= 1:
        raise AuditError(f"factor is {factor!r}; it must be above 1: how much worse than claimed must be caught")
    budget = trials or subject.trials or enough(Claim.of(subject.claim), factor, 1 - confidence, subject.pairs is None)
    if budget < FEWEST:
        raise AuditError(f"trials is {budget}; an audit needs at least {FEWEST} runs")
    _takes_two(subject.mechanism)
    rng = np.random.default_rng(seed)
    audit = Audit(subject.mechanism, Claim.of(subject.claim), 1 - confidence, rng, exact_floats)
    # Data sets that a mechanism has not reckoned with (no record at all) make numpy warn, thousands of times.
    with seeded(seed), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        made = _pairs(subject, budget, rng)
        count_in_stages(audit, search(audit, made.pairs, budget), budget)
        if not audit.counts and not _always_the_same(audit, made.pairs):
            return _unread(audit, factor), None
    verdict = _verdict(audit, subject, budget, factor, made.question)
    told = dataclasses.replace(verdict, reason=f"{verdict.reason} {made.note}".strip())
    return told, audit.best()[0] if audit.counts else None


def _subject(
    mechanism: Mechanism | Subject,
    claim: ClaimLike | None,
    pairs: Sequence[Any] | None,
    domain: Domain | Collection[float] | None,
    like: Any,
) -> Subject:
    if not isinstance(mechanism, Subject):
        if claim is None:
            raise AuditError("claim is missing; give a Claim(epsilon, delta), or a Subject that carries one")
        mechanism = Subject(mechanism, Claim.of(claim))
    given: dict[str, Any] = {"claim": Claim.of(claim) if claim else None, "pairs": pairs, "like": like}
    given["domain"] = None if domain is None else Domain.of(domain)
    return dataclasses.replace(mechanism, **{name: value for name, value in given.items() if value is not None})


def _takes_two(mechanism: Mechanism) -> None:
    try:
        signature = inspect.signature(mechanism)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise AuditError(
            f"mechanism has the arguments {signature} ({error}); it is called as mechanism(dataset, rng), so wrap it"
        ) from error


def _always_the_same(audit: Audit, pairs: Sequence[Pair]) -> bool:
    """Whether the mechanism says one and the same, whatever it is given: then there is nothing to tell apart."""
    outputs = [part for pair in pairs for part in run(audit.mechanism, pair, 10, audit.rng)]
    return len(np.unique(np.concatenate([part.fingerprints for part in outputs]))) == 1


def _unread(audit: Audit, factor: float) -> Verdict:
    """Outputs that differ, in which no event was found: they may hold what the auditor cannot read."""
    nothing = epsilon_distinguishing(0, 0, audit.used, audit.claim.delta, 1 - audit.error, method="exact test")
    return decide(
        audit.claim, [nothing], 1.0, confidence=1 - audit.error, power=0.0, factor=factor, trials=audit.used,
        settle="Its outputs could not be read; return numbers, arrays, texts, or lists and dictionaries of them.",
        evidence="no event was found in outputs that differ",
    )  # fmt: skip


def _pairs(subject: Subject, budget: int, rng: np.random.Generator) -> Made:
    """The given pairs, or made ones on which the mechanism gives an answer: as many as the runs are enough for."""
    if subject.pairs is not None:
        given = as_pairs(subject.pairs)
        problems = [runs_on(subject.mechanism, pair, both=True) for pair in given]
        if all(problems):
            raise AuditError(
                f"the mechanism answers on none of the given pairs ({problems[0]}); give pairs that it accepts"
            )
        return Made(given)
    most = max(24, min(_MOST, budget // _EACH))
    made = made_pairs(subject.mechanism, subject.claim.adjacency, subject.domain, subject.like, most, rng)
    sizes = {len(part) for pair in made.pairs for part in (pair.first, pair.second)}
    if subject.like is None or len(sizes) > 2:
        return made
    tried = f"Only data sets of {' and '.join(map(str, sorted(sizes)))} records were tried, as in like."
    return dataclasses.replace(made, note=f"{tried} {made.note}".strip())


def _verdict(audit: Audit, subject: Subject, budget: int, factor: float, question: str) -> Verdict:
    claim, confidence = audit.claim, 1 - audit.error
    able_with = partial(caught, claim, factor, audit.error, subject.pairs is None)
    if not audit.counts:
        nothing = epsilon_distinguishing(0, 0, budget, claim.delta, confidence, method="exact test on fresh runs")
        return decide(
            claim, [nothing], 1.0, confidence=confidence, power=able_with(budget), factor=factor, trials=audit.used,
            evidence="all outputs are the same on all data sets", open_question=question,
        )  # fmt: skip
    count, bound = audit.best()
    lines, fitted = model_based(count, claim.delta, confidence, audit.error * count.share)
    able = able_with(budget) if count.guesses else 0.0  # an event that never happens again has shown nothing
    settle = (
        "" if able >= POWER else settling(able_with) if count.guesses else "The event was seen once, and never again."
    )
    return decide(
        claim,
        [bound, *lines],
        audit.p_value(count),
        confidence=confidence,
        power=able,
        factor=factor,
        trials=audit.used,
        gap=gap_of(count, bound.lower, claim, fitted, subject.exact_epsilon),
        settle=settle,
        evidence=_evidence(subject, count),
        check=recipe(count.pair),
        open_question=question,
    )


def _evidence(subject: Subject, count: Count) -> str:
    """The pair and the event; who has said that such data sets may occur, if anybody."""
    seen = witness(count)
    if subject.pairs is not None:
        return seen
    unsaid = [
        *([] if subject.domain is not None else ["domain=(low, high) if records cannot be so"]),
        *([] if subject.like is not None else ["like if the number of records is fixed"]),
    ]
    return f"{seen}. The auditor made up this pair; give {' and '.join(unsaid)}" if unsaid else seen


def examine_target(
    target: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    adjacency: str | None = None,
    unit: str | None = None,
    domain: tuple[float, float] | None = None,
    **options: Any,
) -> tuple[Verdict, Count | None]:
    """`examine` for "module:function": a mechanism, a `Subject`, or a function that makes one without arguments."""
    found = load_target(target)
    if isinstance(found, Subject):
        changes: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "unit": unit}
        claim = dataclasses.replace(found.claim, **{k: v for k, v in changes.items() if v is not None})
    elif epsilon is None:
        raise AuditError(f"epsilon is missing; {target} is a plain function, so say what it claims")
    else:
        claim = Claim(epsilon, delta or 0.0, unit or "example", adjacency or "add/remove")  # type: ignore[arg-type]
    return examine(_subject(found, claim, None, domain, None), **options)


def audit_target(target: str, **options: Any) -> Verdict:
    """The verdict on "module:function"; the options are those of `examine_target`, the claim's numbers first of all."""
    return examine_target(target, **options)[0]


def load_target(target: str) -> Mechanism | Subject:
    """What "module:function" names, such as fedsim.audit.mechanisms:laplace."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise AuditError(f"target is {target!r}; it must be module:function, such as mypackage.private:noisy_sum")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise AuditError(f"target is {target!r}, but {error}; give a module that Python can import") from error
    if isinstance(found, Subject):
        return found
    if not callable(found):
        raise AuditError(f"target {target!r} is {type(found).__name__}; it must be a function or a Subject")
    return _made(found)


def _made(found: Callable[..., Any]) -> Mechanism | Subject:
    """What a function that can be called without arguments makes, if that is a mechanism; else the function itself."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # written in C
        return found
    kinds = inspect.Parameter
    if any(
        one.default is kinds.empty and one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for one in parameters
    ):
        return found
    made = found()
    return made if isinstance(made, Subject) or callable(made) else found
