# SPDX-License-Identifier: Apache-2.0
"""Federated averaging (McMahan et al. 2017, Algorithm 1) as a Flower strategy.

Flower's own FedAvg draws the cohort from unseeded randomness over node ids and adds floating-point numbers in the order
in which replies happen to arrive, so no two runs agree; and it always weights by examples, under which one client can
outweigh any clipping norm. Here the cohort is a function of the seed, the sum is taken in the order of the clients, and
the weighting is what the privacy claim needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.federation.arrays import to_flat, to_record
from fedsim.federation.messages import to_each
from fedsim.privacy import next_clipping_norm
from fedsim.randomness import stream
from fedsim.scenario import ClientDp, FedAvgStrategy, FedSgdStrategy
from fedsim.strategies.replies import Arrival, Limits, Refusal, largest_norm, read_replies
from fedsim.training import Layout

Observer = Callable[[int, Sequence[Arrival], Sequence[Refusal]], None]


@dataclass(frozen=True)
class Rules:
    """What the server does in a round, beyond the strategy's own section of the scenario."""

    section: FedAvgStrategy | FedSgdStrategy
    weighting: Literal["examples", "uniform"]
    cohort: Callable[[int], Sequence[int]]
    cohort_size: float
    node_of: Callable[[int], int]
    client_of: Callable[[int], int]
    seed: int
    client_dp: ClientDp | None = None
    client_noise: float = 0.0
    example_noise: float = 0.0
    secure_aggregation: bool = False
    clipping_norm: float = 1.0
    """That of the clients' DP-SGD."""
    least_replies: int = 1
    largest_weight: float | None = None
    """Of one client, as a multiple of the median of its round; None: no bound."""


def _server_optimizer(
    weights: torch.nn.Parameter, section: FedAvgStrategy | FedSgdStrategy
) -> torch.optim.Optimizer | None:
    """None for plain SGD, which is one addition: `torch.optim` would import PyTorch's compiler, for a second or two."""
    if section.server_optimizer == "adam":
        return torch.optim.Adam([weights], lr=section.server_learning_rate)
    if section.server_momentum:
        return torch.optim.SGD([weights], lr=section.server_learning_rate, momentum=section.server_momentum)
    return None


class FedAvg(Strategy):
    """w <- w + eta * sum_k w_k u_k / W, where u_k is the difference of the weights that client k has computed.

    W is the sum of the weights w_k; with a client-level claim every w_k is 1 and W is the expected size of the cohort,
    because the true size is itself private. A server optimiser other than plain SGD takes -u as its gradient
    (Reddi et al. 2021).
    """

    reply_kind: Literal["update", "gradient"] = "update"

    def __init__(self, layout: Layout, rules: Rules, observer: Observer | None = None) -> None:
        self.layout, self.rules, self.observer = layout, rules, observer
        self.clipping_norm = rules.client_dp.clipping_norm if rules.client_dp else 0.0
        self.model = torch.zeros(layout.size)
        self.weights = torch.nn.Parameter(torch.zeros(layout.parameters))
        self.optimizer = _server_optimizer(self.weights, rules.section)

    def direction(self, average: Tensor) -> Tensor:
        """What the server's optimiser is given as the gradient."""
        return -average

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model, to every client of the round's cohort."""
        self.model = to_flat(arrays, self.layout)
        cohort = self.rules.cohort(server_round)
        content = RecordDict({"arrays": arrays, "config": self.instructions(server_round, len(cohort), config)})
        return to_each([self.rules.node_of(int(client)) for client in cohort], content, MessageType.TRAIN)

    def instructions(self, server_round: int, cohort_size: int, config: ConfigRecord) -> ConfigRecord:
        """What the server tells the clients beside the model."""
        instructions = ConfigRecord({**config, "server-round": server_round, "weighting": self.rules.weighting})
        instructions["example-noise-multiplier"] = self.rules.example_noise
        if self.rules.client_dp is not None:
            instructions["client-noise-multiplier"] = self.rules.client_noise
            instructions["clipping-norm"] = self.clipping_norm
            instructions["cohort-size"] = cohort_size
        return instructions

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, from the accepted replies in the order of the clients; None where the round is void."""
        limits = replace(self.limits(), summed=self.rules.secure_aggregation)
        arrivals, refused, total = read_replies(replies, self.layout, self.rules.client_of, limits)
        if self.observer is not None:
            self.observer(server_round, arrivals, refused)
        clients = sum(arrival.clients for arrival in arrivals)
        metrics = MetricRecord({"clients": clients, "failures": len(refused)})
        if losses := [arrival.loss * arrival.clients for arrival in arrivals if arrival.loss is not None]:
            metrics["train-loss"] = sum(losses) / clients
        if arrivals:
            metrics["update-norm"] = sum(a.norm for a in arrivals) / len(arrivals)
        if self._is_void(arrivals, refused) or clients < min(self.rules.least_replies, clients + len(refused)):
            return None, metrics
        self._step(self._average(server_round, arrivals, total))
        self._adapt_clipping(server_round, arrivals)
        return to_record(self.model, self.layout), metrics

    def limits(self) -> Limits:
        """What a client's reply in this round may be at most."""
        rules, adaptive = self.rules, self.rules.client_dp and self.rules.client_dp.adaptive
        noise = rules.client_noise * self.clipping_norm + rules.example_noise * rules.clipping_norm
        return Limits(
            largest_norm=largest_norm(self.model, noise),
            most_examples=rules.section.most_examples,
            largest_weight=rules.largest_weight,
            weighting=rules.weighting,
            largest_bit=1.0 + 10.0 * adaptive.bit_noise if adaptive else 1.0,
            weighted=rules.secure_aggregation,
        )

    def _is_void(self, arrivals: Sequence[Arrival], refused: Sequence[Refusal]) -> bool:
        """Nobody answered; or, where the clients share the noise between them, somebody's share is missing."""
        noised_by_all = self.rules.secure_aggregation and self.rules.client_noise > 0
        return bool(refused) if noised_by_all else not arrivals

    def _average(self, server_round: int, arrivals: Sequence[Arrival], total: Tensor | None) -> Tensor:
        """The average update, of the sum Σ w_k u_k over the arrivals."""
        if total is None:
            # With Poisson sampling nobody may come. The model must not show that: the server adds the cohort's noise.
            scale = self.rules.client_noise * self.clipping_norm / self.rules.cohort_size
            noise = stream(self.rules.seed, "server-noise", server_round).standard_normal(self.layout.size)
            return torch.from_numpy(scale * noise).float()
        weight = self.rules.cohort_size if self.rules.client_dp else sum(arrival.weight for arrival in arrivals)
        # Under secure aggregation the one arrival is a sum already.
        return (total if arrivals[0].client is not None else arrivals[0].row) / weight

    def _step(self, average: Tensor) -> None:
        split = self.layout.parameters
        self.weights.grad = self.direction(average)[:split]
        with torch.no_grad():
            self.weights.copy_(self.model[:split])
            if self.optimizer is None:
                self.weights.add_(self.weights.grad, alpha=-self.rules.section.server_learning_rate)
            else:
                self.optimizer.step()
        # Buffers (BatchNorm statistics) are not trained: clients send how they changed, and the server averages that.
        self.model = torch.cat([self.weights.detach(), self.model[split:] + average[split:]])

    def _adapt_clipping(self, server_round: int, arrivals: Sequence[Arrival]) -> None:
        adaptive = self.rules.client_dp and self.rules.client_dp.adaptive
        if adaptive:
            total = sum(arrival.bit or 0.0 for arrival in arrivals)
            if not arrivals:
                total = adaptive.bit_noise * stream(self.rules.seed, "server-bit-noise", server_round).standard_normal()
            self.clipping_norm = next_clipping_norm(self.clipping_norm, total / self.rules.cohort_size, adaptive)

    def state(self) -> dict[str, Tensor]:
        """Everything beside the model that the next round depends on."""
        kept = self.optimizer.state[self.weights] if self.optimizer else {}
        optimizer = {f"optimizer/{key}": value for key, value in kept.items()}
        return {"clipping_norm": torch.tensor(self.clipping_norm, dtype=torch.float64), **optimizer}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        self.clipping_norm = float(state["clipping_norm"])
        for key, value in state.items():
            if self.optimizer and key.startswith("optimizer/"):
                self.optimizer.state[self.weights][key.removeprefix("optimizer/")] = value.clone()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: the server evaluates on held-out data, since a client's evaluation would be one more release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Nothing to log: the scenario says it."""
