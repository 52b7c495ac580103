# SPDX-License-Identifier: Apache-2.0
"""The ServerApp: the rounds of a federation, the same on every engine.

Flower's own `Strategy.start` cannot begin at a round other than the first and keeps nothing of what it sees, so the
loop is here; it calls the strategy as Flower would.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedsim.errors import RunError
from fedsim.federation.arrays import Row, to_flat, to_record
from fedsim.federation.asked import Journal
from fedsim.federation.client import local_work
from fedsim.federation.evaluation import Score, evaluate
from fedsim.federation.fleet import FleetGrid, Owners, collect
from fedsim.federation.folder import Checkpoint, RunWriter, clear_write_errors, note_failure
from fedsim.federation.inline import InlineGrid, called, client_of, node_of
from fedsim.federation.plan import Plan, Told, as_asked, as_told, plan
from fedsim.federation.secure_rounds import secure_collect, shut_out_before
from fedsim.federation.signature import Signer
from fedsim.federation.transcript import Kind, MessageLine, Transcript, write_json
from fedsim.privacy import PrivacyClaim
from fedsim.scenario import EngineSection, Scenario
from fedsim.scenario_file import load_scenario
from fedsim.strategies import STRATEGIES, FedAvg
from fedsim.strategies.fedavg import Rules
from fedsim.strategies.malicious import forge_of, malicious, sent_models
from fedsim.strategies.replies import Arrival, Refusal, secure_sum


@dataclass(frozen=True)
class RoundReport:
    """How a round went. Loss and accuracy are None where the model was not evaluated."""

    round: int
    rounds: int
    clients: int
    failures: int
    train_loss: float | None
    loss: float | None
    accuracy: float | None
    update_norm_mean: float | None
    claims: tuple[PrivacyClaim, ...]


LARGEST_WEIGHT = 10.0
"""Of a real client, as a multiple of the median of its round, where the scenario does not say."""
Progress = Callable[[RoundReport], None]


def server_app(progress: Progress | None = None, stop: threading.Event | None = None) -> ServerApp:
    """The ServerApp; it finds the scenario and the run folder in the run's configuration. `stop` ends it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder = Path(str(context.run_config["folder"]))
        try:
            serve(grid, plan(_scenario(context, folder)), folder, progress, stop)
        except Exception as error:
            if deployed(context):  # Flower keeps the reason of a failure to itself
                note_failure(folder, error)
            raise

    return app


app = server_app()


def deployed(context: Context) -> bool:
    """Whether the ServerApp runs for a SuperLink, in a process of its own."""
    return bool(context.run_config.get("deployed"))


def _scenario(context: Context, folder: Path) -> Scenario:
    """The scenario: deployed, that of the folder, as the one that travels lacks what clients need not know."""
    if deployed(context):
        return load_scenario(folder / "scenario.yaml")
    return Scenario.model_validate_json(str(context.run_config["scenario"]))


def serve(
    grid: Grid, plan: Plan, folder: Path, progress: Progress | None = None, stop: threading.Event | None = None
) -> None:
    """Run the rounds that are left, and leave the trained model in the run folder."""
    journal = _journal(plan.scenario.engine, folder)
    if not isinstance(grid, InlineGrid):
        engine = plan.scenario.engine
        grid = FleetGrid(grid, plan.population, stop, _owners(engine), _signer(engine, grid), journal)
    with clear_write_errors(folder):
        # The ServerApp of a run that was stopped to be resumed may take a while to notice.
        patience = 60.0 if plan.scenario.engine.kind == "deploy" else 0.0
        writer = RunWriter(folder, plan.layout, plan.scenario.adversary, patience)
        try:
            model = _rounds(grid, plan, writer, progress or (lambda report: None), journal)
            writer.finish(plan.layout.unflatten(model))
        finally:
            writer.close()


def _journal(engine: EngineSection, folder: Path) -> Journal | None:
    """Whom a deployment has asked; RunError for a run of a fedsim that did not write it down."""
    if engine.kind != "deploy":
        return None
    if (folder / "begun.txt").is_file():
        raise RunError(
            f"{folder} was begun by an earlier fedsim, which did not write down whom it asked, so nobody knows what was"
            " spent; run the scenario again"
        )
    return Journal(folder)


def _owners(engine: EngineSection) -> Owners | None:
    if engine.kind != "deploy":
        return None
    from fedsim.federation.link import owners  # half a second, which only a deployment needs

    return owners(engine)


def _signer(engine: EngineSection, grid: Grid) -> Signer | None:
    if engine.kind != "deploy":
        return None
    from fedsim.federation.link import signer

    return signer(engine, grid.run.run_id)


def _rounds(grid: Grid, plan: Plan, writer: RunWriter, progress: Progress, journal: Journal | None) -> Tensor:
    refusals: list[Refusal] = []
    told, planned = _told_before(writer.path), plan
    counted: object = None

    def count(rounds: int) -> None:
        """Claim what has happened, and write it down where that is something else than was written before."""
        nonlocal plan, counted
        happened = (rounds, list(journal.asked)) if journal else {client: set(sizes) for client, sizes in told.items()}
        if happened != counted:
            plan, counted = as_asked(planned, journal.asked, rounds) if journal else as_told(planned, told), happened
            if plan is not planned:
                write_json(writer.path / "claims.json", [claim.to_dict() for claim in plan.claims])

    def observe(round_: int, arrivals: Sequence[Arrival], refused: Sequence[Refusal]) -> None:
        refusals[:] = refused
        examples = {a.client: a.examples for a in arrivals if a.client is not None and a.examples is not None}
        for client, number in examples.items():
            told.setdefault(client, set()).add(number)
        if journal is not None:
            journal.told(round_, examples)
        writer.transcript.received(round_, _received(round_, strategy.reply_kind, arrivals, refused))

    strategy, shut_out = make_strategy(plan, observe), shut_out_before(writer.path)
    checkpoint = writer.checkpoint
    if checkpoint is not None:
        strategy.load_state(checkpoint.state)
        model = checkpoint.model
    else:
        model = plan.start
        _report(plan, writer, progress, 0, None, _evaluate(plan, 0, model))
    arrays = to_record(model, plan.layout)
    count(checkpoint.round if checkpoint else 0)  # with what an interrupted attempt has spent
    for round_ in range(1 + (checkpoint.round if checkpoint else 0), plan.scenario.rounds + 1):
        try:
            arrays, metrics = play_round(grid, plan, writer, strategy, round_, arrays, shut_out)
        finally:
            count(round_)
        _check_enough(plan, round_, int(_number(metrics["clients"])), refusals)
        model = to_flat(arrays, plan.layout)
        _report(plan, writer, progress, round_, metrics, _evaluate(plan, round_, model))
        # Inline, rounds take milliseconds and nobody else's work is lost: there a checkpoint every few seconds will do.
        writer.save(Checkpoint(round_, model, strategy.state()), now=not isinstance(grid, InlineGrid))
    return model


def _told_before(folder: Path) -> Told:
    """How many examples the clients of a run that is resumed have said that they hold."""
    if not (folder / "transcript").is_dir():
        return {}
    told: Told = {}
    for line in Transcript(folder / "transcript").messages():
        if line.client is not None and line.examples is not None:
            told.setdefault(line.client, set()).add(line.examples)
    return told


def _check_enough(plan: Plan, round_: int, accepted: int, refusals: Sequence[Refusal]) -> None:
    """RunError for a round that has too few accepted replies."""
    least = min(plan.scenario.cohort.least_replies, accepted + len(refusals))
    if accepted >= least:
        return
    how_many = f"all {len(refusals)} clients" if accepted == 0 else f"{len(refusals)} clients"
    wanted = "" if accepted == 0 else f" and {accepted} answered, fewer than cohort.least_replies {least}"
    remedy = "mend that and go on with --resume, or mend the scenario and run it again"
    if all(refusal.diverged for refusal in refusals):  # a resumed run would diverge again
        rate = plan.scenario.client.learning_rate
        lower = "" if plan.scenario.strategy.name == "fedsgd" else f"lower client.learning_rate, here {rate:g}, or "
        remedy = f"{lower}scale the data, and run the scenario again"
    first = called(refusals[0].client, deployed=plan.scenario.engine.kind == "deploy")
    raise RunError(
        f"round {round_}: {how_many} failed{wanted}, the first ({first}) because {refusals[0].reason}; {remedy}"
    )


def play_round(
    grid: Grid,
    plan: Plan,
    writer: RunWriter,
    strategy: FedAvg,
    round_: int,
    arrays: ArrayRecord,
    shut_out: dict[int, str],
) -> tuple[ArrayRecord, MetricRecord]:
    """One round: send the model, collect what comes back, write both down, aggregate."""
    messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), grid))
    config = dict(messages[0].content.config_records["config"]) if messages else {}
    _write_sent(writer, strategy, MessageLine(round_, "sent", "model", config=config), messages)
    scenario, withheld = plan.scenario, 0
    if scenario.defence.secure_aggregation and scenario.engine.kind == "deploy" and messages:
        ask = partial(collect, grid, cohort=scenario.cohort)
        replies = secure_collect(grid, messages, scenario, plan.layout, ask, shut_out)
    else:
        replies = collect(grid, messages, scenario.cohort)
        if scenario.defence.secure_aggregation:
            all_needed = scenario.defence.client_dp is not None
            answers, limits = replies, strategy.limits()
            replies = secure_sum(answers, plan.layout, client_of, limits, all_needed=all_needed)
            withheld = len(answers) - len(replies) if all(reply.has_error() for reply in replies) else 0
    if isinstance(grid, FleetGrid):
        refused = [(MessageLine(round_, "received", "error", who, reason=reason), None) for who, reason in grid.refused]
        writer.transcript.received(round_, refused)
        grid.refused.clear()
    aggregate, metrics = strategy.aggregate_train(round_, replies)
    metrics = metrics or MetricRecord()
    if withheld:
        metrics["clients"] = withheld  # they answered, though nobody may see their sum
    return arrays if aggregate is None else aggregate, metrics


def _write_sent(writer: RunWriter, strategy: FedAvg, line: MessageLine, messages: Sequence[Message]) -> None:
    """What went out: one line for the cohort, or for each client where an active server sent them different models."""
    line = replace(line, bytes=4 * strategy.model.numel())
    models = sent_models(messages, strategy.layout)
    different = {id(model): model for model in models.values()}
    if len(different) > 1:
        lines = [(replace(line, client=client_of(node)), model) for node, model in models.items()]
        writer.transcript.sent_to_each(lines, getattr(strategy, "template", None))
    else:
        writer.transcript.sent(replace(line, clients=len(messages)), next(iter(different.values()), strategy.model))


def make_strategy(plan: Plan, observer: Callable[[int, Sequence[Arrival], Sequence[Refusal]], None]) -> FedAvg:
    """The strategy of a planned scenario."""
    scenario = plan.scenario
    rules = Rules(
        section=scenario.strategy,
        weighting=scenario.strategy.weighting or ("uniform" if scenario.defence.client_dp else "examples"),
        cohort=lambda round_: plan.cohorts[round_ - 1].tolist(),
        cohort_size=plan.cohort_size,
        node_of=node_of,
        client_of=client_of,
        seed=scenario.seed,
        client_dp=scenario.defence.client_dp,
        client_noise=plan.noise.client or 0.0,
        example_noise=plan.noise.example or 0.0,
        secure_aggregation=scenario.defence.secure_aggregation,
        clipping_norm=scenario.defence.example_dp.clipping_norm if scenario.defence.example_dp else 1.0,
        least_replies=scenario.cohort.least_replies,
        largest_weight=scenario.strategy.largest_weight
        or (LARGEST_WEIGHT if scenario.engine.kind == "deploy" else None),
    )
    strategy = STRATEGIES[scenario.strategy.name]
    if scenario.adversary.active is not None:
        work = local_work(scenario, 0.0)
        forge = forge_of(scenario, plan.model, plan.layout, plan.dataset, plan.partition, work)
        strategy = malicious(strategy, forge)
    return strategy(plan.layout, rules, observer)


def _received(
    round_: int, kind: Kind, arrivals: Sequence[Arrival], refused: Sequence[Refusal]
) -> list[tuple[MessageLine, Row | None]]:
    lines: list[tuple[MessageLine, Row | None]] = []
    for arrival in arrivals:
        line = MessageLine(
            round_,
            "received",
            kind if arrival.client is not None else "sum",
            arrival.client,
            arrival.clients if arrival.client is None else None,
            norm=arrival.norm,
            examples=arrival.examples,
            loss=arrival.loss,
            bit=arrival.bit,
            bytes=4 * arrival.update.numel(),
            reason=None
            if arrival.told_weight is None
            else f"it counts with weight {arrival.weight:g} in place of {arrival.told_weight:g}, by largest_weight",
        )
        if line.reason is not None:
            logging.getLogger("fedsim").warning("round %d, client %s: %s", round_, arrival.client, line.reason)
        lines.append((line, arrival.update))
    lines += [(MessageLine(round_, "received", "error", no.client, reason=no.reason), None) for no in refused]
    return lines


def _evaluate(plan: Plan, round_: int, model: Tensor) -> Score | None:
    if round_ % plan.scenario.evaluate_every and round_ != plan.scenario.rounds:
        return None
    return evaluate(plan.model, plan.layout, model, plan.dataset.x_test, plan.dataset.y_test)


def _report(
    plan: Plan, writer: RunWriter, progress: Progress, round_: int, metrics: MetricRecord | None, score: Score | None
) -> None:
    metrics = metrics or MetricRecord({"clients": 0, "failures": 0})
    claims = plan.claims_after(round_)
    number = {key: _number(value) for key, value in metrics.items()}
    report = RoundReport(
        round=round_,
        rounds=plan.scenario.rounds,
        clients=int(number["clients"]),
        failures=int(number["failures"]),
        train_loss=number.get("train-loss"),
        loss=score.loss if score else None,
        accuracy=score.accuracy if score else None,
        update_norm_mean=number.get("update-norm"),
        claims=claims,
    )
    line = {key: value for key, value in vars(report).items() if key not in {"rounds", "claims"}}
    fields = ("epsilon", "delta", "unit", "adjacency", "observer")
    privacy = [{key: value for key, value in claim.to_dict().items() if key in fields} for claim in claims]
    writer.append_metrics({**line, "privacy": privacy})
    progress(report)


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value
