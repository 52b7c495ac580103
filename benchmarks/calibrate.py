# SPDX-License-Identifier: Apache-2.0
"""Is the auditor itself right? Coverage of its bounds, the zoo of broken mechanisms, the included mechanisms.

    python benchmarks/calibrate.py [--quick] [--out FILE] [coverage] [audits] [exact] [zoo] [mechanisms]

Writes tables for the README. Everything is seeded: the same machine gives the same tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.audit.blackbox.distinguishing import gaussian_mu
from fedsim.audit.blackbox.running import Vectorised
from fedsim.audit.calibration.coverage import coverage_table
from fedsim.audit.calibration.exact import WORSE, tallies
from fedsim.audit.mechanism import Subject, audit_mechanism
from fedsim.audit.mechanisms import included
from fedsim.audit.verdict import Claim
from fedsim.audit.zoo import zoo
from fedsim.errors import AuditError
from fedsim.privacy.rounding import rounded_down

Lines = Iterator[str]
PAIR = [(np.ones(1), np.zeros(1))]


def tight_mechanisms() -> dict[str, Subject]:
    """Mechanisms whose ε is known and attained: what is called a violation of them is a false alarm."""
    truth = float(1 / (1 + np.exp(-1)))
    mu = gaussian_mu(1.0, 1e-2)
    sampled = 0.5

    def response(x: Any, rng: np.random.Generator, n: int) -> Any:
        return (rng.random(n) < (truth if x[0] else 1 - truth)).astype(int)

    def subsampled(x: Any, rng: np.random.Generator, n: int) -> Any:
        return x[0] * (rng.random(n) < sampled) + rng.normal(0, 1.0, n)

    def excused(x: Any, rng: np.random.Generator, n: int) -> Any:
        return np.where(rng.random(n) < 1e-2, 9.0 * x[0], response(x, rng, n))

    from fedsim.privacy.accounting import Mechanism, epsilon

    known = epsilon(Mechanism("gaussian", 1.0, "add/remove", "poisson", sampled), 1, 1e-2)
    return {
        "randomised response": Subject(Vectorised(response), Claim(1.0), PAIR),
        "Laplace": Subject(Vectorised(lambda x, rng, n: x[0] + rng.laplace(size=n)), Claim(1.0), PAIR),
        "Gaussian": Subject(Vectorised(lambda x, rng, n: mu * x[0] + rng.normal(size=n)), Claim(1.0, 1e-2), PAIR),
        "subsampled Gaussian": Subject(Vectorised(subsampled), Claim(known, 1e-2), PAIR),
        "all of δ used": Subject(Vectorised(excused), Claim(1.0, 1e-2), PAIR),
    }


def audits(quick: bool) -> Lines:
    """False alarms of `audit_mechanism` itself, with everything that it chooses on the way."""
    count = 50 if quick else 1000
    yield f"{count} audits of 1,000 runs each; the claims are exact.\n"
    yield "| mechanism | lower bound above the truth | called violated | mean lower / ε |"
    yield "|---|---|---|---|"
    for name, subject in tight_mechanisms().items():
        verdicts = [audit_mechanism(subject, trials=1000, seed=seed) for seed in range(count)]
        above = np.mean([verdict.lower > subject.claim.epsilon for verdict in verdicts])
        violated = np.mean([verdict.status == "violated" for verdict in verdicts])
        mean = np.mean([verdict.lower for verdict in verdicts]) / subject.claim.epsilon
        limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)
        mark = "" if above <= limit else " **too often**"
        yield f"| {name} | {above:.1%}{mark} | {violated:.1%} | {mean:.2f} |"


def exact(quick: bool) -> Lines:
    """Whole audits of mechanisms that the auditor was not developed on: their claims are exact; their twins are not."""
    count = 20 if quick else 200
    yield f"{count} audits each, 2,000 runs (8,000 where the auditor makes data sets); twins have {WORSE:g} ε.\n"
    yield "| mechanism | claim | lower bound above the truth | called violated | mean lower / ε | twins violated |"
    yield "|---|---|---|---|---|---|"
    for one in tallies(count, 2000, seed=1000):
        claim = f"ε = {one.claim.epsilon:.3f}, δ = {one.claim.delta:g}"
        mark = "" if one.acceptable() else " **too often**"
        share = one.mean_lower / one.claim.epsilon
        yield f"| {one.name} | {claim} | {one.above}{mark} | {one.violated} | {share:.2f} | {one.found} |"


def coverage(quick: bool) -> Lines:
    """Of every estimator: how often its 95% lower bound is above the truth, which must be at most 5%, but for luck."""
    yield "| estimator | tier | mechanism | false claims | mean lower | truth |"
    yield "|---|---|---|---|---|---|"
    for cell in coverage_table(100 if quick else 1000, seed=0):
        mark = "" if cell.acceptable() else " **too often**"
        yield (
            f"| {cell.estimator} | {cell.tier} | {cell.mechanism} | {cell.false_claims} of {cell.audits}{mark} |"
            f" {cell.mean_lower:.3f} | {cell.truth:.3f} |"
        )


def broken(quick: bool) -> Lines:
    """The zoo."""
    yield "| broken mechanism | claim | proved | p | runs | repaired twin | runs |"
    yield "|---|---|---|---|---|---|---|"
    found = left = 0
    everything = zoo()
    for name, one in list(everything.items())[:: 6 if quick else 1]:
        bad, good = audit_mechanism(one.broken), audit_mechanism(one.repaired)
        found += bad.status == "violated"
        left += good.status == "consistent"
        claim = f"ε = {bad.claim.epsilon:.3g}, δ = {bad.claim.delta:g}"
        yield (
            f"| {name}: {one.story} | {claim} | {bad.status}, ε ≥ {rounded_down(bad.lower, 2)} | {bad.p_value:.0e} |"
            f" {bad.trials:,} | {good.status}, ε ≥ {rounded_down(good.lower, 2)} | {good.trials:,} |"
        )
    yield f"\n{found} found violated, {left} twins consistent, of {len(everything)}."


def mechanisms(quick: bool) -> Lines:
    """Those that can be audited by name."""
    yield "| mechanism | claim | exact ε | verdict | proved (A) | Gaussian model (B) | runs | gap |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, make in included().items():
        if quick and not name.startswith(("laplace", "ridge")):
            continue
        subject = make()
        stated = subject.claim
        claim = f"ε = {stated.epsilon:.3f}, δ = {stated.delta:g}, {stated.adjacency} one {stated.unit}"
        try:
            verdict = audit_mechanism(subject)
        except AuditError as error:  # it releases nothing
            yield f"| {name} | {claim} | – | refused: {error} | – | – | – | – |"
            continue
        model = next((rounded_down(line.lower, 2) for line in verdict.estimates if line.tier == "B"), "–")
        exact = "–" if subject.exact_epsilon is None else f"{subject.exact_epsilon:.3f}"
        yield (
            f"| {name} | {claim} | {exact} | {verdict.status} | ε ≥ {rounded_down(verdict.lower, 2)} | {model} |"
            f" {verdict.trials:,} | {verdict.gap.sentence()} |"
        )


PARTS: dict[str, Callable[[bool], Lines]] = {
    "coverage": coverage,
    "audits": audits,
    "exact": exact,
    "zoo": broken,
    "mechanisms": mechanisms,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], metavar="part")
    parser.add_argument("--quick", action="store_true", help="a few minutes")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    lines: list[str] = []
    for part in options.parts:
        start = time.process_time()
        for line in (f"\n### {part}\n", *_printed(PARTS[part](options.quick))):
            lines.append(line)
        lines.append(f"\n({time.process_time() - start:.0f} CPU seconds)")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def _printed(lines: Lines) -> Lines:
    for line in lines:
        print(line, flush=True)
        yield line


if __name__ == "__main__":
    sys.exit(main())
