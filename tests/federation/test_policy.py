# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedsim.errors import PolicyError
from fedsim.federation.asked import Rows
from fedsim.federation.client import app, workplace
from fedsim.federation.inline import InlineGrid
from fedsim.federation.plan import scenario_json
from fedsim.federation.policy import (
    Policy,
    Request,
    charge_request,
    check_request,
    load_policy,
    policy_text,
    releases,
)
from fedsim.federation.workplace import check_size
from fedsim.privacy import Mechanism, account
from fedsim.privacy.ledger import Ledger
from fedsim.scenario import Scenario

EXAMPLE = {"example_dp": {"noise_multiplier": 1.0, "clipping_norm": 1.0}}
CLIENT = {"client_dp": {"noise_multiplier": 4.0, "clipping_norm": 1.0}}
REQUEST = Request(round=1, example_noise=1.0, client_noise=None, clipping_norm=1.0, model_bytes=400_000, examples=200)


def scenario(**fields: Any) -> Scenario:
    return Scenario.model_validate({"model": {"name": "mlp"}, "defence": EXAMPLE, **fields})


def test_an_ordinary_private_scenario_passes_the_default_policy() -> None:
    check_request(Policy(), scenario(), REQUEST)
    check_request(
        Policy(unit="client"), scenario(defence=CLIENT), replace(REQUEST, example_noise=None, client_noise=4.0)
    )


SECURE_PAIR = {"defence": {**EXAMPLE, "secure_aggregation": True}, "cohort": {"population": 2}}
WEAKER: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("noise multiplier for the unit example is 0.4", {}, {}, {"example_noise": 0.4}),
    ("noise multiplier for the unit example is nan", {}, {}, {"example_noise": math.nan}),
    ("noise multiplier for the unit example is 0,", {}, {}, {"example_noise": None}),
    ("noise multiplier for the unit example is inf, at most 1e+06", {}, {}, {"example_noise": math.inf}),
    ("noise multiplier for the unit example is 1e+300, at most 1e+06", {}, {}, {"example_noise": 1e300}),
    (
        "noise multiplier for the unit client is inf, at most 1e+06",
        {"unit": "client"},
        {"defence": CLIENT},
        {"client_noise": math.inf},
    ),
    (
        "clipping norm of the update is 1e-300, from 1e-09 to 10",
        {"unit": "client"},
        {"defence": CLIENT},
        {"client_noise": 4.0, "clipping_norm": 1e-300},
    ),
    ("defence.example_dp is not there", {}, {"defence": {}}, {}),
    ("defence.client_dp is not there", {"unit": "client"}, {}, {}),
    (
        "clipping_norm is 11",
        {},
        {"defence": {"example_dp": {"noise_multiplier": 1.0, "clipping_norm": 11.0}}},
        {},
    ),
    (
        "clipping norm of the update is 11",
        {"unit": "client"},
        {"defence": CLIENT},
        {"client_noise": 4.0, "clipping_norm": 11.0},
    ),
    (
        "clipping norm of the update is nan",
        {"unit": "client"},
        {"defence": CLIENT},
        {"client_noise": 4.0, "clipping_norm": math.nan},
    ),
    (
        "bit_noise is 0.1",
        {"unit": "client"},
        {"defence": {"client_dp": {"noise_multiplier": 4.0, "adaptive": {"bit_noise": 0.1}}}},
        {"client_noise": 4.0},
    ),
    (
        "its own share of a noise that 100 clients share",
        {"unit": "client"},
        {"defence": {**CLIENT, "secure_aggregation": True}},
        {"client_noise": 4.0, "sharing": 100},
    ),
    ("client.epochs is 11", {}, {"client": {"epochs": 11}}, {}),
    ("client.steps 111 are too many", {}, {"client": {"steps": 111}}, {}),
    ("client.batch_size is 4", {}, {"client": {"batch_size": 4}}, {}),
    ("at least 50 examples", {}, {}, {"examples": 49}),
    ("model resnet8 is not among mlp", {"models": ("mlp",)}, {"model": {"name": "resnet8"}}, {}),
    ("strategy fedsgd is not among fedavg", {"strategies": ("fedavg",)}, {"strategy": {"name": "fedsgd"}}, {}),
    ("bytes, at most 1000", {"largest_message": 1000}, {}, {}),
    ("secure aggregation would add up 2 clients, at least 3", {}, SECURE_PAIR, {}),
    ("at most 199 examples only", {"largest_examples": 199}, {}, {}),
    ("counts on other numbers of rows", {"smallest_examples": 60}, {}, {"counted": Rows(61)}),
    ("counts on other numbers of rows", {}, {}, {"counted": Rows(50, 1000)}),
    ("data.length is 2", {}, {"data": {"source": "text", "path": "x.txt", "length": 2}}, {}),
]


@pytest.mark.parametrize(("reason", "policy", "asked", "request_"), WEAKER, ids=[case[0] for case in WEAKER])
def test_what_is_weaker_is_refused_with_a_reason(
    reason: str, policy: dict[str, Any], asked: dict[str, Any], request_: dict[str, Any]
) -> None:
    with pytest.raises(PolicyError, match="the client's policy refuses round 1: ") as refused:
        check_request(Policy(**policy), scenario(**asked), replace(REQUEST, **request_))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("examples", [50, 51, 1000, 10**6])
def test_a_refusal_does_not_tell_how_many_examples_a_client_keeps_to_itself(examples: int) -> None:
    """A server could else find the number by asking for more and more steps, and no ledger would be charged."""
    asked = {"defence": CLIENT, "client": {"batch_size": 10}}
    request = replace(REQUEST, example_noise=None, client_noise=4.0, examples=examples)
    allowed = scenario(**asked | {"client": {"batch_size": 10, "steps": 50}})
    check_request(Policy(unit="client"), allowed, request)
    with pytest.raises(
        PolicyError, match="51 are too many, at most 10 epochs are allowed by a client with 50 examples"
    ):
        check_request(Policy(unit="client"), scenario(**asked | {"client": {"batch_size": 10, "steps": 51}}), request)


def test_the_noise_of_others_counts_only_if_the_owner_says_so() -> None:
    shared = scenario(defence={**CLIENT, "secure_aggregation": True})
    request = replace(REQUEST, client_noise=4.0, sharing=100)
    trusting = Policy(unit="client", count_noise_of_others=True)
    check_request(trusting, shared, request)
    assert releases(trusting, shared, request)["client"] == (Mechanism("gaussian", 4.0, "add/remove"), 1)
    assert releases(Policy(unit="client"), shared, request)["client"][0].noise_multiplier == pytest.approx(0.4)


def test_what_is_charged_is_what_the_scenario_promises(tmp_path: Path) -> None:
    asked, ledger = scenario(client={"epochs": 2, "batch_size": 20}), Ledger(tmp_path / "ledger.sqlite")
    mechanism = Mechanism("gaussian", 1.0, "add/remove", "poisson", 20 / 200)
    assert releases(Policy(), asked, REQUEST) == {"example": (mechanism, 20)}
    charge_request(Policy(), ledger, asked, REQUEST, "run-1")
    charge_request(Policy(), ledger, asked, replace(REQUEST, round=2), "run-1")
    expected = account([(mechanism, 40)], 1e-5).epsilon
    assert ledger.epsilon("data", "example", 1e-5) == pytest.approx(expected, rel=1e-12)
    assert ledger.epsilon("data", "client", 1e-5) == math.inf


def test_over_the_budget_nothing_is_charged_and_nothing_may_leave(tmp_path: Path) -> None:
    asked, ledger = scenario(), Ledger(tmp_path / "ledger.sqlite")
    policy, refused = Policy(largest_epsilon=3.0), ""
    for spent in range(200):
        try:
            charge_request(policy, ledger, asked, replace(REQUEST, round=spent), "run-1")
        except PolicyError as error:
            refused = str(error)
            break
    assert "largest_epsilon is 3 at δ = 1e-05 for one example" in refused
    assert spent >= 1
    assert len(ledger.charges()) == spent
    assert ledger.epsilon("data", "example", 1e-5) <= 3.0
    one = releases(policy, asked, REQUEST)["example"]
    assert ledger.would_spend("data", "example", *one, 1e-5) > 3.0
    with pytest.raises(PolicyError, match="rounds_a_day is 1"):
        charge_request(Policy(rounds_a_day=1), ledger, asked, REQUEST, "run-1")


QUIET = replace(REQUEST, example_noise=3.0)


def spend_until_refused(policy: Policy, ledger: Ledger, run: str) -> str:
    for round_ in range(300):
        try:
            charge_request(policy, ledger, scenario(), replace(QUIET, round=round_), run)
        except PolicyError as error:
            return str(error)
    return "never"


def test_no_run_has_all_of_the_budget_and_no_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is spent in a run, and in 24 hours, is composed by itself and held against a bound of its own."""
    ledger, now = Ledger(tmp_path / "ledger.sqlite"), [1e9]
    monkeypatch.setattr("fedsim.privacy.ledger.time", SimpleNamespace(time=lambda: now[0]))
    policy = Policy(largest_epsilon=1.5, largest_epsilon_a_run=1.0, largest_epsilon_a_day=1.2)
    one = releases(policy, scenario(), QUIET)["example"]

    def is_full(most: float) -> bool:
        return ledger.epsilon("data", "example", 1e-5) <= most < ledger.would_spend("data", "example", *one, delta=1e-5)

    assert "largest_epsilon_a_run is 1 at δ = 1e-05 for one example" in spend_until_refused(policy, ledger, "1")
    assert is_full(1.0)
    assert "largest_epsilon_a_day is 1.2 at" in spend_until_refused(policy, ledger, "2")
    assert is_full(1.2)
    now[0] += 86400 - 1
    assert "largest_epsilon_a_day" in spend_until_refused(policy, ledger, "3")
    assert is_full(1.2)
    now[0] += 2
    assert "largest_epsilon is 1.5" in spend_until_refused(policy, ledger, "3")
    assert is_full(1.5)


def test_a_clock_that_is_put_back_frees_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, now = Ledger(tmp_path / "ledger.sqlite"), [1e9]
    monkeypatch.setattr("fedsim.privacy.ledger.time", SimpleNamespace(time=lambda: now[0]))
    policy = Policy(largest_epsilon=8.0, largest_epsilon_a_run=None, largest_epsilon_a_day=1.0)
    assert "largest_epsilon_a_day" in spend_until_refused(policy, ledger, "1")
    spent = len(ledger.charges())
    for days in (-1, -2, -3650):
        now[0] = 1e9 + 86400.0 * days
        assert "largest_epsilon_a_day" in spend_until_refused(policy, ledger, str(days))
    assert len(ledger.charges()) == spent


def test_the_file_that_init_writes_is_the_default_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy_text())
    assert load_policy(file) == Policy()
    assert policy_text().count("\n# ") == len(Policy.model_fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("largest_epsilonn: 3", "policy.yaml:1: a policy has no field largest_epsilonn"),
        ("unit: example\nlargest_epsilon: -1", "policy.yaml:2: largest_epsilon is -1"),
        ("least_noise_multiplier: 1.0e+300", "policy.yaml:1: least_noise_multiplier is 1e+300"),
        ("least_noise_multiplier: .inf", "policy.yaml:1: least_noise_multiplier is inf"),
        ("least_noise_multiplier: .nan", "policy.yaml:1: least_noise_multiplier is nan"),
        ("largest_clipping_norm: 1.0e+300", "policy.yaml:1: largest_clipping_norm is 1e+300"),
        ("models: [vgg]", "policy.yaml:1: models.0 is 'vgg'"),
        ("- 1", "a policy is a mapping"),
        ("unit: [", "cannot be read as YAML"),
    ],
)
def test_a_wrong_policy_is_told_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError) as told:
        load_policy(file)
    assert words in str(told.value)


def test_a_missing_policy_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="policy file"):
        load_policy(tmp_path / "policy.yaml")


HUGE: list[dict[str, Any]] = [
    {"name": "mlp", "hidden": [10**6, 10**6]},
    {"name": "mlp", "hidden": [2**24, 2**24]},
    {"name": "mlp", "hidden": [2**24] * 1000},
    {"name": "cnn", "variant": "convnet", "width": 10**6},
    {"name": "resnet18", "width": 10**5},
]


@pytest.mark.parametrize("model", HUGE, ids=lambda model: str(model)[:60])
def test_a_huge_model_is_refused_before_it_is_built(model: dict[str, Any], tmp_path: Path) -> None:
    """Of which the memory that the process has at most is the witness."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = scenario_json(scenario(data="digits", model=model, cohort={"population": 3}))
    own = {"policy": str(tmp_path / "policy.yaml"), "partition-id": 0, "num-partitions": 3}
    context = Context(1, 2, own, RecordDict(), {"scenario": asked})  # type: ignore[arg-type]
    (tmp_path / "policy.yaml").write_text("")
    InlineGrid(1, lambda messages, contexts: [], {})
    config = ConfigRecord({"server-round": 1})
    reply = app(Message(RecordDict({"arrays": ArrayRecord(), "config": config}), 2, "train"), context)
    assert f"model {model['name']} would have more than largest_message 200000000 bytes" in reply.error.reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize(
    "model",
    [{"name": "mlp"}, {"name": "cnn"}, {"name": "cnn", "variant": "convnet"}, {"name": "resnet8"}],
)
def test_the_size_of_a_model_is_that_of_its_layout(model: dict[str, Any]) -> None:
    asked = scenario(data="digits", model=model)
    place = workplace(scenario_json(asked))
    shape = tuple(place.dataset.x_train.shape[1:])
    check_size(asked.model, shape, place.dataset, 4 * place.layout.size)
    with pytest.raises(PolicyError, match="ask for a smaller one"):
        check_size(asked.model, shape, place.dataset, 4 * place.layout.size - 1)
