# SPDX-License-Identifier: Apache-2.0
"""What each defence promises: to whom, about what, and by which mechanism, composed how often.

One rule decides every case: sampling amplifies privacy only against an observer who does not know who was sampled.
A client draws its batches in secret, so Poisson batches count. The server calls the clients of a round by name, so the
cohort never counts against it; it counts against those who see nothing but the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fedsim.errors import PrivacyError
from fedsim.privacy.accounting import Account, Mechanism
from fedsim.privacy.claim import Adjacency, PrivacyClaim, Sampling, Unit
from fedsim.privacy.mechanisms import effective_noise_multiplier
from fedsim.scenario import ClientDp, ExampleDp, Scenario

SERVER = "the server, which knows who takes part in which round"
OUTSIDER = "whoever sees the model after every round, but not who took part"

_IDEAL = "the noise is drawn from the ideal distribution: effects of floating-point numbers are not counted"
_NOTHING_ELSE = "nothing else that depends on the data is released: no training loss, no norm before clipping"
_INDEPENDENT = "who takes part, and who fails, does not depend on anybody's data"
_SEED = (
    "this is a simulation: noise, batches and cohorts follow from the scenario's seed, which must stay secret, and no"
    " other run with the same seed is released"
)
_OWN_LEDGER = (
    "a client holds as many examples as it says with its update or, where no update came or only a sum was seen,"
    " between the numbers that its own policy vouches for (smallest_examples, largest_examples), outside of which it"
    " refuses to train; every request that was sent to a client counts, answered or not; what a client has really spent"
    " stands in its own ledger, which is charged less where it holds more rows than it vouches for, and more where it"
    " does not count the noise of others"
)
_ENCODED = {"breast_cancer", "csv", "text", "descriptions", "hub"}
_PUBLIC_ENCODING = (
    "how the data is encoded (means and scales of columns, categories, vocabulary) is public: agreed on beforehand,"
    " not taken from the clients' rows, as this simulation takes it"
)
_TEXTS = {"text", "descriptions"}
_SEPARATE = (
    "the model computes each example by itself, whatever else is in its batch: this was tried with a few examples only"
)
_WINDOW = "an example is a window of text with its targets: a token at the edge of two windows is in two examples"


@dataclass(frozen=True, order=True)
class Exposure:
    """What one client did: in how many rounds it took part, with how many examples."""

    participations: int
    examples: int
    """How many it holds; of several numbers that it has held, the smallest."""
    most: int = 0
    """Of several numbers, the largest."""


@dataclass(frozen=True)
class Setting:
    """Who took part, as far as it matters: `exposures` are the distinct ones of all clients that did."""

    rounds: int
    sample_rate: float
    """The probability that a client is in a round's cohort: cohort size / population."""
    exposures: tuple[Exposure, ...]

    def most_participations(self) -> int:
        """In how many rounds the most frequent client took part."""
        return max((exposure.participations for exposure in self.exposures), default=0)


@dataclass(frozen=True)
class Noise:
    """The noise multipliers that are really used, given or found; None without that part of the defence."""

    example: float | None = None
    client: float | None = None


Steps = set[tuple[Mechanism, int]]


@dataclass(frozen=True)
class Promise:
    """A claim before it is known what happened: everything but the number."""

    unit: Unit
    adjacency: Adjacency
    observer: str
    released: str
    mechanism: str
    delta: float
    assumptions: tuple[str, ...]
    steps: Callable[[Setting], Steps]
    """(mechanism, compositions) of every client, or of some that include the worst; all with one noise multiplier."""

    def claim(self, mechanism: Mechanism, compositions: int, spent: Account) -> PrivacyClaim:
        """The claim, once it is known what was spent."""
        return PrivacyClaim(
            epsilon=spent.epsilon,
            delta=self.delta,
            unit=self.unit,
            adjacency=self.adjacency,
            sampling=mechanism.sampling,
            released=self.released,
            observer=self.observer,
            accountant=spent.method,
            mechanism=self.mechanism,
            noise_multiplier=mechanism.noise_multiplier,
            sample_rate=mechanism.sample_rate,
            compositions=compositions,
            assumptions=self.assumptions,
        )

    def nothing(self) -> tuple[Mechanism, int]:
        """What is composed as long as nobody has taken part."""
        return Mechanism("gaussian", 0.0, self.adjacency), 0


def promises(scenario: Scenario, setting: Setting, noise: Noise) -> list[Promise]:
    """Everything that the defence promises; the first is against the server. Compression alone promises nothing."""
    defence, made = scenario.defence, []
    if defence.client_dp is not None:
        made += _client_promises(scenario, defence.client_dp, setting, _given(noise.client, "client"))
    if defence.example_dp is not None:
        made.append(_example_promise(scenario, defence.example_dp, _given(noise.example, "example")))
    here = _OWN_LEDGER if scenario.engine.kind == "deploy" else _SEED
    common = (_PUBLIC_ENCODING, here) if scenario.data.source in _ENCODED else (here,)
    return [replace(promise, assumptions=(*promise.assumptions, *common)) for promise in made]


def _given(sigma: float | None, unit: Unit) -> float:
    if sigma is None:
        raise PrivacyError(f"defence.{unit}_dp is there, but its noise multiplier is not resolved; use resolve_noise")
    return sigma


# --- examples -------------------------------------------------------------------------------------------------------


def _example_promise(scenario: Scenario, section: ExampleDp, sigma: float) -> Promise:
    """Every step of a client's DP-SGD adds N(0, (σC)²) to a sum of gradients clipped to C.

    Poisson batches, add/remove: an example joins a step with probability q = min(1, B/n) and then moves the sum by at
    most C. The server sees the update, which is computed from all steps, but not the batches: each local step counts as
    one sampled release, in every round in which the client took part.

    Shuffled batches, replace: in an epoch an example is in exactly one batch, whose sum moves by at most 2C if it is
    another; given what came before, the other batches do not depend on it (parallel composition, for every
    order, hence also for a random one). So every epoch that is begun counts as one release with multiplier σ/2.

    Secure aggregation: a sum of updates has the noise of this client and more, so the same holds for it.
    """
    poisson = section.batches == "poisson"

    def steps(setting: Setting) -> Steps:
        seen = [exposure for exposure in setting.exposures if exposure.examples > 0]
        return {_example_step(scenario, exposure, sigma, poisson) for exposure in seen}

    sharing = getattr(scenario.partition, "examples_per_client", None) is not None
    sums = scenario.defence.secure_aggregation
    batches = "Poisson" if poisson else "shuffled"
    return Promise(
        unit="example",
        adjacency="add/remove" if poisson else "replace",
        observer=SERVER,
        released="the sum of the updates of every round" if sums else "every update of every client",
        mechanism=f"Gaussian noise of {sigma:g} clipping norms in every local step, {batches} batches",
        delta=section.delta,
        assumptions=(
            "the unit is one example at one client; a record that several clients hold is a unit at each of them"
            + (" (here clients draw from the same rows, which stand for different people)" if sharing else ""),
            "how many examples a client holds is public, and so are the sampling rate and the number of steps; to"
            " remove an example means that it contributes nothing, while these stay",
            *((_WINDOW,) if scenario.data.source in _TEXTS else ()),
            *((_SEPARATE,) if scenario.model.name.startswith("import:") else ()),
            *(("the client draws its batches in secret, each example independently",) if poisson else ()),
            _INDEPENDENT,
            _NOTHING_ELSE,
            _IDEAL,
        ),
        steps=steps,
    )


def rows_needed(scenario: Scenario) -> tuple[bool, bool]:
    """Whether what an example spends depends on the fewest rows of its client, and on the most; see `_example_step`.

    Fewer rows mean a larger sampling rate; more of them, where work is counted in epochs, mean more steps. So a lower
    bound alone bounds nothing there: at noise 0.6, batches of 20 and two rounds, 100 rows spend more than 11.
    """
    section, client = scenario.defence.example_dp, scenario.client
    if section is None or client.batch_size is None:  # a batch of all rows is joined by each of them, however many
        return False, False
    counts_steps = scenario.strategy.name == "fedsgd" or client.steps is not None
    if section.batches == "poisson":
        return True, not counts_steps
    return client.steps is not None, False


def _example_step(scenario: Scenario, exposure: Exposure, sigma: float, poisson: bool) -> tuple[Mechanism, int]:
    """What one client's examples went through: sampled local steps, or epochs.

    Fewer examples mean a larger sampling rate, and more epochs for given steps; more examples mean more steps. A client
    that has held several numbers of them has the largest of each, which nothing that it did exceeds: with either number
    in all rounds ε can be smaller than with both in turn.
    """
    rows, client = exposure.examples, scenario.client
    batch = min(client.batch_size or rows, rows)
    fewest, most = (math.ceil(n / min(client.batch_size or n, n)) for n in (rows, max(rows, exposure.most)))
    if scenario.strategy.name == "fedsgd":
        steps, epochs = 1, 1
    elif client.steps is not None:
        steps, epochs = client.steps, math.ceil(client.steps / fewest)
    else:
        steps, epochs = client.epochs * most, client.epochs
    if poisson:
        return Mechanism("gaussian", sigma, "add/remove", "poisson", batch / rows), exposure.participations * steps
    return Mechanism("gaussian", sigma / 2, "replace"), exposure.participations * epochs


# --- clients --------------------------------------------------------------------------------------------------------


def _client_promises(scenario: Scenario, section: ClientDp, setting: Setting, sigma: float) -> list[Promise]:
    if not scenario.defence.secure_aggregation:
        return [_local_promise(section, sigma)]
    if section.noise != "gaussian":
        raise PrivacyError(
            "defence.client_dp.noise is laplace with secure_aggregation, but shares of Laplace noise do not add up to"
            " Laplace noise; use noise: gaussian"
        )
    if scenario.defence.compression is not None:
        raise PrivacyError(
            f"defence.compression {scenario.defence.compression.kind} comes before the noise is complete, which clients"
            " share under secure_aggregation, so that no claim on the sum holds; leave one of the two out"
        )
    against_server = _sum_promise(section, sigma)
    return (
        [against_server, _outsider_promise(scenario, section, sigma)] if setting.sample_rate < 1 else [against_server]
    )


def _local_promise(section: ClientDp, sigma: float) -> Promise:
    """The client noises its own update, and the server sees whose it is: local differential privacy.

    Replace: all that a client holds may be something else, and its clipped update then moves by at most 2C, in L2 with
    Gaussian noise of standard deviation σC, in L1 with Laplace noise of scale σC: multiplier σ/2, once in
    every round in which the client took part. Compression afterwards is post-processing.
    """
    multiplier, kind = _multiplier(section, sigma, "replace"), section.noise.capitalize()
    return Promise(
        unit="client",
        adjacency="replace",
        observer=SERVER,
        released="every update of every client",
        mechanism=f"{kind} noise of {sigma:g} clipping norms on each client's update{_bit(section)}",
        delta=section.delta,
        assumptions=(_INDEPENDENT, _NOTHING_ELSE, _IDEAL),
        steps=lambda setting: _once_a_round(Mechanism(section.noise, multiplier, "replace"), setting),
    )


def _sum_promise(section: ClientDp, sigma: float) -> Promise:
    """The n clients of a round add N(0, (σC)²/n) each, and the server, which knows them, sees the noisy sum only.

    Add/remove: a client's update may be left out (be zero), which moves the sum by at most C: multiplier σ, without any
    amplification, once in every round in which the client took part.
    """
    multiplier = _multiplier(section, sigma, "add/remove")
    return Promise(
        unit="client",
        adjacency="add/remove",
        observer=SERVER,
        released="the sum of the updates of every round",
        mechanism=f"Gaussian noise of {sigma:g} clipping norms on the sum of each round{_bit(section)}",
        delta=section.delta,
        assumptions=_SHARED,
        steps=lambda setting: _once_a_round(Mechanism("gaussian", multiplier, "add/remove"), setting),
    )


def _outsider_promise(scenario: Scenario, section: ClientDp, sigma: float) -> Promise:
    """Who sees only the models does not know who took part, so that the sampling of the cohort amplifies.

    Poisson: add/remove, the sum moves by at most C, with the probability of joining. Fixed size: if one client is
    another (replace), the sum moves by at most 2C, with the share of the population that is drawn. Every round counts.
    """
    poisson = scenario.cohort.sampling == "poisson"
    adjacency: Adjacency = "add/remove" if poisson else "replace"
    sampling: Sampling = "poisson" if poisson else "fixed size"
    multiplier = _multiplier(section, sigma, adjacency)

    def steps(setting: Setting) -> Steps:
        return {(Mechanism("gaussian", multiplier, adjacency, sampling, setting.sample_rate), setting.rounds)}

    unseen = (
        "the sum is divided by the expected size of the cohort, its true size is not published, and in a round to which"
        " nobody comes the server adds the noise",
    )
    return Promise(
        unit="client",
        adjacency=adjacency,
        observer=OUTSIDER,
        released="the model after every round",
        mechanism=f"Gaussian noise of {sigma:g} clipping norms on the sum of each round{_bit(section)}",
        delta=section.delta,
        assumptions=("cohorts are drawn at random and kept secret", *(unseen if poisson else ()), *_SHARED),
        steps=steps,
    )


_SHARED = (
    "secure aggregation shows the sum of a round only; a round from which an update is missing is void",
    "every client of a round adds its share of the noise and knows by how many it is shared; if a fraction f does not,"
    " or tells it to the observer, the noise multiplier is √(1−f) of this",
    "to remove a client means that its update is zero, while its share of the noise stays",
    _INDEPENDENT,
    _NOTHING_ELSE,
    _IDEAL,
)


def _multiplier(section: ClientDp, sigma: float, adjacency: Adjacency) -> float:
    """Noise by sensitivity, in units of the clipping norm, of the update and, with adaptive clipping, the bit.

    The bit (0 or 1) moves by at most 1, whether the client is replaced or left out.
    """
    parts = [({"add/remove": 1.0, "replace": 2.0}[adjacency], sigma)]
    if section.adaptive is not None:
        parts.append((1.0, section.adaptive.bit_noise))
    return effective_noise_multiplier(*parts) if section.adaptive else parts[0][1] / parts[0][0]


def _bit(section: ClientDp) -> str:
    return f", and of {section.adaptive.bit_noise:g} on the bit of adaptive clipping" if section.adaptive else ""


def _once_a_round(mechanism: Mechanism, setting: Setting) -> Steps:
    most = setting.most_participations()
    return {(mechanism, most)} if most else set()
