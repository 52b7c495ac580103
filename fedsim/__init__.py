# SPDX-License-Identifier: Apache-2.0
"""fedsim: simulate a federation, play its malicious server, and audit what its privacy claim is worth.

import fedsim
run = fedsim.run("quickstart")
run.metrics       # a DataFrame, one row a round
run.transcript    # what the server saw
run.claim         # the privacy that was spent, or None
fedsim.attack(run)  # what its server can reconstruct, and how well
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

# Flower sends telemetry and looks for updates when it is first used; here nothing leaves unless the user asks for it.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
# On some processors (AMD Zen 5) the last bits of a product in MKL depend on where its matrices lie in memory, and so on
# who else is in a cohort. This mode rules it out, at no cost that we could measure; MKL reads it at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
# Large tensors on large pages, where the system leaves that to programs: a thirtieth of the time of a round is saved.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from fedsim.federation.plan import Plan
    from fedsim.federation.run import Run, open_run
    from fedsim.privacy import PrivacyClaim
    from fedsim.scenario import Scenario
    from fedsim.scenario_file import load_scenario
    from fedsim.session import attack, plan, resume, run

__version__ = metadata.version("fedsim")
__all__ = ["Plan", "PrivacyClaim", "Run", "Scenario", "attack", "load_scenario", "open_run", "plan", "resume", "run"]

_HOMES = {
    "Plan": "fedsim.federation.plan",
    "PrivacyClaim": "fedsim.privacy",
    "Run": "fedsim.federation.run",
    "Scenario": "fedsim.scenario",
    "attack": "fedsim.session",
    "load_scenario": "fedsim.scenario_file",
    "open_run": "fedsim.federation.run",
    "plan": "fedsim.session",
    "resume": "fedsim.session",
    "run": "fedsim.session",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import fedsim` and `fedsim --help` stay quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names that are imported when they are first used, too: for completion."""
    return sorted({*globals(), *__all__})
