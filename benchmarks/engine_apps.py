# SPDX-License-Identifier: Apache-2.0
"""A ClientApp that sends back what it gets, and a ServerApp that counts the messages a second, there and back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

PARAMETERS = {"no-op": 0, "100k parameters": 100_000}
client = ClientApp()
server = ServerApp()


@client.train()
def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def content(parameters: int) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord([np.ones(parameters, np.float32)])} if parameters else {})


def wave(grid: Grid, nodes: list[int], parameters: int) -> float:
    """Seconds for one message to every node and back."""
    begun = time.perf_counter()
    same = content(parameters)  # for all, as a strategy sends the model
    missing = set(grid.push_messages([Message(same, node, MessageType.TRAIN) for node in nodes]))
    while missing:
        arrived = list(grid.pull_messages(missing))
        missing -= {reply.metadata.reply_to_message_id for reply in arrived}
        if any(reply.has_error() for reply in arrived):
            raise RuntimeError(arrived[0].error.reason)
        if missing:
            time.sleep(0.005)
    return time.perf_counter() - begun


def measure(grid: Grid, nodes: int, waves: int) -> dict[str, float]:
    """Messages a second, of each kind, and when the first of all came back (by the clock of the machine)."""
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.05)
    everybody = list(grid.get_node_ids())[:nodes]
    wave(grid, everybody, 0)
    measured = {"first": time.time()}
    for name, parameters in PARAMETERS.items():
        measured[name] = nodes * waves / sum(wave(grid, everybody, parameters) for _ in range(waves))
    return measured


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    measured = measure(grid, int(settings["nodes"]), int(settings["waves"]))
    Path(str(settings["file"])).write_text(json.dumps(measured))
