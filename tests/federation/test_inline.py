# SPDX-License-Identifier: Apache-2.0
"""Any Flower ServerApp and ClientApp run on the inline grid, as on Flower's own runtimes."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedsim.federation.inline import InlineGrid, client_of, node_of, one_by_one

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    calls = context.state.config_records.get("calls", ConfigRecord({"n": 0}))
    calls["n"] = int(calls["n"]) + 1  # type: ignore[arg-type]
    context.state["calls"] = calls
    if client == 3:
        raise RuntimeError("client 3 is broken")
    arrays = [array + client for array in message.content.array_records["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 1, "calls": float(calls["n"])})  # type: ignore[arg-type]
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


def test_flowers_own_strategy_runs_on_it() -> None:
    grid = InlineGrid(3, one_by_one(app), {})
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    result = strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=4)
    assert np.allclose(result.arrays.to_numpy_ndarrays()[0], 4 * (0 + 1 + 2) / 3)
    assert result.train_metrics_clientapp[4]["calls"] == 4.0


def test_a_client_that_fails_answers_with_an_error_and_keeps_its_old_state() -> None:
    grid = InlineGrid(5, one_by_one(app), {})
    content = RecordDict({"arrays": ArrayRecord([np.zeros(1, np.float32)])})
    replies = list(grid.send_and_receive([Message(content, node_of(c), MessageType.TRAIN) for c in (2, 3)]))
    assert [reply.has_error() for reply in replies] == [False, True]
    assert "client 3 is broken" in replies[1].error.reason
    assert [client_of(reply.metadata.src_node_id) for reply in replies] == [2, 3]
    assert node_of(3) not in grid.states
    assert node_of(2) in grid.states


def test_a_population_of_a_million_is_a_range() -> None:
    grid = InlineGrid(10**6, one_by_one(app), {})
    assert len(list(grid.get_node_ids())[:3]) == 3
    assert isinstance(grid.get_node_ids(), range)
