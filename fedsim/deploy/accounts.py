# SPDX-License-Identifier: Apache-2.0
"""What `fedsim ledger` shows."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, get_args

from fedsim.errors import PrivacyError
from fedsim.privacy.claim import Unit
from fedsim.privacy.gaussian import check_delta
from fedsim.privacy.ledger import Ledger


def open_ledger(file: Path) -> Ledger:
    """The ledger in a file, or in a client's folder; it is never made here."""
    path = file / "ledger.sqlite" if file.is_dir() else file
    if not path.is_file():
        raise PrivacyError(f"there is no ledger {path}; give a client's ledger.sqlite, or its folder")
    return Ledger(path, create=False)


def ledger_rows(file: Path, delta: float) -> list[tuple[str, str]]:
    """For each data set what it has spent, and what for."""
    check_delta(delta)
    ledger = open_ledger(file)
    rows = [] if ledger.datasets() else [("charged", "nothing so far")]
    for dataset in ledger.datasets():
        charges = ledger.charges(dataset)
        units = {charge.unit for charge in charges}
        for unit in get_args(Unit):
            if unit in units or unit == "example":
                rows.append((dataset, str(ledger.spent(dataset, unit, delta))))
        releases = len({(charge.run, charge.round, charge.attempt) for charge in charges})
        runs = len({charge.run for charge in charges})
        first, last = (_day(charge.time) for charge in (charges[0], charges[-1]))
        rows.append(("releases", f"{releases}, in {runs} run{'s' * (runs > 1)}, from {first} to {last} (UTC)"))
    return rows


def ledger_document(file: Path, delta: float) -> dict[str, Any]:
    """The whole ledger, ready for JSON; an infinite ε is the string "inf"."""
    check_delta(delta)
    ledger, datasets = open_ledger(file), {}
    for dataset in ledger.datasets():
        spent = {unit: ledger.spent(dataset, unit, delta) for unit in get_args(Unit)}
        datasets[dataset] = {
            "spent": {
                unit: {
                    "epsilon": each.epsilon if math.isfinite(each.epsilon) else "inf",
                    "delta": delta,
                    "unit": unit,
                    "adjacency": each.adjacency,
                    "method": each.method,
                }
                for unit, each in spent.items()
            },
            "rounds_today": ledger.rounds_today(dataset),
            "charges": [
                {
                    "time": charge.time,
                    "run": charge.run,
                    "round": charge.round,
                    "unit": charge.unit,
                    **vars(charge.mechanism),
                    "compositions": charge.compositions,
                }
                for charge in ledger.charges(dataset)
            ],
        }
    return {"file": str(ledger.path), "datasets": datasets}


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(when))
