# SPDX-License-Identifier: Apache-2.0
"""The server does not trust a client: a bad reply is refused with its reason, and the others count."""

import math
from statistics import median_low

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsim.federation.arrays import to_record
from fedsim.federation.inline import InlineGrid, client_of, error_reply, node_of
from fedsim.strategies.replies import Limits, read_replies
from fedsim.training import layout_of

LAYOUT = layout_of(torch.nn.Linear(3, 2))
GOOD = {"num-examples": 5, "weight": 5.0, "train-loss": 0.1, "steps": 1}


@pytest.fixture(autouse=True)
def _identity() -> None:
    InlineGrid(1, lambda messages, contexts: [], {})


def reply(client: int, record: ArrayRecord, metrics: dict[str, float]) -> Message:
    asked = Message(RecordDict(), node_of(client), MessageType.TRAIN)
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=asked)


def record(value: float = 1.0) -> ArrayRecord:
    return to_record(torch.full((LAYOUT.size,), value), LAYOUT)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: reply(1, record(math.nan), GOOD), "not finite"),
        (lambda: reply(1, record(math.inf), GOOD), "not finite"),
        (lambda: reply(1, ArrayRecord(), GOOD), "do not fit the model"),
        (lambda: reply(1, ArrayRecord({"weight": Array(torch.zeros(2, 4).numpy())}), GOOD), "do not fit the model"),
        (lambda: reply(1, record(), {**GOOD, "weight": -1.0}), "its weight is -1.0"),
        (lambda: reply(1, record(), {**GOOD, "weight": math.nan}), "its weight is nan"),
        (lambda: reply(1, record(), {**GOOD, "num-examples": 0}), "its num-examples is 0"),
        (lambda: reply(1, record(), {"num-examples": 5}), "its 'weight' is missing"),
        (lambda: error_reply(Message(RecordDict(), node_of(1), MessageType.TRAIN), "no power"), "no power"),
    ],
)
def test_a_bad_reply_is_refused_and_the_others_count(bad, reason) -> None:  # type: ignore[no-untyped-def]
    replies = [reply(2, record(), GOOD), bad(), reply(0, record(), GOOD)]
    arrivals, refused, total = read_replies(replies, LAYOUT, client_of)
    assert total is not None
    torch.testing.assert_close(total, sum(arrival.weight * arrival.row for arrival in arrivals))
    assert [arrival.client for arrival in arrivals] == [0, 2]
    assert [refusal.client for refusal in refused] == [1]
    assert reason in refused[0].reason


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.sampled_from([1.0, 2.5, 10.0]))
def test_nobody_counts_for_more_than_so_many_times_the_median(counts: list[int], most: float) -> None:
    replies = [
        reply(client, record(client + 1.0), {**GOOD, "num-examples": count, "weight": float(count)})
        for client, count in enumerate(counts)
    ]
    arrivals, refused, total = read_replies(replies, LAYOUT, client_of, Limits(largest_weight=most))
    bound = most * median_low(counts)
    assert not refused
    assert [arrival.weight for arrival in arrivals] == [min(count, bound) for count in counts]
    assert [arrival.examples for arrival in arrivals] == counts
    assert [arrival.told_weight for arrival in arrivals] == [c if c > bound else None for c in counts]
    assert total is not None
    expected = sum(arrival.weight * arrival.row.double() for arrival in arrivals)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0)


def test_a_million_examples_weigh_ten_and_not_6667() -> None:
    counts = (150, 150, 1_000_000)
    replies = [reply(c, record(), {**GOOD, "num-examples": n, "weight": float(n)}) for c, n in enumerate(counts)]
    for limits, weights in ((Limits(largest_weight=10.0), [150, 150, 1500]), (Limits(), [150, 150, 1_000_000])):
        assert [arrival.weight for arrival in read_replies(replies, LAYOUT, client_of, limits)[0]] == weights
