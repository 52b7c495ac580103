# SPDX-License-Identifier: Apache-2.0
"""What a scenario's defence has spent, after every round and at the end, and the noise that a target needs.

What is promised to whom is in `promises`; here are the numbers. Participation is known (it is a function of the seed,
not of anybody's data), so a claim is made for the client that spent most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Account, Mechanism, account, smallest_noise
from fedsim.privacy.claim import PrivacyClaim, Unit
from fedsim.privacy.loss import COARSE, FINE, ROUGH, Grid
from fedsim.privacy.promises import SERVER, Exposure, Noise, Promise, Setting, Steps, promises
from fedsim.scenario import ClientDp, ExampleDp, Scenario

_Step = tuple[Mechanism, int]


def claims(scenario: Scenario, setting: Setting, noise: Noise) -> tuple[PrivacyClaim, ...]:
    """What the defence has spent after a run with this participation. The first claim is against the server.

    Empty without example_dp and client_dp: compression and secure aggregation alone support no claim. Where noise is 0,
    the claim is there and its epsilon is infinite. With both defences, the client's claim comes first: it covers more.
    """
    grids = (ROUGH, COARSE, FINE)
    made = [_claim(promise, setting, scenario, grids) for promise in promises(scenario, setting, noise)]
    return tuple(claim for claim in made if _says_something(claim, made))


def privacy_curve(
    scenario: Scenario,
    noise: Noise,
    cohorts: Sequence[Iterable[int]],
    examples: Callable[[int], int],
    sample_rate: float,
    most: Callable[[int], int] = lambda _: 0,
) -> list[tuple[PrivacyClaim, ...]]:
    """The claims after each round, given who took part in each; no ε ever falls. The last equal `claims` at the end."""
    settings = settings_by_round(cohorts, examples, sample_rate, most)
    if not settings:
        return []
    curves = [_curve(promise, settings, scenario) for promise in promises(scenario, settings[-1], noise)]
    final = [curve[-1] for curve in curves]
    curves = [curve for curve in curves if _says_something(curve[-1], final)]
    return list(zip(*curves, strict=True)) if curves else [()] * len(settings)


def _says_something(claim: PrivacyClaim, others: Sequence[PrivacyClaim]) -> bool:
    """An outsider sees no more than the server does, so a claim against it says something only if it is smaller."""
    server = min(
        (other.epsilon for other in others if other.unit == claim.unit and other.observer == SERVER), default=0
    )
    return claim.observer == SERVER or claim.epsilon < server


def settings_by_round(
    cohorts: Sequence[Iterable[int]],
    examples: Callable[[int], int],
    sample_rate: float,
    most: Callable[[int], int] = lambda _: 0,
) -> list[Setting]:
    """The participation up to and including each round. Only clients that take part are ever looked at.

    Of the clients with the same number of examples, the one that took part most often stands for all. `most` is the
    largest number that a client has held, where there were several; a client that stands twice in a cohort took part
    twice.
    """
    participations: dict[int, int] = {}
    often: dict[tuple[int, int], int] = {}
    settings = []
    for number, cohort in enumerate(cohorts, start=1):
        for member in cohort:
            client = int(member)
            sizes = examples(client), most(client)
            participations[client] = participations.get(client, 0) + 1
            often[sizes] = max(often.get(sizes, 0), participations[client])
        exposures = tuple(sorted(Exposure(count, *sizes) for sizes, count in often.items()))
        settings.append(Setting(number, sample_rate, exposures))
    return settings


def resolve_noise(scenario: Scenario, setting: Setting) -> Noise:
    """The noise multipliers: as given, or the smallest that keep target_epsilon at the end, for the worst client.

    The target is for the claim against the server, which is the first one of each unit.
    """
    defence = scenario.defence
    example, client = defence.example_dp, defence.client_dp
    return Noise(
        example=None if example is None else _resolve(example, scenario, setting, "example"),
        client=None if client is None else _resolve(client, scenario, setting, "client"),
    )


@contextmanager
def _in_scenario(unit: Unit) -> Iterator[None]:
    """What an accountant finds wrong with its own arguments, told of the scenario's field that they are from."""
    try:
        yield
    except PrivacyError as error:
        field = str(error).split(" ", 1)[0]
        section = {"accountant": "defence.", "delta": f"defence.{unit}_dp.", "target_epsilon": f"defence.{unit}_dp."}
        raise PrivacyError(f"{section.get(field, '')}{error}") from error


def _resolve(section: ExampleDp | ClientDp, scenario: Scenario, setting: Setting, unit: Unit) -> float:
    if section.noise_multiplier is not None:
        return section.noise_multiplier
    target, field = section.target_epsilon, f"defence.{unit}_dp"
    if target is None:
        raise PrivacyError(f"{field} has neither noise_multiplier nor target_epsilon; give one")

    def spenders(sigma: float) -> list[_Step]:
        """Those who may be the worst; their order does not depend on σ."""
        made = promises(scenario, setting, Noise(sigma, sigma))
        return _candidates(next(promise for promise in made if promise.unit == unit).steps(setting))

    def spends(index: int, sigma: float) -> float:
        return account([spenders(sigma)[index]], section.delta, scenario.defence.accountant, COARSE).epsilon

    def worst(sigma: float) -> tuple[int, float]:
        steps = spenders(sigma)
        step, spent = _worst(steps, section.delta, scenario, (ROUGH, COARSE))
        return steps.index(step), spent.epsilon

    if not spenders(1.0):
        raise PrivacyError(f"{field}.target_epsilon has nobody to protect: nobody with examples takes part")
    adaptive = section.adaptive if isinstance(section, ClientDp) else None
    with _in_scenario(unit):
        bits_alone = worst(1e6)[1] if adaptive else 0.0
    if adaptive and bits_alone > target:
        raise PrivacyError(
            f"{field}.adaptive.bit_noise {adaptive.bit_noise:g} alone spends more than target_epsilon {target:g};"
            " use a larger bit_noise"
        )
    with _in_scenario(unit):
        return _noise_for_all(spends, worst, target)


def _noise_for_all(
    spends: Callable[[int, float], float], worst: Callable[[float], tuple[int, float]], target: float
) -> float:
    """The smallest σ with which nobody spends more than the target: that of the worst, unless it makes another so.

    Six digits, rounded up: what is printed of it is then what is used.
    """
    index, sigma = worst(1.0)[0], 0.0
    while True:
        sigma = max(sigma * (1 + 1e-5), smallest_noise(partial(spends, index), target))
        index, most = worst(sigma)
        if most <= target:
            unit = 10.0 ** (math.floor(math.log10(sigma)) - 5)
            return float(f"{math.ceil(sigma / unit) * unit:.6g}")


# --- the worst client -----------------------------------------------------------------------------------------------


def _candidates(steps: Steps) -> list[_Step]:
    """Those that no other outdoes in both sample rate and compositions, in which ε never decreases; σ is one."""
    front: list[_Step] = []
    for mechanism, count in sorted(steps, key=lambda step: (-step[0].sample_rate, -step[1])):
        if not front or count > front[-1][1]:
            front.append((mechanism, count))
    return front


def _worst(steps: Sequence[_Step], delta: float, scenario: Scenario, grids: Sequence[Grid]) -> tuple[_Step, Account]:
    """Who spent most, and how much on the last of the grids.

    Best first: whoever has the largest bound is looked at on the next finer grid, until the largest bound is a final
    one. It is then an upper bound for all: every other has spent less than its own bound, which is smaller.
    """
    accountant = scenario.defence.accountant
    finest = len(grids) - 1
    bounds: dict[_Step, tuple[Account, int]] = {}
    for step in steps:
        exact = accountant != "pld" or not step[0].sampled
        level = finest if exact else 0
        bounds[step] = (account([step], delta, accountant, grids[level]), level)
    while True:
        step, (spent, level) = max(bounds.items(), key=lambda item: item[1][0].epsilon)
        if level == finest:
            return step, spent
        bounds[step] = (account([step], delta, accountant, grids[level + 1]), level + 1)


def _claim(promise: Promise, setting: Setting, scenario: Scenario, grids: Sequence[Grid]) -> PrivacyClaim:
    """The claim of the client that spent most."""
    steps = _candidates(promise.steps(setting))
    if not steps:
        return promise.claim(*promise.nothing(), Account(0.0, "nothing released"))
    with _in_scenario(promise.unit):
        step, spent = _worst(steps, promise.delta, scenario, grids)
    return promise.claim(*step, spent)


def _curve(promise: Promise, settings: Sequence[Setting], scenario: Scenario) -> list[PrivacyClaim]:
    """The claim after each round: fine after the last, coarse before.

    Fine and coarse bounds differ in the fifth digit, and PRV has a slack of its own: no round shows more than the end,
    which is an upper bound for it too, or less than the round before.
    """
    final = _claim(promise, settings[-1], scenario, (ROUGH, COARSE, FINE))
    curve: list[PrivacyClaim] = []
    for before, setting in zip([None, *settings], settings[:-1], strict=False):
        if before is not None and promise.steps(before) == promise.steps(setting):
            curve.append(curve[-1])
            continue
        claim = _claim(promise, setting, scenario, (ROUGH, COARSE))
        least = curve[-1].epsilon if curve else 0.0
        curve.append(dataclasses.replace(claim, epsilon=max(least, min(claim.epsilon, final.epsilon))))
    return [*curve, final]
