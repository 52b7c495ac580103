# SPDX-License-Identifier: Apache-2.0
"""The auditor: what an adversary achieved, what a claim allows, and whether the two agree.

`audit_mechanism` audits any function of a data set and a generator; it is imported when it is asked for, so that
whoever needs one bound does not wait for the rest. The rooms, each with the folder behind it: `estimators`
(`estimation/`: from counts and scores to epsilon), `bounds` (`limits/`: what a claim allows), `mechanism` (`blackbox/`:
any callable), `federation` (`evidence/`: canaries in a federation), `games` (`playing/`), `reconstruction` (`scores/`),
`verdict` and `planner`. `zoo/` and `calibration/` test the auditor itself.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.audit.blackbox.pairs import Domain, Pair
    from fedsim.audit.mechanism import Subject, audit_mechanism, audit_target
    from fedsim.audit.verdict import Claim, Verdict

__all__ = ["Claim", "Domain", "Pair", "Subject", "Verdict", "audit_mechanism", "audit_target"]

_WHERE = {"Claim": "verdict", "Verdict": "verdict", "Domain": "blackbox.pairs", "Pair": "blackbox.pairs"}


def __getattr__(name: str) -> Any:
    """The public names, from where they are."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'fedsim.audit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedsim.audit.{_WHERE.get(name, 'mechanism')}"), name)
