# SPDX-License-Identifier: Apache-2.0
"""What came back from the clients, read and checked: the server does not trust a client.

A reply whose records or arrays do not fit the model, whose bytes are corrupt, whose weight is not what its examples are
worth, whose update is not finite or absurdly long, that comes twice or from a stranger is refused with a reason, and
the round goes on with the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedsim.federation.arrays import Row, stack, tensor_of, to_record, to_row
from fedsim.federation.inline import told
from fedsim.federation.sums import norms_and_sum
from fedsim.training import Layout


@dataclass(frozen=True)
class Arrival:
    """One accepted reply. Under secure aggregation it is the sum over `clients` clients, and `client` is None."""

    client: int | None
    update: Row
    weight: float
    norm: float
    examples: int | None = None
    loss: float | None = None
    clients: int = 1
    bit: float | None = None
    told_weight: float | None = None
    """The weight that the client asked for, where it counts for less."""

    @property
    def row(self) -> Tensor:
        """The flat vector (P,) that arrived."""
        return tensor_of(self.update)


@dataclass(frozen=True)
class Refusal:
    """A client that failed, or whose reply was refused."""

    client: int
    reason: str
    diverged: bool = False
    """Whether the update is one that local training gives when it diverges."""


@dataclass(frozen=True)
class Limits:
    """What a reply may be at most, and how its weight follows from its examples."""

    largest_norm: float = math.inf
    most_examples: int = 1_000_000
    largest_weight: float | None = None
    """Of a weight, as a multiple of the median of the round."""
    weighting: str | None = None
    largest_bit: float = math.inf
    weighted: bool = False
    """Whether updates were multiplied by their weights, as under secure aggregation."""
    summed: bool = False
    """Whether replies are sums over clients, which only the server's own secure aggregation makes."""


def largest_norm(model: Tensor, noise: float) -> float:
    """1000 · (1 + ‖w‖ + σC√P): far beyond what honest training and its noise (of deviation σC) give.

    A longer update is absurd: it would replace the model. This is no defence against a client that poisons with care.
    """
    return 1e3 * (1.0 + float(torch.linalg.vector_norm(model)) + noise * math.sqrt(model.numel()))


def read_replies(
    replies: Iterable[Message], layout: Layout, client_of: Callable[[int], int], limits: Limits | None = None
) -> tuple[list[Arrival], list[Refusal], Tensor | None]:
    """The accepted and the refused replies, each in the order of the clients, and the sum Σ w_k u_k of the accepted."""
    limits = limits or Limits()
    fitting: list[tuple[int, Row, dict[str, float]]] = []
    refused: list[Refusal] = []
    sources = sorted(((_source(reply), reply) for reply in replies), key=itemgetter(0))
    times = Counter(source for source, _ in sources)
    for source, reply in sources:
        client = client_of(source)
        try:
            if reply.has_error():
                raise ValueError(reply.error.reason)
            if times[source] > 1:
                raise ValueError(f"it replied {times[source]} times in one round")
            fitting.append((client, *_content(reply.content, layout, limits)))
        except KeyError as error:
            refused.append(Refusal(client, told(f"its {error} is missing")))
        except (ValueError, TypeError) as error:
            refused.append(Refusal(client, told(str(error))))
        except Exception as error:  # whatever else somebody's bytes can cause
            refused.append(Refusal(client, told(f"its reply cannot be read ({type(error).__name__}: {error})")))
    if not fitting:
        return [], refused, None
    _bound_weights([numbers for _, _, numbers in fitting], limits)
    norms, total = norms_and_sum([row for _, row, _ in fitting], [numbers["weight"] for _, _, numbers in fitting])
    arrivals = []
    for (client, row, numbers), norm in zip(fitting, norms, strict=True):
        if not math.isfinite(norm):
            reason = "its update is not finite: local training diverged, or it is malicious"
            refused.append(Refusal(client, reason, diverged=True))
        elif norm > limits.largest_norm * (numbers["weight"] if limits.weighted else 1.0):
            refused.append(Refusal(client, f"the norm of its update is {norm:.3g}, which is absurd", diverged=True))
        else:
            arrivals.append(_arrival(client, row, numbers, norm))
    return arrivals, refused, total if len(arrivals) == len(fitting) else sum_of(arrivals)


def _bound_weights(replies: Sequence[dict[str, float]], limits: Limits) -> None:
    """Let nobody count for more than so many times the median; a weight that is reduced is kept beside it.

    Of an even number the lower of the two in the middle is the median, so that one of two cannot raise it. Updates that
    come multiplied by their weights are left as they are.
    """
    if limits.largest_weight is None or limits.summed or limits.weighted:
        return
    weights = sorted(numbers["weight"] for numbers in replies)
    most = limits.largest_weight * weights[(len(weights) - 1) // 2]
    for numbers in replies:
        if numbers["weight"] > most:
            numbers["told-weight"], numbers["weight"] = numbers["weight"], most


def sum_of(arrivals: Sequence[Arrival]) -> Tensor | None:
    """Σ w_k u_k, in the order of the clients; None if there is nobody."""
    if not arrivals:
        return None
    return norms_and_sum([arrival.update for arrival in arrivals], [arrival.weight for arrival in arrivals])[1]


def _content(content: RecordDict, layout: Layout, limits: Limits) -> tuple[Row, dict[str, float]]:
    """The update (P,) and the numbers of a reply; an exception says what is wrong with it."""
    record, metrics = content["arrays"], content["metrics"]
    if not isinstance(record, ArrayRecord) or not isinstance(metrics, MetricRecord):
        raise TypeError("its records are not arrays and metrics")
    if len(content) > 2:
        raise ValueError(f"it holds {next(k for k in content if k not in ('arrays', 'metrics'))!r}, {_UNASKED}")
    if unasked := sorted(metrics.keys() - _METRICS):
        raise ValueError(f"it holds {unasked[0]!r}, {_UNASKED}")
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        if not isinstance(value, _NUMBER):
            raise ValueError(f"its {key} is {value!r}, not a number")
        numbers[key] = value
    for key in ("weight", "num-examples"):
        if (key in numbers or key == "weight") and not 0 < numbers[key] < math.inf:
            raise ValueError(f"its {key} is {numbers[key]}, not a positive number")
    if not float(numbers.get("num-examples", 1)).is_integer():
        raise ValueError(f"its num-examples is {numbers['num-examples']}, not a whole number")
    if not limits.summed:
        _check_weight(numbers, limits)
    return to_row(record, layout), numbers


def _check_weight(numbers: dict[str, float], limits: Limits) -> None:
    """ValueError for a client that wants to count for more than its examples are worth."""
    if "clients" in numbers:
        raise ValueError("it says that it is a sum over clients")
    weight, examples = numbers["weight"], numbers.get("num-examples", 1)
    if max(weight, examples) > limits.most_examples:
        many = f"{max(weight, examples):.0f} examples"
        raise ValueError(f"it says that it has {many}, and strategy.most_examples is {limits.most_examples}")
    if "clip-bit" in numbers and abs(_finite(numbers, "clip-bit") or 0.0) > limits.largest_bit:
        raise ValueError(f"its clip-bit is {numbers['clip-bit']}, which no honest noise gives")
    worth = weight if limits.weighting is None else examples if limits.weighting == "examples" else 1.0
    if weight != worth:
        raise ValueError(f"its weight is {weight:g}, but with weighting {limits.weighting} it is {worth:g}")


_UNASKED = "which nobody asked for"
_METRICS = {"weight", "num-examples", "steps", "train-loss", "clip-bit", "clients"}
_NUMBER = (int, float)


def secure_sum(
    replies: Iterable[Message],
    layout: Layout,
    client_of: Callable[[int], int],
    limits: Limits | None = None,
    *,
    all_needed: bool = False,
) -> list[Message]:
    """Secure aggregation as an access model: the server gets one reply with the sums, and who failed, but no update.

    The clients have multiplied their updates by their weights, so that sum_k w_k u_k / sum_k w_k is the average. As in
    a deployment, whose masks fall away only then, there is a sum if more than half have answered, and two at least; or
    everybody, where they share the noise (`all_needed`): a sum without somebody's share would be protected by less
    than is claimed.
    """
    replies = list(replies)
    arrivals, refused, _ = read_replies(replies, layout, client_of, limits)
    reasons = {refusal.client: refusal.reason for refusal in refused}
    errors = [_refusal(reply, reasons[who]) for reply in replies if (who := client_of(_source(reply))) in reasons]
    needed = len(replies) if all_needed else max(2, len(replies) // 2 + 1)
    if not arrivals or len(arrivals) < needed:
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
    first = next(reply for reply in replies if client_of(_source(reply)) not in reasons)
    return [Message(content, reply_to=first), *errors]


def _source(reply: Message) -> int:
    return reply.metadata.src_node_id


def _refusal(reply: Message, reason: str) -> Message:
    """The same reply with nothing in it but the reason why it was refused: the server sees no single update."""
    refused = Message(Error(ErrorCode.UNKNOWN, reason), reply_to=reply)
    refused.metadata.__dict__["_src_node_id"] = _source(reply)
    return refused


def _arrival(client: int, update: Row, numbers: dict[str, float], norm: float) -> Arrival:
    summed = "clients" in numbers
    return Arrival(
        client=None if summed else client,
        update=update,
        weight=float(numbers["weight"]),
        norm=norm,
        examples=int(numbers["num-examples"]) if "num-examples" in numbers else None,
        loss=_finite(numbers, "train-loss"),
        clients=int(numbers["clients"]) if summed else 1,
        bit=_finite(numbers, "clip-bit"),
        told_weight=numbers.get("told-weight"),
    )


def _finite(numbers: dict[str, float], key: str) -> float | None:
    """A number that is only told, not aggregated with the model: if it is none, it is left out."""
    value = numbers.get(key)
    return float(value) if value is not None and math.isfinite(value) else None
