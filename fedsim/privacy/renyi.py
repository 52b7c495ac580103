# SPDX-License-Identifier: Apache-2.0
"""Rényi differential privacy (RDP) by dp-accounting: moments at many orders, which add up, and the best of them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import PrivacyError

if TYPE_CHECKING:
    import dp_accounting

    from fedsim.privacy.accounting import Mechanism

# dp_accounting takes a second to import, so that the functions do it when they need it.


def rdp_epsilon(steps: Sequence[tuple[Mechanism, int]], delta: float) -> float:
    """The ε at δ of all releases (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(quietly(rdp_privacy_accountant.compute_epsilon, _orders(), _rdp(steps), delta)[0])


def rdp_delta(steps: Sequence[tuple[Mechanism, int]], epsilon: float) -> float:
    """The δ at ε of all releases."""
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(quietly(rdp_privacy_accountant.compute_delta, _orders(), _rdp(steps), epsilon)[0])


def _orders() -> NDArray[np.float64]:
    from dp_accounting.rdp import rdp_privacy_accountant

    return np.asarray(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=np.float64)


def _rdp(steps: Sequence[tuple[Mechanism, int]]) -> NDArray[np.float64]:
    return sum((count * _rdp_once(mechanism) for mechanism, count in steps), np.zeros(len(_orders())))


@lru_cache(maxsize=256)
def _rdp_once(mechanism: Mechanism) -> NDArray[np.float64]:
    """The Rényi divergences of one release at all orders."""
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    relations = dp_accounting.NeighboringRelation
    relation = relations.REPLACE_ONE if mechanism.adjacency == "replace" else relations.ADD_OR_REMOVE_ONE
    rdp = rdp_privacy_accountant.RdpAccountant(neighboring_relation=relation)
    try:
        quietly(rdp.compose, _event(mechanism))
    except dp_accounting.UnsupportedEventError as error:
        raise PrivacyError(
            f"accountant rdp does not know {mechanism.kind} noise with {mechanism.sampling} sampling; use pld"
        ) from error
    # Rounding can leave no divergence at a tiny rate, or a negative one: dp-accounting would conclude that ε is 0.
    floored: NDArray[np.float64] = np.maximum(rdp.rdp, 1e-14)
    return floored


def _event(mechanism: Mechanism) -> dp_accounting.DpEvent:
    import dp_accounting

    noisy = {"gaussian": dp_accounting.GaussianDpEvent, "laplace": dp_accounting.LaplaceDpEvent}[mechanism.kind]
    event = noisy(mechanism.noise_multiplier)
    if not mechanism.sampled:
        return event
    if mechanism.sampling == "poisson":
        return dp_accounting.PoissonSampledDpEvent(mechanism.sample_rate, event)
    part, whole = mechanism.sample_rate.as_integer_ratio()
    return dp_accounting.SampledWithoutReplacementDpEvent(whole, part, event)


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Call an accountant without its notes on orders that it leaves out and on infinities on the way."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return function(*args)
    finally:
        absl.setLevel(level)
