# SPDX-License-Identifier: Apache-2.0
"""What the server of a run holds against its clients: the observations of its transcript, and what it knows beside."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedsim.attacks.observation import Knowledge, Observation
from fedsim.data import Dataset
from fedsim.data.table import CategoricalColumn, TableEncoding
from fedsim.errors import AttackError, RunError
from fedsim.federation.client import local_work
from fedsim.federation.transcript import MessageLine, Transcript
from fedsim.scenario import DefenceSection, Scenario


def observations(transcript: Transcript, scenario: Scenario, architecture: nn.Module) -> Iterator[Observation]:
    """Every update whose tensors were kept, by round and client; a round's sum under secure aggregation."""
    instructions: dict[int, MessageLine] = {}
    for line in transcript.messages():
        if line.direction == "sent":
            instructions[line.round] = line
        elif line.file is not None:
            if line.round not in instructions:
                raise RunError(
                    f"{transcript.folder / 'messages.jsonl'} holds an update of round {line.round}, but not what was"
                    " sent before it; run the scenario again"
                )
            yield _observation(transcript, scenario, architecture, line, instructions[line.round])


def _observation(
    transcript: Transcript, scenario: Scenario, architecture: nn.Module, line: MessageLine, sent: MessageLine
) -> Observation:
    model = _with_weights(architecture, transcript, line)
    update = transcript.sum(line.round) if line.client is None else transcript.update(line.round, line.client)
    transcript.check(line, update)
    clients = 1
    if line.client is None:
        clients, update = line.clients or 1, _average(update, line, sent)
    work = local_work(scenario, float(sent.config.get("example-noise-multiplier", 0.0)))
    config = sent.config
    if not scenario.adversary.knows.defence:  # then the client, and not the server, has chosen how it protects itself
        work, config = replace(work, example_dp=None), {"server-round": line.round}
    return Observation(
        model=model,
        update=update,
        kind="gradient" if scenario.strategy.name == "fedsgd" else "update",
        work=work,
        round=line.round,
        client=line.client,
        clients=clients,
        examples=line.examples,
        config=config,
    )


def _with_weights(architecture: nn.Module, transcript: Transcript, line: MessageLine) -> nn.Module:
    """A copy of the architecture with the weights that the sender of an update had been sent."""
    weights = transcript.model(line.round, line.client)
    for name, parameter in architecture.named_parameters():
        if name not in weights or weights[name].shape != parameter.shape:
            there = tuple(weights[name].shape) if name in weights else "missing"
            raise RunError(
                f"{transcript.folder} is that of another model than scenario.yaml names: {name} is {there} in place of"
                f" {tuple(parameter.shape)}; restore scenario.yaml, or run the scenario again"
            )
    model = copy.deepcopy(architecture)
    model.load_state_dict(weights, strict=False)  # integer counters of BatchNorm are not sent
    return model


def _average(total: dict[str, Tensor], line: MessageLine, sent: MessageLine) -> dict[str, Tensor]:
    """The clients have multiplied their updates by their weights: sum_k w_k u_k / sum_k w_k is the average."""
    weight = line.examples if sent.config.get("weighting") == "examples" else line.clients
    return {name: tensor / (weight or 1) for name, tensor in total.items()}


def knowledge_of(scenario: Scenario, dataset: Dataset, observation: Observation) -> Knowledge:
    """What the scenario grants to the adversary; ranges and statistics are those of the held-out rows."""
    knows = scenario.adversary.knows
    mean = std = None
    if knows.statistics and dataset.kind != "text":
        mean, std = dataset.x_test.mean(dim=0), dataset.x_test.std(dim=0)
    config = observation.config
    return Knowledge(
        kind=dataset.kind,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        value_range=_value_range(dataset) if knows.value_range else None,
        mean=mean,
        std=std,
        encoding=dataset.encoding,
        defence=scenario.defence if knows.defence else DefenceSection(),
        example_noise=float(config.get("example-noise-multiplier", 0.0)),
        client_noise=float(config.get("client-noise-multiplier", 0.0)),
        active=getattr(scenario.adversary, "active", None),
        public=(dataset.x_test, dataset.y_test) if knows.public_rows else None,
    )


def with_labels(knowledge: Knowledge, labels: Tensor) -> Knowledge:
    """The same, with the labels of the batch granted: sorted, so that their order tells nothing."""
    if labels.dim() > 1:
        raise AttackError(
            "adversary.knows.labels known: the labels of a text are its next tokens, that is the text; use inferred"
        )
    return replace(knowledge, labels=labels.sort().values)


def _value_range(dataset: Dataset) -> tuple[Tensor, Tensor] | None:
    if dataset.kind == "image":
        return torch.tensor(0.0), torch.tensor(1.0)
    if dataset.kind == "text":
        return None
    low, high = dataset.x_test.amin(dim=0), dataset.x_test.amax(dim=0)
    if isinstance(dataset.encoding, TableEncoding):
        for column, where in zip(dataset.encoding.columns, dataset.encoding.slices().values(), strict=True):
            if isinstance(column, CategoricalColumn):
                low[where], high[where] = 0.0, 1.0
    return low, high


def knowledge_table(scenario: Scenario, observation: Observation, knowledge: Knowledge) -> dict[str, str]:
    """What the adversary knows, in words, for the report."""
    batch = observation.batch_size
    defence = knowledge.defence.model_dump(exclude_defaults=True, exclude_none=True)
    return {
        "architecture": getattr(observation.model, "title", type(observation.model).__name__),
        "the weights that it sent": "yes"
        if knowledge.active is None
        else f"yes, and it crafted them to leak ({getattr(knowledge.active, 'kind', 'active')})",
        "local work": "one gradient" if observation.kind == "gradient" else _work_in_words(observation),
        "batch": f"{batch} examples" if batch is not None else "unknown: Poisson batches, or the client does not say",
        "labels": "given, in no order" if scenario.adversary.knows.labels == "known" else "inferred from the update",
        "value range of the inputs": "yes" if knowledge.value_range is not None else "no",
        "mean and spread of the inputs": "from the held-out rows" if knowledge.mean is not None else "no",
        "public rows": f"{len(knowledge.public[0]):,} held-out rows" if knowledge.public is not None else "no",
        "defence": ", ".join(defence) or "none" if scenario.adversary.knows.defence else "not known to it",
    }


def _work_in_words(observation: Observation) -> str:
    work = observation.work
    long = f"{work.steps} steps" if work.steps is not None else f"{work.epochs} epochs"
    return f"{long} of {work.optimizer}, learning rate {work.learning_rate:g}, batches of {work.batch_size or 'all'}"
