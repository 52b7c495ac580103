# SPDX-License-Identifier: Apache-2.0
"""Flower's own Ray simulation on the workload; prints the seconds of its rounds. Arguments: model, rounds, cores."""

import json
import sys
import time

from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import CLIENTS, COHORT, make_model

name, rounds, cores = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begun: list[float] = []
seconds: list[float] = []


class Timed(FedAvg):
    def configure_train(self, *arguments, **options):  # type: ignore[no-untyped-def]
        begun.append(time.perf_counter())
        return super().configure_train(*arguments, **options)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        result = super().aggregate_train(server_round, list(replies))
        seconds.append(time.perf_counter() - begun[-1])
        return result


server = ServerApp()


@server.main()
def main(grid, context) -> None:  # type: ignore[no-untyped-def]
    strategy = Timed(
        fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS
    )
    arrays = ArrayRecord(make_model(name).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord({"model": name}))


run_simulation(
    server,
    app,
    num_supernodes=CLIENTS,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}},
)
print(json.dumps(seconds))
