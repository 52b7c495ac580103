# SPDX-License-Identifier: Apache-2.0
"""The server of a deployment claims no less than any client's ledger says was spent, whatever its own file holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from own_clients import VOUCHED, OwnClients, play

from fedsim.errors import RunError
from fedsim.federation import fleet
from fedsim.federation.asked import Journal, Rows
from fedsim.federation.folder import create_folder
from fedsim.federation.inline import error_reply
from fedsim.scenario_file import dump_scenario


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "POLL_SECONDS", (0.001, 0.01))
    monkeypatch.setattr(fleet, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "ASK_SECONDS", 0.2)


def spent(clients: OwnClients, numbers: range, unit: Any = "example") -> list[float]:
    return [clients.ledger(client).epsilon("data", unit, 1e-5) for client in numbers]


SECURE = {"example_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True}


def test_the_rows_of_the_servers_own_file_are_in_no_claim(tmp_path: Path, world: Any) -> None:
    """Three clients with 150 rows each, a server with 4,000: 0.421 was claimed where 3.068 was spent."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 150, VOUCHED.format(150)) for client in range(3)}
    changes: dict[str, Any] = {"client": {"batch_size": 30}, "defence": SECURE}
    run = play(clients.scenario(3, 5000, **changes), tmp_path / "run")
    ledgers = spent(clients, range(3))
    assert run.claim is not None
    assert run.claim.sample_rate == pytest.approx(0.2)
    assert run.claim.epsilon == pytest.approx(max(ledgers), rel=1e-6)
    assert min(ledgers) == max(ledgers)


def test_without_numbers_that_clients_vouch_for_there_is_no_claim(tmp_path: Path, world: Any) -> None:
    """And the sentence says who, and what to do."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(3)}
    world.node_config[1] = clients.add(1, 60, "largest_epsilon: 1000")
    run = play(clients.scenario(3, defence=SECURE), tmp_path / "run")
    assert run.claim is not None
    assert run.claim.epsilon == math.inf
    assert "client 1 may have answered round 1" in run.claim.sentence()
    assert "set smallest_examples and largest_examples in its policy.yaml" in run.claim.sentence()
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["privacy"][0]["epsilon"] == "inf"


def test_of_an_answer_that_never_came_the_number_is_the_one_that_was_vouched_for(tmp_path: Path, world: Any) -> None:
    """The client was charged; with the server's own file, which is larger, less would be claimed than it has spent."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {
        client: clients.add(client, rows, VOUCHED.format(rows)) for client, rows in enumerate((60, 70, 80))
    }
    world.behaviour = losing({(1, 0), (2, 0)})
    run = play(clients.scenario(3, 6000), tmp_path / "run")
    ledgers = spent(clients, range(3))
    assert run.claim is not None
    assert ledgers[0] == max(ledgers) == pytest.approx(run.claim.epsilon, rel=1e-6)


def test_an_exact_number_that_comes_with_an_update_is_used(tmp_path: Path, world: Any) -> None:
    """The default policy vouches for 50 rows at least, and the clients say that they have 90."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 90, "largest_epsilon: 1000") for client in range(3)}
    run = play(clients.scenario(3, 6000), tmp_path / "run")
    assert run.claim is not None
    assert run.claim.epsilon == pytest.approx(max(spent(clients, range(3))), rel=1e-6)


def test_a_lower_bound_is_enough_where_work_is_counted_in_steps(tmp_path: Path, world: Any) -> None:
    clients = OwnClients(tmp_path / "fed")
    policy = "smallest_examples: 60\nlargest_epsilon: 1000"
    world.node_config = {client: clients.add(client, rows, policy) for client, rows in enumerate((60, 70, 99))}
    run = play(clients.scenario(3, client={"batch_size": 10, "steps": 4}, defence=SECURE), tmp_path / "run")
    ledgers = spent(clients, range(3))
    assert run.claim is not None
    assert ledgers[0] == pytest.approx(run.claim.epsilon, rel=1e-6)
    assert ledgers[0] > ledgers[1] > ledgers[2]


def test_a_client_trains_with_the_rows_that_it_vouches_for_only(tmp_path: Path, world: Any) -> None:
    """Neither outside of its policy, nor when the policy was changed after the server was told."""
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(4)}
    world.node_config[1] = clients.add(1, 59, VOUCHED.format(60))
    world.node_config[2] = clients.add(2, 61, VOUCHED.format(60))

    def lowering(message: Message, context: Context, honest: Any) -> list[Message]:
        if context.node_config["partition-id"] == 3 and message.metadata.message_type == "train":
            clients.add(3, 60, VOUCHED.format(50).replace("largest_examples: 50", "largest_examples: 60"))
        return [honest(message, context)]

    world.behaviour = lowering
    run = play(clients.scenario(4), tmp_path / "run")
    reasons = {line.client: str(line.reason) for line in run.transcript.messages() if line.kind == "error"}
    assert "at least 60 examples only, and does not hold as many" in reasons[1]
    assert "at most 60 examples only, and holds more" in reasons[2]
    assert "counts on other numbers of rows than this policy vouches for" in reasons[3]
    assert [len(clients.ledger(client).charges()) for client in range(4)] == [2, 0, 0, 0]


def losing(lost: set[tuple[int, int]]) -> Callable[..., list[Message] | None]:
    """Answers of (round, client) to the request to train that are computed, charged, and never arrive."""

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message] | None:
        reply = honest(message, context)
        round_ = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        place = (round_, int(context.node_config["partition-id"]))
        return None if message.metadata.message_type == "train" and place in lost else [reply]

    return behaviour


def killing(at: tuple[int, int], kill: list[bool]) -> Callable[..., list[Message]]:
    """The server is killed once, after a client has answered."""

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        reply = honest(message, context)
        round_ = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        if message.metadata.message_type == "train" and (round_, context.node_config["partition-id"]) == at and kill:
            kill.clear()
            raise KeyboardInterrupt
        return [reply]

    return behaviour


DEFENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "poisson batches": ("example", {"example_dp": {"noise_multiplier": 0.8}}),
    "shuffled batches": ("example", {"example_dp": {"noise_multiplier": 0.8, "batches": "shuffle"}}),
    "both": ("example", {"example_dp": {"noise_multiplier": 0.8}, "client_dp": {"noise_multiplier": 2.0}}),
    "the client": ("client", {"client_dp": {"noise_multiplier": 2.0}}),
}
WORK = ({"batch_size": 10}, {"batch_size": 10, "steps": 3}, {"batch_size": None}, {"batch_size": 200, "epochs": 2})


def agree(data: st.DataObject, folder: Path, world: Any) -> None:
    """For every defence, sampling, sum, loss and interruption: never less than a ledger, and equal where rows are."""
    clients = OwnClients(folder / "fed")
    unit, defence = DEFENCES[data.draw(st.sampled_from(sorted(DEFENCES)), "defence")]
    secure = data.draw(st.booleans(), "secure aggregation")
    sizes = [data.draw(st.sampled_from([51, 60, 77, 130]), "rows") for _ in range(4)]
    exact = [data.draw(st.booleans(), "vouches for its very number") for _ in range(4)]
    policy = {True: f"unit: {unit}\n{VOUCHED}", False: f"unit: {unit}\n{VOUCHED.format(50)}"}
    policy[False] = policy[False].replace("largest_examples: 50", "largest_examples: 140")
    world.node_config = {
        client: clients.add(client, rows, policy[exact[client]].format(rows)) for client, rows in enumerate(sizes)
    }
    what = data.draw(st.sampled_from(["nothing", "losses", "a kill"]), "happens")
    places = st.tuples(st.integers(1, 2), st.integers(0, 3))
    honest: Any = lambda message, context, honest: [honest(message, context)]  # noqa: E731
    world.behaviour = {
        "nothing": lambda: honest,
        "losses": lambda: losing(data.draw(st.sets(places, max_size=2), "lost")),
        "a kill": lambda: killing(data.draw(places, "killed at"), [True]),
    }[what]()
    size = data.draw(st.sampled_from([3, 4]), "cohort")
    scenario = clients.scenario(
        4,
        server_rows=data.draw(st.sampled_from([40, 60, 900]), "rows of the server"),
        client=(work := data.draw(st.sampled_from(WORK), "work")),
        strategy=data.draw(st.sampled_from(["fedavg", "fedsgd"]), "strategy") if len(work) == 1 else "fedavg",
        cohort={
            "population": 4,
            "size": size,
            "sampling": data.draw(st.sampled_from(["fixed", "poisson"]), "sampling") if not secure else "fixed",
            "deadline": 0.3,
            "retries": data.draw(st.sampled_from([0, 1]), "retries"),
        },
        defence={**defence, "secure_aggregation": secure},
        seed=data.draw(st.integers(0, 3), "seed"),
    )
    for _ in range(2):
        try:
            play(scenario, folder / "run")
            break
        except KeyboardInterrupt:
            world.behaviour = honest
        except RunError:  # too few answers came: what was asked for is spent all the same
            world.behaviour = honest
    claims = {claim["unit"]: claim for claim in reversed(json.loads((folder / "run" / "claims.json").read_text()))}
    for each in claims:
        ledgers = [
            clients.ledger(client).epsilon("data", each, 1e-5)  # type: ignore[arg-type]
            for client in range(4)
        ]
        claimed = float(claims[each]["epsilon"])
        assert claimed >= max(ledgers) * (1 - 1e-6), (each, claimed, ledgers)
        told = not secure and "client_dp" not in defence
        if what == "nothing" and (all(exact) or told) and each == unit:
            assert claimed == pytest.approx(max(ledgers), rel=1e-6)


QUICK = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@QUICK
@given(data=st.data())
def test_server_and_ledgers_agree(data: st.DataObject, tmp_path_factory: Any, world: Any) -> None:
    agree(data, tmp_path_factory.mktemp("agree"), world)


@pytest.mark.slow
@settings(QUICK, max_examples=60)
@given(data=st.data())
def test_server_and_ledgers_agree_in_many_settings(data: st.DataObject, tmp_path_factory: Any, world: Any) -> None:
    agree(data, tmp_path_factory.mktemp("agree"), world)


def test_a_run_of_before_the_journal_is_not_gone_on_with(tmp_path: Path, world: Any) -> None:
    clients = OwnClients(tmp_path / "fed")
    scenario = clients.scenario(3)
    create_folder(tmp_path / "run", {"scenario.yaml": dump_scenario(scenario), "begun.txt": "1\n"})
    with pytest.raises(RunError, match="did not write down whom it asked"):
        play(scenario, tmp_path / "run")


def test_the_journal_survives_a_cut_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.ask(1, {0: Rows(50, 60), 1: None})
    journal.told(1, {1: 70})
    journal.ask(2, {0: Rows(50)})
    before = journal.asked
    with journal.file.open("a") as file:
        file.write('{"round": 3, "cl')
    assert Journal(tmp_path).asked == before
    assert [each.rows for each in before] == [Rows(50, 60), Rows(70, 70), Rows(50, None)]
    journal.file.write_text("nonsense\n")
    with pytest.raises(RunError, match="is damaged"):
        Journal(tmp_path)


def test_a_failed_answer_is_counted_as_it_may_have_been_charged(tmp_path: Path, world: Any) -> None:
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(3)}

    def failing(message: Message, context: Context, honest: Any) -> list[Message]:
        reply = honest(message, context)
        return [error_reply(message, "the disk broke") if context.node_config["partition-id"] == 1 else reply]

    world.behaviour = failing
    run = play(clients.scenario(3), tmp_path / "run")
    assert run.claim is not None
    assert run.claim.epsilon == pytest.approx(max(spent(clients, range(3))), rel=1e-6)


def test_a_client_that_says_it_has_a_million_examples_is_bounded_and_named(tmp_path: Path, world: Any) -> None:
    clients = OwnClients(tmp_path / "fed")
    world.node_config = {client: clients.add(client, 60, VOUCHED.format(60)) for client in range(3)}

    def boasting(message: Message, context: Context, honest: Any) -> list[Message]:
        reply = honest(message, context)
        if context.node_config["partition-id"] == 2 and message.metadata.message_type == "train":
            metrics = reply.content.metric_records["metrics"]
            metrics["num-examples"], metrics["weight"] = 1_000_000, 1e6
        return [reply]

    world.behaviour = boasting
    run = play(clients.scenario(3, rounds=1), tmp_path / "run")
    told = {line.client: line.reason for line in run.transcript.messages() if line.kind == "update"}
    assert told == {0: None, 1: None, 2: "it counts with weight 600 in place of 1e+06, by largest_weight"}
