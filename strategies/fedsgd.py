# SPDX-License-Identifier: Apache-2.0
"""Federated SGD (McMahan et al. 2017, section 2): one gradient for each client and round, the server takes the step."""

from __future__ import annotations

from torch import Tensor

from fedsim.strategies.fedavg import FedAvg


class FedSGD(FedAvg):
    """w <- w - eta * sum_k (n_k / n) g_k: with all clients and whole batches, one step of SGD on the union."""

    reply_kind = "gradient"

    def direction(self, average: Tensor) -> Tensor:
        """The average gradient is the gradient."""
        return average
