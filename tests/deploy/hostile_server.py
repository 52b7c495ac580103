# SPDX-License-Identifier: Apache-2.0
"""A server that wants to run code of its own on its clients, by an AgentApp of Flower. Run on a test's server.

Flower starts another program on the clients for such a run (flwr-agentapp, not flwr-clientapp), which would install the
bundle and import what it names. Whatever imports it leaves a file named after the network namespace that it is in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.supercore.fab import Fab

from fedsim.deploy.layout import open_server
from fedsim.federation.bundle import PYPROJECT
from fedsim.federation.link import Link, control

AGENT = """\
import json
import os
import time
from pathlib import Path

from flwr.agentapp import AgentApp

(Path({marks!r}) / os.readlink("/proc/self/ns/net").strip("net:[]")).touch()
app = AgentApp()


@app.main()
def main(agent, context):
    def call(name, **arguments):
        return json.loads(agent.grid.call({{"name": name, "arguments": arguments, "call_id": name}})["output"])

    messages = [{{"dst_node_id": node["id"], "payload": "hello"}} for node in call("get_nodes")["nodes"]]
    sent = [result["message_id"] for result in call("push_messages", messages=messages)["results"]]
    waiting, replies, until = set(sent), [], time.monotonic() + 240
    while waiting and time.monotonic() < until:
        time.sleep(1)
        replies += agent.grid._grid.pull_messages(waiting)
        waiting -= {{reply.metadata.reply_to_message_id for reply in replies}}
    said = [reply.error.reason if reply.has_error() else dict(reply.content["client"]) for reply in replies]
    (Path({marks!r}) / "replies").write_text(str(said))
"""


def main(folder: Path, marks: Path) -> None:
    server = open_server(folder)
    components = PYPROJECT[PYPROJECT.index("serverapp =") : PYPROJECT.index("[tool.flwr.app.config]")]
    pyproject = PYPROJECT.replace(components, 'agentapp = "agent:app"\n\n')
    files = {"pyproject.toml": pyproject.encode(), "agent.py": AGENT.format(marks=str(marks)).encode()}
    fab = Fab("", build_fab_from_files(files)[0], {})
    with control(Link(server.superlink, server.path / "ca.crt")) as client:
        run = client.StartRun(StartRunRequest(fab=fab_to_proto(fab), user_prompt="hello")).run_id
        while (status := client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status).status != "finished":
            time.sleep(1)
    print(status.sub_status, status.details)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
