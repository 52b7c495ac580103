# SPDX-License-Identifier: Apache-2.0
"""An ordinary Flower ClientApp for the workload (importable, so that Ray sends it by reference: Flower's best case)."""

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F
from workload import BATCH, EXAMPLES, LEARNING_RATE, make_data, make_model

data = lru_cache(make_data)
model_of = lru_cache(make_model)
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    (x, y), model = data(), model_of(str(message.content.config_records["config"]["model"]))
    client = int(context.node_config["partition-id"]) % len(x)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in torch.randperm(EXAMPLES).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": EXAMPLES})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
