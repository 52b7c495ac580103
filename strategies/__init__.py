# SPDX-License-Identifier: Apache-2.0
"""What a server does with updates: Flower strategies."""

from fedsim.strategies.fedavg import FedAvg
from fedsim.strategies.fedsgd import FedSGD

STRATEGIES: dict[str, type[FedAvg]] = {"fedavg": FedAvg, "fedsgd": FedSGD}

__all__ = ["STRATEGIES", "FedAvg", "FedSGD"]
