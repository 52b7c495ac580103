# SPDX-License-Identifier: Apache-2.0
"""What a deployed client lets itself be asked for: its owner's policy, checked before anything is computed.

The server proposes (scenario and message), the policy disposes. What it does not allow is refused in one sentence that
goes back to the operator; nothing weaker is ever computed in its place. A reason names what was asked for and what is
allowed, both of which the server may know; of the data it tells at most that there are too few examples to take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from fedsim import scenario_yaml
from fedsim.errors import PolicyError, ScenarioError
from fedsim.federation.asked import Rows
from fedsim.privacy import Exposure, Mechanism, Noise, Setting, Unit
from fedsim.privacy.ledger import Budget, Ledger
from fedsim.privacy.promises import SERVER, promises
from fedsim.scenario import Scenario
from fedsim.scenario.section import Section

ModelName = Literal["logistic", "mlp", "cnn", "resnet8", "resnet18", "transformer"]
StrategyName = Literal["fedavg", "fedsgd"]
S = TypeVar("S", bound=Section)
LARGEST_NOISE = 1e6
"""A larger noise multiplier leaves nothing of an update, and has no meaning but to overflow something."""
SMALLEST_NORM = 1e-9
"""A smaller clipping norm has none either."""


class Policy(Section):
    """What the owner of a client's data allows."""

    dataset: str = Field("data", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """The name under which the ledger counts what this data has spent; the same data always has the same name."""
    unit: Unit = "example"
    """What must be protected: each example, or all that the client holds together."""
    least_noise_multiplier: float = Field(0.5, gt=0, le=LARGEST_NOISE)
    """Noise scale by clipping norm, at least; of every local step (unit example) or of the update (unit client)."""
    largest_clipping_norm: float = Field(10.0, ge=SMALLEST_NORM, le=1e9)
    """The norm to which gradients or updates are clipped, at most."""
    largest_epsilon: float = Field(8.0, gt=0)
    """The ε that all releases of this data may spend together, for ever; at `delta`, for one `unit`."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The δ of `largest_epsilon`; well below one over the number of units."""
    largest_epsilon_a_run: float | None = Field(6.0, gt=0)
    """The ε that one run may spend, so that no single one has all of `largest_epsilon`; a run that is resumed is a new
    one here. null: no bound of its own."""
    largest_epsilon_a_day: float | None = Field(6.0, gt=0)
    """The ε that the releases of 24 hours may spend together, by this machine's clock. null: no bound of its own."""
    most_local_epochs: int = Field(10, ge=1)
    """Passes over the data in a round, at most."""
    smallest_batch: int = Field(8, ge=1)
    """Examples in a batch, at least (with Poisson batches: expected)."""
    smallest_examples: int = Field(50, ge=1)
    """Examples that the client must hold to take part at all. The server is told this number, and its privacy claim
    counts on it wherever it does not see how many examples an answer was computed from."""
    largest_examples: int | None = Field(None, ge=1)
    """Examples that the client holds at most; with more it takes no part. The server is told. null: it promises no
    number, and the server can claim nothing that depends on it (local work counted in epochs, on Poisson batches)."""
    models: tuple[ModelName, ...] = ("logistic", "mlp", "cnn", "resnet8", "resnet18", "transformer")
    """Architectures that are trained."""
    strategies: tuple[StrategyName, ...] = ("fedavg", "fedsgd")
    """What may be sent: weight differences (fedavg), gradients (fedsgd)."""
    largest_message: int = Field(200_000_000, ge=1)
    """Bytes of a model, at most."""
    rounds_a_day: int = Field(200, ge=1)
    """Rounds that are answered in 24 hours, at most."""
    inspect_model: Literal["refuse", "warn"] = "refuse"
    """What is done with a model that looks as if it were made to leak (imprint blocks, trap weights, absurd norms)."""
    public_encoding: bool = False
    """true: the owner declares that the ranges and categories of its table's columns, or the vocabulary of its texts,
    are public. They are taken from its own rows, and no noise covers that. Without it only npz and images are read."""
    smallest_text: int = Field(32, ge=2)
    """Tokens in an example of a text, at least: the server says where a text is cut, and each piece is an example."""
    smallest_cohort: int = Field(3, ge=2)
    """Clients whose updates secure aggregation must add up, at least: each of two knows the other's from their sum."""
    count_noise_of_others: bool = False
    """Under secure aggregation clients share the noise. false: only this client's own share counts, because nothing
    proves that the others are there. true: the owner trusts the cohort, and the noise of the whole sum counts."""

    @model_validator(mode="after")
    def _sizes_are_in_order(self) -> Self:
        if self.largest_examples is not None and self.largest_examples < self.smallest_examples:
            raise ValueError(
                f"largest_examples {self.largest_examples} is below smallest_examples {self.smallest_examples}; raise"
                " it, or lower the other"
            )
        return self

    @property
    def rows(self) -> Rows:
        """What the owner vouches for; a client with fewer examples, or more, does not train."""
        return Rows(self.smallest_examples, self.largest_examples)

    @property
    def budget(self) -> Budget:
        """What the ledger holds this client to."""
        caps = (self.largest_epsilon_a_run, self.largest_epsilon_a_day)
        return Budget(self.unit, self.largest_epsilon, self.delta, self.rounds_a_day, *caps)


@dataclass(frozen=True)
class Request:
    """What a message asks of a client, beside its scenario."""

    round: int
    example_noise: float | None
    """The noise multiplier of local steps; None (or 0) without."""
    client_noise: float | None
    """The noise multiplier of the update; under secure aggregation that of the whole sum."""
    clipping_norm: float
    """The norm to which the update is clipped in this round (adaptive clipping moves it)."""
    model_bytes: int
    examples: int
    """How many examples this client holds."""
    counted: Rows | None = None
    """Between which numbers of examples the server's privacy claim takes it to hold, if it does."""
    sharing: int = 1
    """By how many clients the noise of the update is shared (secure aggregation)."""


def load_policy(path: Path) -> Policy:
    """The policy in a YAML file; what is left out is at its default."""
    return load_section(path, Policy, "policy", "write one with `fedsim deploy init`")


def load_section(path: Path, kind: type[S], what: str, remedy: str) -> S:
    """A file of a client's owner: a YAML mapping of the fields of a section; PolicyError says what is wrong with it."""
    try:
        document, lines = scenario_yaml.parse(scenario_yaml.read_text(Path(path)), str(path))
    except ScenarioError as error:
        raise PolicyError(str(error).replace("scenario file", f"{what} file")) from None
    if not isinstance(document, dict | None):
        raise PolicyError(f"{path}: a {what} is a mapping of fields to values; {remedy}")
    try:
        return kind.model_validate(document or {}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or what
        place = f"{path}:{lines.get(first['loc'][:1], 1)}"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise PolicyError(
                f"{place}: a {what} has no field {field}; its fields are {', '.join(kind.model_fields)}"
            ) from None
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}".removeprefix("value error, ")
        raise PolicyError(f"{place}: {field} is {first['input']!r}; {message}") from None


def policy_text() -> str:
    """A policy file with every field at its default, explained."""
    lines = ["# What this client lets itself be asked for. Whatever is not allowed here is refused."]
    for name, field in Policy.model_fields.items():
        value = scenario_yaml.dump({name: field.default}).strip()
        lines += ["", f"# {' '.join((field.description or '').split())}", value]
    return "\n".join(lines) + "\n"


def check_scenario(policy: Policy, scenario: Scenario, *, protected: bool) -> None:
    """Refuse what shows without the data: before anything of the client's is opened, so that nothing of it can show."""
    problems = list(_scenario_problems(policy, scenario))
    if protected and getattr(scenario.defence, f"{policy.unit}_dp") is None:
        problems.append(f"the unit {policy.unit} must be protected, but defence.{policy.unit}_dp is not there; add it")
    if problems:
        raise PolicyError(f"the client's policy refuses the run: {problems[0]}")


def _scenario_problems(policy: Policy, scenario: Scenario) -> Iterator[str]:
    if scenario.model.name not in policy.models:
        yield f"model {scenario.model.name} is not among {', '.join(policy.models)}; ask for one of them"
    if scenario.strategy.name not in policy.strategies:
        yield f"strategy {scenario.strategy.name} is not among {', '.join(policy.strategies)}; ask for one of them"
    cohort = scenario.cohort.size or scenario.cohort.population
    if scenario.defence.secure_aggregation and cohort is not None and cohort < policy.smallest_cohort:
        yield f"secure aggregation would add up {cohort} clients, at least {policy.smallest_cohort} are required"
    if (length := getattr(scenario.data, "length", policy.smallest_text)) < policy.smallest_text:
        yield f"data.length is {length}, at least {policy.smallest_text} tokens of a text are an example"


def check_request(policy: Policy, scenario: Scenario, request: Request) -> None:
    """Refuse what the policy does not allow; the budget and the rounds of a day are the ledger's (`charge_request`)."""
    for problem in _problems(policy, scenario, request):
        raise PolicyError(f"the client's policy refuses round {request.round}: {problem}")


def charge_request(policy: Policy, ledger: Ledger, scenario: Scenario, request: Request, run: str) -> None:
    """Charge what answering is going to spend, durably; or refuse, where it is over the budget."""
    parts = releases(policy, scenario, request)
    ledger.charge_release(policy.dataset, parts, run, request.round, budget=policy.budget)


def releases(policy: Policy, scenario: Scenario, request: Request) -> dict[Unit, tuple[Mechanism, int]]:
    """What the answer to a request spends against the server, for every unit that the scenario protects.

    It is what the scenario's own promises say of a client that takes part once, with the noise of this message.
    """
    setting = Setting(rounds=1, sample_rate=1.0, exposures=(Exposure(1, request.examples),))
    noise = Noise(request.example_noise or 0.0, _own_noise(policy, scenario, request))
    found: dict[Unit, tuple[Mechanism, int]] = {}
    for promise in promises(scenario, setting, noise):
        if promise.observer == SERVER:
            for step in promise.steps(setting):
                found[promise.unit] = step
    return found


def _own_noise(policy: Policy, scenario: Scenario, request: Request) -> float:
    """The multiplier that the client can count on."""
    shared = scenario.defence.secure_aggregation and not policy.count_noise_of_others
    return (request.client_noise or 0.0) / (math.sqrt(request.sharing) if shared else 1.0)


def _problems(policy: Policy, scenario: Scenario, request: Request) -> Iterator[str]:
    """Each thing that is not allowed. Comparisons are written so that what is not a number is never allowed."""
    yield from _scenario_problems(policy, scenario)
    if not request.model_bytes <= policy.largest_message:
        yield f"the model has {request.model_bytes} bytes, at most {policy.largest_message} are allowed"
    if not request.examples >= policy.smallest_examples:
        yield f"it takes part with at least {policy.smallest_examples} examples only, and does not hold as many"
    if policy.largest_examples is not None and not request.examples <= policy.largest_examples:
        yield f"it takes part with at most {policy.largest_examples} examples only, and holds more"
    if request.counted is not None and not policy.rows.within(request.counted):
        yield "the server's privacy claim counts on other numbers of rows than this policy vouches for; resume the run"
    yield from _work_problems(policy, scenario, request)
    yield from _noise_problems(policy, scenario, request)


def _work_problems(policy: Policy, scenario: Scenario, request: Request) -> Iterator[str]:
    """Where how many examples there are is kept from the server, it must not show in a refusal either.

    Then whatever takes part is taken to hold as many as it must hold at least.
    """
    client, secret = scenario.client, policy.unit == "client"
    rows = max(policy.smallest_examples if secret else request.examples, 1)
    batch = min(client.batch_size or rows, rows)
    if not batch >= min(policy.smallest_batch, rows):
        yield f"client.batch_size is {batch}, at least {policy.smallest_batch} is allowed"
    if scenario.strategy.name == "fedsgd":
        return
    # A batch that is larger than all examples is all of them, an epoch.
    epochs = client.epochs if client.steps is None else math.ceil(client.steps * batch / rows)
    if not epochs <= policy.most_local_epochs:
        # How many epochs some steps are tells how many examples there are, and is not said.
        asked = f"client.epochs is {epochs}" if client.steps is None else f"client.steps {client.steps} are too many"
        held = f" by a client with {rows} examples" if secret and client.steps is not None else ""
        yield f"{asked}, at most {policy.most_local_epochs} epochs are allowed{held}"


def _noise_problems(policy: Policy, scenario: Scenario, request: Request) -> Iterator[str]:
    defence, least, unit = scenario.defence, policy.least_noise_multiplier, policy.unit
    section = defence.example_dp if unit == "example" else defence.client_dp
    if section is None:
        yield f"the unit {unit} must be protected, but defence.{unit}_dp is not there; add it"
        return
    noise = request.example_noise if unit == "example" else _own_noise(policy, scenario, request)
    if not (noise or 0.0) >= least:
        shared = f" (its own share of a noise that {request.sharing} clients share)" if request.sharing > 1 else ""
        yield f"the noise multiplier for the unit {unit} is {noise or 0:g}{shared}, at least {least:g} is allowed"
    for kind, value in (("example", request.example_noise), ("client", request.client_noise)):
        if value is not None and not 0 <= value <= LARGEST_NOISE:
            yield f"the noise multiplier for the unit {kind} is {value:g}, at most {LARGEST_NOISE:g} is allowed"
    norms = {"defence.example_dp.clipping_norm": defence.example_dp.clipping_norm} if defence.example_dp else {}
    if defence.client_dp is not None:
        norms["the clipping norm of the update"] = request.clipping_norm
        yield from _client_noise_problems(policy, scenario)
    for name, norm in norms.items():
        if not SMALLEST_NORM <= norm <= policy.largest_clipping_norm:
            allowed = f"from {SMALLEST_NORM:g} to {policy.largest_clipping_norm:g}"
            yield f"{name} is {norm:g}, {allowed} is allowed"


def _client_noise_problems(policy: Policy, scenario: Scenario) -> Iterator[str]:
    section = scenario.defence.client_dp
    if section is None or section.adaptive is None:
        return
    bit_noise, least = section.adaptive.bit_noise, policy.least_noise_multiplier
    if not least <= bit_noise <= LARGEST_NOISE:
        yield f"defence.client_dp.adaptive.bit_noise is {bit_noise:g}, {least:g} to {LARGEST_NOISE:g} is allowed"
    if scenario.defence.secure_aggregation and not policy.count_noise_of_others:
        yield "adaptive clipping under secure aggregation shares the noise of the bit; leave adaptive out"
