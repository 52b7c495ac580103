# SPDX-License-Identifier: Apache-2.0
"""Clients that come and go, rounds with too few replies, disks that are full or lie: the run survives, or says why."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.common.constant import ErrorCode

import fedsim
from fedsim.errors import RunError
from fedsim.federation import fleet, folder
from fedsim.federation.inline import error_reply
from fedsim.federation.run import Run, resume
from fedsim.privacy.ledger import Ledger
from fedsim.scenario import Scenario

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "cohort": {"population": 3, "deadline": 0.3},
    "rounds": 4,
}


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**SMALL, **changes})


def cohort(**changes: Any) -> dict[str, Any]:
    return {**SMALL["cohort"], **changes}


def same(a: Run, b: Run) -> bool:
    return all(torch.equal(tensor, b.model()[name]) for name, tensor in a.model().items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without any fault, inline."""
    return fedsim.run(scenario(), out=tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "POLL_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(fleet, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "ASK_SECONDS", 0.2)


def round_of(message: Message) -> int:
    return int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]


# --- clients that come and go ---------------------------------------------------------------------------------------


def test_a_node_that_goes_and_comes_back(tmp_path: Path, world: Any, note: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if context.node_config["partition-id"] == 2:  # the last of the round: the change is seen in the next one
            world.offline = {1} if round_of(message) == 1 else set()
            if round_of(message) == 2:
                world.grids[0].reconnect(1)
        return [honest(message, context)]

    world.behaviour = behaviour
    run = fedsim.run(scenario(), out=tmp_path / "run")
    failures = run.metrics.failures.tolist()[1:]
    note("a node dies, and comes back under another id", "one round without it, then it takes part", f"{failures}")
    assert failures == [0, 1, 0, 0]
    (error,) = [line for line in run.transcript.messages() if line.kind == "error"]
    assert (error.round, error.client, error.reason) == (2, 1, "no node has answered for this client")


def test_two_nodes_for_one_client(undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    world.extra = [{"partition-id": 1, "num-partitions": 3, "simulated": True}]
    run = fedsim.run(scenario(), out=tmp_path / "run")
    trained = sorted(world.trained)
    note("a second node claims a client's number", "only one of them is asked", f"{len(trained)} messages in 4 rounds")
    assert len(trained) == 12
    assert same(run, undisturbed)


def test_a_client_that_claims_the_number_of_another(
    tmp_path: Path, world: Any, note: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2 says that it is client 1, and may be there first. Who is who follows from keys, not from words."""
    world.node_config = {2: {"partition-id": 1, "simulated": True}}

    def owners(engine: Any) -> Any:
        said = world.grids[0].configs.items()
        liar, honest = [node for node, config in said if config["partition-id"] == 1]
        return lambda: {node: config["partition-id"] for node, config in said} | {liar: 2, honest: 1}

    from fedsim.federation import server

    monkeypatch.setattr(server, "_owners", owners)
    run = fedsim.run(scenario(rounds=2), out=tmp_path / "run")
    errors = [line for line in run.transcript.messages() if line.kind == "error"]
    note("a client claims another's number", "refused by its key, the other takes part", str(errors[0].reason)[-80:])
    assert "says that it is client-2, but its key is that of client-3" in str(errors[0].reason)
    assert [(line.round, line.client) for line in errors] == [(1, 2), (1, 2), (2, 2)]  # and it is missing in each round
    liar = next(iter(node for node, config in world.grids[0].configs.items() if config["partition-id"] == 1))
    assert liar not in world.grids[0].states
    assert sorted(world.trained) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_node_that_is_started_again_while_the_dead_one_is_still_listed(tmp_path: Path, world: Any, note: Any) -> None:
    dead: list[int] = []

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message] | None:
        first = context.node_config["partition-id"] == 1 and (not dead or context.node_id == dead[0])
        if first and round_of(message) == 2:
            dead.append(context.node_id)
            world.grids[0].configs[context.node_id + 1] = dict(context.node_config)
        gone = context.node_id in dead
        return [error_reply(message, "gone", ErrorCode.NODE_UNAVAILABLE) if gone else honest(message, context)]

    world.behaviour = behaviour
    run = fedsim.run(scenario(rounds=5), out=tmp_path / "run")
    failures = run.metrics.failures.tolist()[1:]
    note("a node is started again, the dead one is listed", "it takes over", f"failures {failures}")
    assert failures == [0, 1, 0, 0, 0]


def test_a_node_of_another_federation(undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    world.extra = [{"partition-id": 7, "num-partitions": 9}, {"partition-id": "me", "num-partitions": 3}]
    run = fedsim.run(scenario(), out=tmp_path / "run")
    asked = {client for _, client in world.trained}
    note("nodes with numbers of another federation", "they are never asked", f"asked: {sorted(asked)}")
    assert asked == {0, 1, 2}
    assert same(run, undisturbed)


# --- rounds with too few replies ------------------------------------------------------------------------------------


def test_too_few_replies_are_tried_again(undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        first = world.trained.count((2, 1)) == 1
        fails = context.node_config["partition-id"] == 1 and round_of(message) == 2 and first
        return [error_reply(message, "busy") if fails else honest(message, context)]

    world.behaviour = behaviour
    run = fedsim.run(scenario(cohort=cohort(least_replies=3)), out=tmp_path / "run")
    asked = world.trained.count((2, 1)), world.trained.count((2, 0))
    note("too few replies, once", "who failed is asked again, the others not", f"asked {asked[0]} and {asked[1]} times")
    assert asked == (2, 1)
    assert same(run, undisturbed)


def test_a_late_reply_is_waited_for(undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    pulls = 0

    def pull(self: Any, message_ids: Any) -> list[Message]:
        nonlocal pulls
        pulls += 1
        ready = [i for i in message_ids if i not in late or pulls > 60]
        return [reply for identifier in ready for reply in self.replies.pop(identifier, [])]

    def behaviour(message: Message, context: Context, honest: Any) -> list[Message]:
        if context.node_config["partition-id"] == 1 and round_of(message) == 1:
            late.add(message.metadata.message_id)
        return [honest(message, context)]

    late: set[str] = set()
    world.behaviour = behaviour
    with pytest.MonkeyPatch.context() as patch:
        original = fleet.FleetGrid.__init__

        def init(self: Any, grid: Any, *rest: Any) -> None:
            patch.setattr(type(grid), "pull_messages", pull)
            original(self, grid, *rest)

        patch.setattr(fleet.FleetGrid, "__init__", init)
        run = fedsim.run(scenario(cohort=cohort(least_replies=3, retries=20)), out=tmp_path / "run")
    asked = world.trained.count((1, 1))
    note("a reply after the deadline", "waited for again, never asked twice", f"asked {asked} time, same model")
    assert asked == 1
    assert same(run, undisturbed)


@pytest.mark.parametrize("silent", [False, True])
def test_too_few_replies_for_good(silent: bool, undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    def behaviour(message: Message, context: Context, honest: Any) -> list[Message] | None:
        if context.node_config["partition-id"] == 0 or round_of(message) < 3:
            return [honest(message, context)]
        return None if silent else [error_reply(message, "no power")]

    world.behaviour = behaviour
    settings = scenario(cohort=cohort(least_replies=2, retries=1))
    with pytest.raises(RunError) as error:
        fedsim.run(settings, out=tmp_path / "run")
    name = "silence of two of three" if silent else "too few replies for good"
    note(name, "the run fails with the reason after the retries, and resumes", str(error.value)[:100])
    assert "round 3: 2 clients failed and 1 answered, fewer than cohort.least_replies 2" in str(error.value)
    assert ("no reply within" if silent else "no power") in str(error.value)
    assert not Run(tmp_path / "run").complete
    world.behaviour = lambda message, context, honest: [honest(message, context)]
    assert same(resume(tmp_path / "run"), undisturbed)


# --- disks ----------------------------------------------------------------------------------------------------------


def test_a_full_disk(undisturbed: Run, tmp_path: Path, world: Any, note: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder.os.fsync
    written = 0

    def fsync(descriptor: int) -> None:
        nonlocal written
        written += 1
        if written == 11:  # within the checkpoint of the third round
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(folder.os, "fsync", fsync)
    with pytest.raises(RunError) as error:
        fedsim.run(scenario(), out=tmp_path / "run")
    checkpoint = folder.read_checkpoint(tmp_path / "run")
    kept = f"checkpoint of round {checkpoint.round}" if checkpoint else "NO CHECKPOINT"
    note("the disk is full", "one sentence, the last checkpoint intact", f"{kept}; {str(error.value)[-60:]}")
    assert "No space left on device" in str(error.value)
    assert checkpoint is not None
    assert checkpoint.round == 2
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert same(resume(tmp_path / "run"), undisturbed)


def test_a_bit_that_flips(tmp_path: Path, world: Any, note: Any) -> None:
    def stop(report: Any) -> None:
        if report.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(scenario(), out=tmp_path / "run", progress=stop)
    file = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # within a weight: a valid file, with another number
    file.write_bytes(content)
    with pytest.raises(RunError) as error:
        resume(tmp_path / "run")
    note("one bit of a checkpoint flips", "noticed by its SHA-256", str(error.value)[-95:])
    assert "is damaged (its SHA-256 is another)" in str(error.value)


def test_metrics_that_were_lost(tmp_path: Path, world: Any, note: Any) -> None:
    def stop(report: Any) -> None:
        if report.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(scenario(), out=tmp_path / "run", progress=stop)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(RunError) as error:
        resume(tmp_path / "run")
    note("a file is shorter than its checkpoint says", "noticed", str(error.value)[-80:])
    assert "is damaged: it is shorter" in str(error.value)


def test_a_server_that_is_interrupted(undisturbed: Run, tmp_path: Path, world: Any, note: Any) -> None:
    def stop(report: Any) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(scenario(), out=tmp_path / "run", progress=stop)
    checkpoint = folder.read_checkpoint(tmp_path / "run")
    equal = same(resume(tmp_path / "run"), undisturbed)
    note("the server stops between two rounds", "resumes to the same bits", f"the same bits: {equal}")
    assert checkpoint is not None
    assert checkpoint.round == 1  # the second round was not saved yet
    assert equal


# --- what the client's own safeguards refuse ------------------------------------------------------------------------

PRIVATE = {"defence": {"example_dp": {"noise_multiplier": 1.0}}, "rounds": 2}


def guarded(world: Any, tmp_path: Path, policy: str) -> Path:
    (tmp_path / "policy.yaml").write_text(f"{policy}\n")
    ledger = tmp_path / "ledger.sqlite"
    Ledger(ledger)
    world.node_config = {1: {"policy": str(tmp_path / "policy.yaml"), "ledger": str(ledger)}}
    return ledger


def refusals(run: Run) -> list[str]:
    return [str(line.reason) for line in run.transcript.messages() if line.kind == "error"]


def test_what_the_policy_does_not_allow_is_never_computed(tmp_path: Path, world: Any, note: Any) -> None:
    ledger = guarded(world, tmp_path, "least_noise_multiplier: 2.0")
    reasons = refusals(fedsim.run(scenario(**PRIVATE), out=tmp_path / "run"))
    note("the server asks for less noise than the policy", "refused, the operator reads why", reasons[0][:90])
    assert len(reasons) == 2
    assert "the noise multiplier for the unit example is 1, at least 2 is allowed" in reasons[0]
    assert not Ledger(ledger).charges()


def test_the_ledger_is_charged_before_anything_leaves(tmp_path: Path, world: Any, note: Any) -> None:
    ledger = guarded(world, tmp_path, "largest_epsilon: 1000")
    run = fedsim.run(scenario(**PRIVATE), out=tmp_path / "run")
    charges = Ledger(ledger).charges()
    note("(no fault: a policy that is kept)", "one charge a round, noise from the system", f"{len(charges)} charges")
    assert not refusals(run)
    assert [charge.round for charge in charges] == [1, 2]


def test_laplace_noise_of_a_real_client_is_its_own(tmp_path: Path, world: Any, note: Any) -> None:
    """On a grid, from the operating system: two runs of one scenario differ, and the ledger knows what was drawn."""
    ledger = guarded(world, tmp_path, "largest_epsilon: 1000\nunit: client\nlargest_clipping_norm: 100.0")
    private = {"client_dp": {"noise_multiplier": 2.0, "noise": "laplace", "clipping_norm": 50.0}}
    settings = scenario(defence=private, rounds=1)
    runs = [fedsim.run(settings, out=tmp_path / name) for name in ("one", "two")]
    kinds = [(charge.unit, charge.mechanism.kind) for charge in Ledger(ledger).charges()]
    note("(no fault: Laplace noise on a real client)", "noise of the system, charged as Laplace", f"{kinds}")
    assert [refusals(run) for run in runs] == [[], []]
    assert kinds == [("client", "laplace")] * 2
    updates = [run.transcript.update(1, 1) for run in runs]
    assert any(not torch.equal(tensor, updates[1][name]) for name, tensor in updates[0].items())
    flat = torch.cat([tensor.flatten() for tensor in updates[0].values()])
    assert float(flat.abs().mean()) == pytest.approx(100.0, rel=0.2)  # b = 2 · 50


def test_a_ledger_that_is_damaged(tmp_path: Path, world: Any, note: Any) -> None:
    ledger = guarded(world, tmp_path, "largest_epsilon: 1000")
    ledger.write_bytes(b"not a data base" * 100)
    reasons = refusals(fedsim.run(scenario(**PRIVATE), out=tmp_path / "run"))
    note("the client's ledger is damaged", "nothing is released", reasons[0])
    assert len(reasons) == 2


def test_a_budget_that_is_spent(tmp_path: Path, world: Any, note: Any) -> None:
    guarded(world, tmp_path, "largest_epsilon: 1.0\nrounds_a_day: 1")
    reasons = refusals(fedsim.run(scenario(**PRIVATE), out=tmp_path / "run"))
    note("more rounds than the policy allows", "refused, the operator reads why", reasons[-1][:90])
    assert reasons
    assert "rounds_a_day is 1" in reasons[-1] or "largest_epsilon" in reasons[-1]


def test_a_model_that_is_made_to_leak(tmp_path: Path, world: Any, note: Any) -> None:
    guarded(world, tmp_path, "largest_epsilon: 1000")
    active = {"kind": "imprint", "rounds": [1]}
    settings = scenario(**PRIVATE, model={"name": "mlp", "hidden": [64]}, adversary={"active": active})
    run = fedsim.run(settings, out=tmp_path / "run")
    errors = [line for line in run.transcript.messages() if line.kind == "error"]
    note("the server sends an imprint model", "refused; nothing is computed or charged", f"{[e.round for e in errors]}")
    assert [(line.round, line.client) for line in errors] == [(1, 1)]


def test_a_policy_that_cannot_be_read(tmp_path: Path, world: Any, note: Any) -> None:
    guarded(world, tmp_path, "least_noise: [")
    reasons = refusals(fedsim.run(scenario(**PRIVATE), out=tmp_path / "run"))
    note("the policy file is broken", "nothing is computed", reasons[0][:80])
    assert len(reasons) == 2
