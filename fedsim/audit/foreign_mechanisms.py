# SPDX-License-Identifier: Apache-2.0
"""Other people's defences, called as they are: Flower's `LocalDpMod` and central-DP strategy, Opacus's engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.mechanism import Subject
from fedsim.audit.verdict import Claim
from fedsim.privacy.gaussian import gaussian_epsilon

Floats = NDArray[np.float64]
Rng = np.random.Generator
_WIDTH = 4


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower logs two lines for every call, and asks for the run that a message belongs to."""
    from flwr.supercore.task_identity import TaskIdentity

    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:  # a message belongs to a run, and there is none
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    try:
        yield
    finally:
        logger.setLevel(level)


def _along(value: float) -> Floats:
    row = np.zeros((1, _WIDTH))
    row[0, 0] = value
    return row


def flower_local_dp(*, doubled: bool = False, eps: float = 3.0, delta: float = 1e-2) -> Subject:
    """Flower's `LocalDpMod` around a client that returns its update; the data set is that update.

    Local DP promises that any two clients look alike, so that the update may be replaced by any other, and the clipped
    update moves by up to 2C. The mod's argument `sensitivity` is left to the user; C is what people give (Flower's
    documentation calls it "the sensitivity of the client model"), 2C (`doubled`) what the promise needs.
    """
    from flwr.app import Context, Message, RecordDict
    from flwr.app.message_type import MessageType
    from flwr.client.mod import LocalDpMod
    from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat as compat

    norm = 1.0
    mod = LocalDpMod(norm, 2 * norm if doubled else norm, eps, delta)
    model = ndarrays_to_parameters([np.zeros(_WIDTH)])
    context = Context(0, 0, {}, RecordDict(), {})

    def mechanism(update: Floats, rng: Rng) -> Floats:
        np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002 - the mod draws from the global generator

        def train(incoming: Message, _: Context) -> Message:
            result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([update[0]]), 1, {})
            return Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=incoming)

        with _quiet():
            message = Message(compat.fitins_to_recorddict(FitIns(model, {}), keep_input=True), 1, MessageType.TRAIN)
            reply = mod(message, context, train)
        return np.asarray(
            parameters_to_ndarrays(compat.recorddict_to_fitres(reply.content, keep_input=True).parameters)[0]
        )

    pair = (_along(100.0), _along(-100.0), "an update far beyond the clipping norm, or its negative")
    sigma = float(np.sqrt(2 * np.log(1.25 / delta)) / eps) * (1.0 if doubled else 0.5)
    exact = gaussian_epsilon(sigma, delta)
    claim = Claim(eps, delta, unit="client", adjacency="replace")
    return Subject(mechanism, claim, [pair], exact_epsilon=exact, trials=24_000)


def flower_central_dp(*, weighted: bool = False, noise_multiplier: float = 1.0, delta: float = 1e-2) -> Subject:
    """Flower's `DifferentialPrivacyServerSideFixedClipping` around `FedAvg`, ten clients; a record is (weight, update).

    To remove a client is to make its update (nearly) zero: one of exactly zero makes Flower 1.41 divide by zero, and
    the whole round fails. The noise is that of a mean over ten, σC/10, so that the claim is
    that of one Gaussian release of σ. `weighted`: one client says that it has a thousand times more examples, as
    FedAvg allows; its share of the mean is then not a tenth.
    """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.app.message_type import MessageType
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

    clients = 10
    model = ArrayRecord([np.zeros(_WIDTH)])
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), noise_multiplier, 1.0, clients)
    strategy.current_arrays = model  # what configure_train sets when a round begins

    def reply(node: int, row: Floats) -> Message:
        content: dict[str, Any] = {
            "arrays": ArrayRecord([row[1:]]),
            "metrics": MetricRecord({"num-examples": int(row[0])}),
        }
        return Message(RecordDict(content), reply_to=Message(RecordDict(), node, MessageType.TRAIN))

    def mechanism(rows: Floats, rng: Rng) -> Floats:
        np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002 - the strategy draws from the global generator
        with _quiet():
            arrays, _ = strategy.aggregate_train(1, [reply(node + 1, row) for node, row in enumerate(rows)])
        if arrays is None:
            raise RuntimeError("the strategy refused the replies")
        return np.asarray(arrays.to_numpy_ndarrays()[0])

    rest = np.zeros((clients, 1 + _WIDTH))
    rest[:, 0] = 1
    rest[0, 0] = 1000 if weighted else 1
    rest[:, 2] = 1e-9
    first = rest.copy()
    first[0, 1] = 100.0
    claim = Claim(gaussian_epsilon(noise_multiplier, delta), delta, unit="client")
    pair = (first, rest, "a client whose update is far beyond the clipping norm, or zero")
    exact = gaussian_epsilon(noise_multiplier / (clients * 1000 / 1009 if weighted else 1), delta)
    return Subject(mechanism, claim, [pair], exact_epsilon=exact, trials=16_000)


@dataclass(frozen=True, eq=False)
class OpacusStep:
    """One step of Opacus's `DPOptimizer` on a Poisson batch of its `DPDataLoader`, from zero weights."""

    noise_multiplier: float
    batch_size: int = 5

    def __call__(self, records: Floats, rng: Rng) -> Floats:
        """One step."""
        return np.asarray(self.batch(records, rng, 1)[0])

    def batch(self, records: Floats, rng: Rng, trials: int) -> Floats:
        """So many steps of one engine; the weights are put back to zero after each, so that they are independent."""
        import torch

        torch.manual_seed(int(rng.integers(2**62)))
        model, optimizer, loader, _ = _opacus(records, self.noise_multiplier, self.batch_size)
        (weight,) = model.parameters()
        rows: list[Floats] = []
        while len(rows) < trials:
            for x, y in loader:
                _step(model, optimizer, x, y)
                rows.append(weight.detach().double().flatten().numpy().copy())
                with torch.no_grad():
                    weight.zero_()
        return np.stack(rows[:trials])


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    import torch

    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook")  # its hooks, on inputs without gradients
        torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def _opacus(records: Floats, noise_multiplier: float, batch_size: int) -> tuple[Any, Any, Any, Any]:
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    x, y = torch.tensor(records[:, :-1], dtype=torch.float32), torch.tensor(records[:, -1]).long()
    model = torch.nn.Linear(x.shape[1], 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its randomness is not cryptographic
        engine = PrivacyEngine(accountant="prv")
        made = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise_multiplier, max_grad_norm=1.0
        )
    return (*made, engine)


@cache
def _opacus_claim(noise_multiplier: float, batch_size: int, delta: float) -> float:
    """What its own accountant says after one step."""
    model, optimizer, loader, engine = _opacus(np.zeros((10, 4)), noise_multiplier, batch_size)
    _step(model, optimizer, *next(iter(loader)))
    return float(engine.get_epsilon(delta))


def opacus_dp_sgd(noise_multiplier: float = 0.8, delta: float = 1e-2) -> Subject:
    """Opacus DP-SGD, one step of a tiny model; the claim is its PRV accountant's. To remove a record is to zero x."""
    from fedsim.privacy.accounting import Mechanism, epsilon

    rest = np.zeros((10, 4))
    first = rest.copy()
    first[0] = (100.0, 0.0, 0.0, 1.0)
    claim = Claim(_opacus_claim(noise_multiplier, 5, delta), delta)
    exact = epsilon(Mechanism("gaussian", noise_multiplier, "add/remove", "poisson", 0.5), 1, delta)
    pair = (first, rest, "an example with a gradient far beyond the clipping norm, or none")
    return Subject(OpacusStep(noise_multiplier), claim, [pair], exact_epsilon=exact, trials=16_000)
