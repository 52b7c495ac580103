# SPDX-License-Identifier: Apache-2.0
"""Privacy: what clients do to protect themselves, what that is worth, and to whom.

`mechanisms` clip, noise and compress. `accounting` turns noise into ε and back (`gaussian`: closed forms, `loss`:
privacy loss distributions, `renyi`: moments). `promises` say what each defence protects from whom, and `spending` how
well: as a `PrivacyClaim`, because an ε without its δ, unit, adjacency, observer and accountant means nothing.
"""

from fedsim.privacy.accounting import (
    Account,
    Accountant,
    Mechanism,
    account,
    compositions_for,
    delta,
    epsilon,
    epsilon_curve,
    noise_multiplier_for,
    smallest_noise,
)
from fedsim.privacy.claim import Adjacency, PrivacyClaim, Sampling, Unit
from fedsim.privacy.gaussian import classic_gaussian_sigma, gaussian_delta, gaussian_epsilon, gaussian_sigma
from fedsim.privacy.loss import COARSE, FINE, Grid
from fedsim.privacy.mechanisms import (
    Clipped,
    add_gaussian,
    add_laplace,
    clip,
    effective_noise_multiplier,
    next_clipping_norm,
    noise_share,
    prune,
    quantise,
    sign,
    within_norm,
)
from fedsim.privacy.promises import OUTSIDER, SERVER, Exposure, Noise, Setting, rows_needed
from fedsim.privacy.rounding import p_value_text, rounded_down, rounded_up
from fedsim.privacy.spending import claims, privacy_curve, resolve_noise, settings_by_round

__all__ = [
    "COARSE",
    "FINE",
    "OUTSIDER",
    "SERVER",
    "Account",
    "Accountant",
    "Adjacency",
    "Clipped",
    "Exposure",
    "Grid",
    "Mechanism",
    "Noise",
    "PrivacyClaim",
    "Sampling",
    "Setting",
    "Unit",
    "account",
    "add_gaussian",
    "add_laplace",
    "claims",
    "classic_gaussian_sigma",
    "clip",
    "compositions_for",
    "delta",
    "effective_noise_multiplier",
    "epsilon",
    "epsilon_curve",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "next_clipping_norm",
    "noise_multiplier_for",
    "noise_share",
    "p_value_text",
    "privacy_curve",
    "prune",
    "quantise",
    "resolve_noise",
    "rounded_down",
    "rounded_up",
    "rows_needed",
    "settings_by_round",
    "sign",
    "smallest_noise",
    "within_norm",
]
