# SPDX-License-Identifier: Apache-2.0
"""The contestants other than fedsim. Each returns the seconds of its rounds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from workload import BATCH, CLIPPING_NORM, COHORT, LEARNING_RATE, NOISE_MULTIPLIER, make_model


def timed(work: Callable[[], None], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return seconds


def bare_loop(name: str, x: Tensor, y: Tensor, rounds: int) -> list[float]:
    """FedAvg as a plain sequential PyTorch loop, with nothing around it."""
    model, rng = make_model(name), np.random.default_rng(0)
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def one_round() -> None:
        total = {key: torch.zeros_like(value) for key, value in weights.items()}
        for client in rng.choice(len(x), COHORT, replace=False).tolist():
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for rows in torch.randperm(x.shape[1]).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    total[key] += value
        weights.update({key: value / COHORT for key, value in total.items()})

    return timed(one_round, rounds)


def opacus_loop(name: str, x: Tensor, y: Tensor, cohort: int, batch: int, poisson: bool, rounds: int) -> list[float]:
    """The same loop with DP-SGD on each client by Opacus: per-example gradients, clipping, noise; after a warm-up."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.filterwarnings("ignore")
    model, rng = GradSampleModule(make_model(name)), np.random.default_rng(0)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    examples = x.shape[1]

    def one_round() -> None:
        total = {key: torch.zeros_like(value) for key, value in weights.items()}
        for client in rng.choice(len(x), cohort, replace=False).tolist():
            model.load_state_dict(weights)
            optimizer = DPOptimizer(
                torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
                noise_multiplier=NOISE_MULTIPLIER,
                max_grad_norm=CLIPPING_NORM,
                expected_batch_size=batch,
            )
            steps = -(-examples // batch)
            chosen = [torch.from_numpy(np.flatnonzero(rng.random(examples) < batch / examples)) for _ in range(steps)]
            for rows in chosen if poisson else torch.randperm(examples).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    total[key] += value
        weights.update({key: value / cohort for key, value in total.items()})

    return timed(one_round, rounds + 1)[1:]


def pfl_research(name: str, x: Tensor, y: Tensor, rounds: int) -> list[float]:
    """apple/pfl-research (PyPI `pfl`), its simulated backend with PyTorch; the first rounds are left out."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    logging.disable(logging.WARNING)
    net = make_model(name)
    net.loss = lambda inputs, labels, eval=False: F.cross_entropy(net(inputs), labels)  # noqa: A006 - pfl's name
    net.metrics = lambda inputs, labels, eval=True: {}  # noqa: A006
    users = {i: Dataset(raw_data=[x[i], y[i]], user_id=str(i)) for i in range(len(x))}
    federation = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    stamps: list[float] = []

    class Stopwatch(TrainingProcessCallback):
        def after_central_iteration(self, aggregate, model, *, central_iteration):  # type: ignore[no-untyped-def]
            stamps.append(time.perf_counter())
            return len(stamps) > rounds + 2, Metrics()

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        SimulatedBackend(training_data=federation, val_data=federation, postprocessors=[WeightByUser()]),
        PyTorchModel(
            net,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=BATCH),
        [Stopwatch()],
        send_metrics_to_platform=False,
    )
    logging.disable(logging.NOTSET)
    return np.diff(stamps)[2:].tolist()


def flower_ray(name: str, rounds: int, cores: int) -> list[float]:
    """Flower's Ray simulation, in a process of its own; the first rounds, in which its workers start, are left out."""
    script = Path(__file__).with_name("flower_ray.py")
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, str(script), name, str(rounds + 2), str(cores)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        raise RuntimeError(f"Flower's Ray simulation failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])[2:]
