# SPDX-License-Identifier: Apache-2.0
"""What differential privacy allows an adversary to achieve, as pure functions of a claim's numbers.

| at stake            | bounds                                                     | inverses                          |
|---------------------|------------------------------------------------------------|-----------------------------------|
| membership          | `membership_advantage`, `membership_accuracy`, `tpr_at_fpr`| `epsilon_from_advantage`, ...     |
| all pairs of rates  | `approximate_dp`, `gaussian`, `sampled_gaussian`, `region` | `epsilon_from_rates`              |
| an attribute        | `attribute_advantage`, `attribute_success` (exact)         | `epsilon_from_attribute_advantage`|
| a whole record      | `rero_*`, `urero_*`, with κ by `kappa`                     | `epsilon_from_reconstruction`     |
| whatever a claim is | `rero_claim`, `urero_claim`, `membership_claim`            |                                   |

Adjacency is typed: an ε for `add/remove` and one for `replace` are different numbers, `for_adjacency` converts or
refuses. `URERO_ROWS` is the table of WPES 2024 as printed, with the wrong row marked.
"""

from fedsim.audit.limits.attribute import attribute_advantage, attribute_success
from fedsim.audit.limits.claims import (
    Bound,
    amplified,
    as_replace,
    for_adjacency,
    membership_claim,
    rero_claim,
    urero_claim,
    without_amplification,
)
from fedsim.audit.limits.inverses import (
    epsilon_from_accuracy,
    epsilon_from_advantage,
    epsilon_from_attribute_advantage,
    epsilon_from_attribute_success,
    epsilon_from_balle,
    epsilon_from_rates,
    epsilon_from_reconstruction,
    epsilon_from_uniform_advantage,
    epsilon_reconstruction,
)
from fedsim.audit.limits.kappa import Distance, Kappa, kappa, kappa_uniform
from fedsim.audit.limits.membership import (
    advantage_of_curve,
    membership_accuracy,
    membership_advantage,
    membership_advantage_gdp,
    membership_advantage_yeom,
    region,
    region_dp,
    region_gdp,
    tpr_at_fpr,
    tpr_at_fpr_gdp,
    tpr_of_curve,
)
from fedsim.audit.limits.rero import (
    URERO_NOTE,
    URERO_ROWS,
    UreroRow,
    rero,
    rero_balle,
    rero_dpsgd,
    rero_gaussian,
    rero_tight,
    rero_wpes,
    urero,
    urero_prior,
    urero_tight,
    urero_wpes,
)
from fedsim.audit.limits.tradeoff import Curve, approximate_dp, gaussian, sampled_gaussian

__all__ = [
    "URERO_NOTE",
    "URERO_ROWS",
    "Bound",
    "Curve",
    "Distance",
    "Kappa",
    "UreroRow",
    "advantage_of_curve",
    "amplified",
    "approximate_dp",
    "as_replace",
    "attribute_advantage",
    "attribute_success",
    "epsilon_from_accuracy",
    "epsilon_from_advantage",
    "epsilon_from_attribute_advantage",
    "epsilon_from_attribute_success",
    "epsilon_from_balle",
    "epsilon_from_rates",
    "epsilon_from_reconstruction",
    "epsilon_from_uniform_advantage",
    "epsilon_reconstruction",
    "for_adjacency",
    "gaussian",
    "kappa",
    "kappa_uniform",
    "membership_accuracy",
    "membership_advantage",
    "membership_advantage_gdp",
    "membership_advantage_yeom",
    "membership_claim",
    "region",
    "region_dp",
    "region_gdp",
    "rero",
    "rero_balle",
    "rero_claim",
    "rero_dpsgd",
    "rero_gaussian",
    "rero_tight",
    "rero_wpes",
    "sampled_gaussian",
    "tpr_at_fpr",
    "tpr_at_fpr_gdp",
    "tpr_of_curve",
    "urero",
    "urero_claim",
    "urero_prior",
    "urero_tight",
    "urero_wpes",
    "without_amplification",
]
