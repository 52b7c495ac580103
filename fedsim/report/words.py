# SPDX-License-Identifier: Apache-2.0
"""A scenario and its numbers, said in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim import scenario as sc
from fedsim.errors import counted
from fedsim.privacy import rounded_up
from fedsim.report.blocks import Cell
from fedsim.report.run_files import RunFiles


def number(value: Cell, digits: int = 4) -> str:
    """A cell for people: 12,345; 0.9312; 1.2e-05; a dash where there is nothing."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def cell(value: Cell) -> str:
    """A cell of a table: as `number`, with four digits throughout so that a column lines up."""
    if isinstance(value, float) and math.isfinite(value) and 1e-3 <= abs(value) < 1000:
        return f"{value:#.4g}"
    return f"{value:,.0f}" if isinstance(value, float) and 1000 <= abs(value) < 1e15 else number(value)


def epsilon(value: float) -> str:
    """ε in three decimals (three digits, where it is small), rounded up: a claim is never shown smaller than it is."""
    return rounded_up(value)


def size(amount: int) -> str:
    """Bytes in the unit that reads best, in powers of 1000."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return counted(amount, "byte")


def describe(run: RunFiles) -> tuple[tuple[str, str], ...]:
    """What ran, as terms and sentences."""
    scenario = run.scenario
    return (
        ("Data", _data(run)),
        ("Partition", _partition(scenario.partition)),
        ("Model", _model(run)),
        ("Strategy", _strategy(scenario)),
        ("A client's work", _client(scenario)),
        ("Cohort", _cohort(run)),
        ("Defence", "; ".join(defences(scenario.defence)) or "none: every update leaves the client as it is"),
        ("The server keeps", _adversary(scenario)),
        ("Seed", f"{scenario.seed}; the same scenario and seed give the same run"),
    )


def defences(defence: sc.DefenceSection) -> tuple[str, ...]:
    """Each part of the defence in words, in the order in which a client applies them."""
    parts = []
    if dp := defence.example_dp:
        parts.append(
            f"DP-SGD on each client: each example's gradient is clipped to {number(dp.clipping_norm)}, {_noise(dp)}"
        )
        parts[-1] += ", in Poisson batches" if dp.batches == "poisson" else ", in shuffled batches"
    if client := defence.client_dp:
        norm = "L1" if client.noise == "laplace" else "L2"
        clip = f"clipped to {norm} norm {number(client.clipping_norm)}"
        clip += " at first, then to a quantile of the norms" if client.adaptive else ""
        parts.append(f"each client's whole update is {clip}, {_noise(client)} ({client.noise.capitalize()})")
    if isinstance(defence.compression, sc.Prune):
        parts.append(f"only the largest {number(100 * defence.compression.keep)}% of the entries are sent")
    elif isinstance(defence.compression, sc.Quantise):
        parts.append(f"entries are rounded to {counted(2**defence.compression.bits, 'level')}")
    elif isinstance(defence.compression, sc.Sign):
        parts.append("only the signs of the entries are sent")
    if defence.secure_aggregation:
        parts.append("secure aggregation, as an access model: the server sees the sum of a round only")
    return tuple(parts)


def _noise(dp: sc.ExampleDp | sc.ClientDp) -> str:
    if dp.noise_multiplier == 0:
        return "without noise"
    if dp.noise_multiplier is not None:
        return f"with noise multiplier {number(dp.noise_multiplier)}"
    unit = "example" if isinstance(dp, sc.ExampleDp) else "client"
    return f"with the noise that keeps ε at most {epsilon(dp.target_epsilon or 0)} at δ = {number(dp.delta)} per {unit}"


def _data(run: RunFiles) -> str:
    data, summary = run.scenario.data, run.summary
    name = getattr(data, "path", None) or getattr(data, "dataset", None)
    words = [f"{data.source} ({name})" if name else data.source]
    if summary.train_rows is not None and summary.test_rows is not None:
        words.append(f"{counted(summary.train_rows, 'row')} to train on, {counted(summary.test_rows, 'row')} held out")
    if summary.classes is not None:
        words.append(f"{summary.classes:,} classes")
    if summary.input_shape:
        words.append(f"each input {' × '.join(map(str, summary.input_shape))}")
    return ", ".join(words)


def _partition(partition: sc.PartitionSection) -> str:
    shared = getattr(partition, "examples_per_client", None)
    suffix = f"; every client draws {counted(shared, 'row')}, so clients share rows" if shared else ""
    match partition:
        case sc.IidPartition():
            words = "iid: every client holds a uniform sample"
        case sc.DirichletPartition():
            words = f"label skew: the shares of each class follow Dirichlet({number(partition.alpha)})"
        case sc.ShardPartition():
            words = f"sorted by label, {counted(partition.shards_per_client, 'shard')} for each client"
        case sc.ColumnPartition():
            by = f"the column {partition.column}" if partition.column else "what the data names as clients"
            words = f"natural clients, by {by}"
        case sc.QuantityPartition():
            words = f"quantity skew: sizes fall with rank to the power {number(partition.exponent)}, content is iid"
    return words + suffix


def _model(run: RunFiles) -> str:
    model, parameters = run.scenario.model, run.summary.parameters
    words = model.name
    if isinstance(model, sc.MlpModel):
        words += (
            f" with hidden layers of {', '.join(map(str, model.hidden))} ({model.activation})" if model.hidden else ""
        )
    elif isinstance(model, sc.CnnModel):
        words += f" ({model.variant})"
    return words if parameters is None else f"{words}, {counted(parameters, 'parameter')}"


def _strategy(scenario: sc.Scenario) -> str:
    strategy = scenario.strategy
    words = {
        "fedavg": "federated averaging: clients train and send the difference of the weights",
        "fedsgd": "federated SGD: each client sends the gradient of one batch",
    }[strategy.name]
    uniform = strategy.weighting == "uniform" or (strategy.weighting is None and scenario.defence.client_dp)
    words += "; the server averages them " + ("uniformly" if uniform else "by examples")
    momentum = f", momentum {number(strategy.server_momentum)}" if strategy.server_momentum else ""
    optimizer = (
        f"{_optimizer(strategy.server_optimizer)}, learning rate {number(strategy.server_learning_rate)}{momentum}"
    )
    return f"{words} and applies them with {optimizer}"


def _optimizer(name: str) -> str:
    return {"adam": "Adam", "adamw": "AdamW"}.get(name, name.upper())


def _client(scenario: sc.Scenario) -> str:
    client = scenario.client
    batch = "all its rows at once" if client.batch_size is None else f"batches of {client.batch_size:,}"
    if scenario.strategy.name == "fedsgd":
        return (
            "one gradient, of all its rows"
            if client.batch_size is None
            else f"one gradient, of a batch of {client.batch_size:,}"
        )
    length = counted(client.steps, "step") if client.steps is not None else counted(client.epochs, "epoch")
    optimizer = f"{_optimizer(client.optimizer)} with learning rate {number(client.learning_rate)}"
    extras = [
        f"{name} {number(value)}"
        for name, value in (("momentum", client.momentum), ("weight decay", client.weight_decay))
        if value
    ]
    return ", ".join([f"{length} in each round", batch, optimizer, *extras])


def _cohort(run: RunFiles) -> str:
    return f"{population(run)}; {in_a_round(run)}; {counted(run.scenario.rounds, 'round')}"


def population(run: RunFiles) -> str:
    """How many clients there are."""
    known = run.summary.population or run.scenario.cohort.population
    return "clients as the data names them" if known is None else counted(known, "client")


def in_a_round(run: RunFiles) -> str:
    """How many of them take part in a round."""
    cohort = run.scenario.cohort
    if cohort.size is None and cohort.rate is None:
        return "everybody in each round"
    amount = f"{cohort.size:,}" if cohort.size is not None else f"{number(100 * (cohort.rate or 0))}%"
    return f"{amount} in a round" + (" on average (Poisson)" if cohort.sampling == "poisson" else "")


def _adversary(scenario: sc.Scenario) -> str:
    rounds, clients = scenario.adversary.keep_rounds, scenario.adversary.keep_clients
    if rounds == "all":
        when = "of every round"
    else:
        first = "of the first round" if rounds == 1 else f"of the first {rounds} rounds"
        when = first if isinstance(rounds, int) else f"of {numbered('round', rounds)}"
    if scenario.defence.secure_aggregation:
        return f"the model and the sum {when}; of everything else the norm only"
    if clients == "all":
        who = "of every client"
    else:
        who = (
            f"of {counted(clients, 'client')} a round"
            if isinstance(clients, int)
            else f"of {numbered('client', clients)}"
        )
    return f"the tensors {when}, {who}; of everything else the norm only"


def crafted(run: RunFiles) -> str:
    """When, to whom and how the server sent weights that were made to leak; empty where it sent honest ones only."""
    active = run.scenario.adversary.active
    if active is None:
        return ""
    whom = "" if active.clients == "all" else f" to {numbered('client', active.clients)}"
    rounds = numbered("round", active.rounds)
    return f"in {rounds}{whom}, made to leak what a client trains on ({active.kind})"


def numbered(noun: str, values: Sequence[int]) -> str:
    """`rounds 1, 4, 9`: the first twelve."""
    return (
        f"{noun}{'' if len(values) == 1 else 's'} "
        + ", ".join(map(str, values[:12]))
        + (f" and {len(values) - 12} more" if len(values) > 12 else "")
    )
