# SPDX-License-Identifier: Apache-2.0
"""What the charges of a ledger spent together.

The total is not a sum of epsilons. All releases of a data set are composed together by the accountant (PLD), for
the unit and the δ that is asked for:

| asked for | a release that was charged for ... | counts as                                                          |
|-----------|------------------------------------|--------------------------------------------------------------------|
| example   | examples (or both)                 | what was charged                                                   |
| example   | the client only                    | the same noise: all of the data may be other, so may one example;  |
|           |                                    | if charged under add/remove, with half the multiplier (replace)    |
| client    | the client (or both)               | what was charged                                                   |
| client    | examples only                      | infinite: nothing was promised for all of the data                 |

Where releases under add/remove and under replace come together, the ε is that of add/remove (the unit's contribution
becomes zero): leaving a unit out moves a clipped sum by at most as much as replacing it does, so the multiplier of a
release under replace is a lower bound for it. Amplification by fixed-size sampling is then left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.privacy.accounting import Mechanism, account
from fedsim.privacy.claim import Adjacency, Unit
from fedsim.privacy.rounding import rounded_up


@dataclass(frozen=True)
class Charge:
    """One line of the ledger: what a release spent for one unit."""

    time: float
    dataset: str
    run: str
    round: int
    attempt: str
    """Names one release: the charges of its units share it, and no other release has it."""
    unit: Unit
    mechanism: Mechanism
    compositions: int


@dataclass(frozen=True)
class Spent:
    """What all releases of a data set spent together, for a unit and a δ."""

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    method: str

    def __str__(self) -> str:
        return f"ε ≤ {rounded_up(self.epsilon)} at δ = {self.delta:g} ({self.adjacency} one {self.unit}; {self.method})"


def compose(charges: Sequence[Charge], unit: Unit, delta: float) -> Spent:
    """All charges composed into one ε for a unit at δ, by the table above."""
    releases: dict[tuple[str, str, int, str], dict[Unit, Charge]] = {}
    for charge in charges:
        releases.setdefault((charge.dataset, charge.run, charge.round, charge.attempt), {})[charge.unit] = charge
    steps: list[tuple[Mechanism, int]] = []
    for parts in releases.values():
        charge = parts.get(unit) or next(iter(parts.values()))
        steps.append((_as_unit(charge, unit), charge.compositions))
    kinds = {mechanism.adjacency for mechanism, _ in steps}
    if len(kinds) > 1:
        steps = [(_without_unit(mechanism), count) for mechanism, count in steps]
    adjacency: Adjacency = "replace" if kinds == {"replace"} else "add/remove"
    found = account(steps, delta)
    return Spent(found.epsilon, delta, unit, adjacency, found.method)


def _as_unit(charge: Charge, unit: Unit) -> Mechanism:
    """What a release promised to the unit, if it was charged for another one."""
    mechanism = charge.mechanism
    if charge.unit == unit:
        return mechanism
    if unit == "client":
        return Mechanism("gaussian", 0.0, mechanism.adjacency)
    if mechanism.adjacency == "replace":
        return mechanism
    return Mechanism(mechanism.kind, mechanism.noise_multiplier / 2, "replace")


def _without_unit(mechanism: Mechanism) -> Mechanism:
    """A mechanism under add/remove, at most as private as the one that is given."""
    if mechanism.adjacency == "add/remove":
        return mechanism
    return Mechanism(mechanism.kind, mechanism.noise_multiplier, "add/remove")
