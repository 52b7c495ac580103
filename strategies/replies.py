# SPDX-License-Identifier: Apache-2.0
"""What came back from the clients, read and checked: the server does not trust a client.

A reply whose arrays do not fit the model, whose weight is not a positive number or whose update is not finite is
refused with a reason, and the round goes on with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.arrays import stack, to_flat, to_record
from fedsim.training import Layout


@dataclass(frozen=True)
class Arrival:
    """One accepted reply. Under secure aggregation it is the sum over `clients` clients, and `client` is None."""

    client: int | None
    row: Tensor
    weight: float
    norm: float
    examples: int | None = None
    loss: float | None = None
    clients: int = 1
    bit: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A client that failed, or whose reply was refused."""

    client: int
    reason: str


def read_replies(
    replies: Iterable[Message], layout: Layout, client_of: Callable[[int], int]
) -> tuple[list[Arrival], list[Refusal]]:
    """The accepted and the refused replies, each in the order of the clients."""
    fitting: list[tuple[int, Tensor, MetricRecord]] = []
    refused: list[Refusal] = []
    for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
        client = client_of(reply.metadata.src_node_id)
        try:
            if reply.has_error():
                raise ValueError(reply.error.reason)
            record, metrics = reply.content["arrays"], reply.content["metrics"]
            if not isinstance(record, ArrayRecord) or not isinstance(metrics, MetricRecord):
                raise TypeError("its records are not arrays and metrics")
            row = to_flat(record, layout)
            for key in {"weight", "num-examples"} & {"weight", *metrics}:
                if not 0 < _number(metrics, key) < math.inf:
                    raise ValueError(f"its {key} is {metrics[key]}, not a positive number")
            fitting.append((client, row, metrics))
        except KeyError as error:
            refused.append(Refusal(client, f"its {error} is missing"))
        except (ValueError, TypeError) as error:
            refused.append(Refusal(client, str(error)))
    norms = torch.linalg.vector_norm(stack([row for _, row, _ in fitting]), dim=1).tolist() if fitting else []
    arrivals = []
    for (client, row, metrics), norm in zip(fitting, norms, strict=True):
        if math.isfinite(norm):
            arrivals.append(_arrival(client, row, metrics, norm))
        else:
            refused.append(Refusal(client, "its update is not finite: local training diverged, or it is malicious"))
    return arrivals, refused


def secure_sum(replies: Iterable[Message], layout: Layout, client_of: Callable[[int], int]) -> list[Message]:
    """Secure aggregation as an access model: the server gets one reply with the sums, and who failed, but no update.

    The clients have multiplied their updates by their weights, so that sum_k w_k u_k / sum_k w_k is the average.
    """
    replies = list(replies)
    arrivals, refused = read_replies(replies, layout, client_of)
    failed = {refusal.client for refusal in refused}
    errors = [reply for reply in replies if client_of(reply.metadata.src_node_id) in failed]
    if not arrivals:
        return errors
    weight = sum(arrival.weight for arrival in arrivals)
    metrics = MetricRecord({"weight": weight, "clients": len(arrivals)})
    if (examples := [a.examples for a in arrivals if a.examples is not None]) and len(examples) == len(arrivals):
        metrics["num-examples"] = sum(examples)
    if (losses := [a.loss * a.weight for a in arrivals if a.loss is not None]) and len(losses) == len(arrivals):
        metrics["train-loss"] = sum(losses) / weight
    if (bits := [a.bit for a in arrivals if a.bit is not None]) and len(bits) == len(arrivals):
        metrics["clip-bit"] = sum(bits)
    total = stack([arrival.row for arrival in arrivals]).sum(dim=0)
    content = RecordDict({"arrays": to_record(total, layout), "metrics": metrics})
    first = next(reply for reply in replies if client_of(reply.metadata.src_node_id) not in failed)
    return [Message(content, reply_to=first), *errors]


def _arrival(client: int, row: Tensor, metrics: MetricRecord, norm: float) -> Arrival:
    summed = "clients" in metrics
    return Arrival(
        client=None if summed else client,
        row=row,
        weight=_number(metrics, "weight"),
        norm=norm,
        examples=int(_number(metrics, "num-examples")) if "num-examples" in metrics else None,
        loss=_number(metrics, "train-loss") if "train-loss" in metrics else None,
        clients=int(_number(metrics, "clients")) if summed else 1,
        bit=_number(metrics, "clip-bit") if "clip-bit" in metrics else None,
    )


def _number(metrics: MetricRecord, key: str) -> float:
    value = metrics[key]
    if not isinstance(value, int | float):
        raise ValueError(f"its {key} is {value!r}, not a number")
    return float(value)
