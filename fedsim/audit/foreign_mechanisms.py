# SPDX-License-Identifier: Apache-2.0
"""Other people's defences, called as they are: Flower's here, and Opacus's from `opacus_mechanisms`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.mechanism import Subject
from fedsim.audit.opacus_mechanisms import opacus_dp_sgd
from fedsim.audit.verdict import Claim
from fedsim.privacy.gaussian import gaussian_epsilon

__all__ = ["flower_central_dp", "flower_local_dp", "opacus_dp_sgd"]

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


_CLIENTS = 10


@dataclass(frozen=True)
class _Nodes:
    """The part of Flower's `Grid` that a strategy asks when it configures a round: who is connected."""

    count: int

    def get_node_ids(self) -> range:
        """All of them."""
        return range(1, self.count + 1)


@dataclass(frozen=True, eq=False)
class FlowerRound:
    """One round of Flower's central DP with clipping norm 1, for ten clients whose replies are (weight, update)."""

    noise_multiplier: float
    target_delta: float | None = None
    """Of the accountant of flwr[dp]; None: without an accountant."""

    def __call__(self, rows: Floats, rng: Rng) -> Floats:
        """The model after the round, from zero."""
        np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002 - the strategy draws from the global generator
        with _quiet():
            return self.aggregated(self.strategy(), rows)

    def strategy(self) -> Any:
        """A new one, with nothing spent."""
        from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

        plain = FedAvg(fraction_evaluate=0.0)
        if self.target_delta is None:
            return DifferentialPrivacyServerSideFixedClipping(plain, self.noise_multiplier, 1.0, _CLIENTS)
        from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod

        relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
        accountant = RdpAccountant(PrivacyConfig(self.target_delta, _CLIENTS, relation, sampling))
        return DifferentialPrivacyServerSideFixedClipping(
            plain, self.noise_multiplier, 1.0, _CLIENTS, accountant=accountant
        )

    def aggregated(self, strategy: Any, rows: Floats) -> Floats:
        """Configure a round for ten clients, and aggregate the replies that came."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
        from flwr.app.message_type import MessageType

        strategy.configure_train(1, ArrayRecord([np.zeros(_WIDTH)]), ConfigRecord(), _Nodes(_CLIENTS))

        def reply(node: int, row: Floats) -> Message:
            content: dict[str, Any] = {
                "arrays": ArrayRecord([row[1:]]),
                "metrics": MetricRecord({"num-examples": int(row[0])}),
            }
            return Message(RecordDict(content), reply_to=Message(RecordDict(), node, MessageType.TRAIN))

        arrays, _ = strategy.aggregate_train(1, [reply(node, row) for node, row in enumerate(rows, start=1)])
        if arrays is None:
            raise RuntimeError("the strategy released nothing")
        return np.asarray(arrays.to_numpy_ndarrays()[0])

    def accounted(self, rows: Floats) -> float:
        """ε by the accountant after one round."""
        with _quiet():
            strategy = self.strategy()
            self.aggregated(strategy, rows)
        return float(strategy.privacy_spent().epsilon)


def flower_central_dp(
    *,
    accounted: bool = False,
    weighted: bool = False,
    fewer: bool = False,
    noise_multiplier: float = 1.0,
    delta: float = 1e-2,
) -> Subject:
    """Flower's `DifferentialPrivacyServerSideFixedClipping` around `FedAvg`, ten clients; a record is (weight, update).

    To remove a client is to make its update (nearly) zero: one of exactly zero makes Flower 1.41 divide by zero, and
    the whole round fails. The noise is that of a mean over ten, σC/10, so that the claim is that of one Gaussian
    release of σ; with `accounted` it is what the strategy's own accountant (flwr[dp]) computes after one round.

    `weighted`: one client says that it has a thousand times more examples, as FedAvg allows; its share of the mean is
    then not a tenth. `fewer`: a removed client sends nothing. FedAvg then divides by nine, so that the mean of updates
    that oppose the removed one moves by up to 2C/10. In both cases the accounted strategy releases nothing.
    """
    rest = np.zeros((_CLIENTS, 1 + _WIDTH))
    rest[:, 0] = 1
    rest[0, 0] = 1000 if weighted else 1
    rest[:, 2] = 1e-9
    first = rest.copy()
    first[0, 1] = 100.0
    pair = (first, rest, "a client whose update is far beyond the clipping norm, or zero")
    exact = gaussian_epsilon(noise_multiplier / (_CLIENTS * 1000 / 1009 if weighted else 1), delta)
    if fewer:
        first[1:, 1] = -100.0
        pair = (first, first[1:].copy(), "a client that sends an update against the others', or nothing")
        exact = gaussian_epsilon(noise_multiplier / 2, delta)
    mechanism = FlowerRound(noise_multiplier, delta if accounted else None)
    claimed = mechanism.accounted(_equal(first)) if accounted else gaussian_epsilon(noise_multiplier, delta)
    claim = Claim(claimed, delta, unit="client")
    return Subject(mechanism, claim, [pair], exact_epsilon=None if accounted and fewer else exact, trials=16_000)


def _equal(rows: Floats) -> Floats:
    """The same updates with equal weights, without which the accountant refuses the round."""
    equal = rows.copy()
    equal[:, 0] = 1
    return equal
