# SPDX-License-Identifier: Apache-2.0
"""How a run stands, whoever runs it: `fedsim status` and `fedsim logs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import DeployError, RunError
from fedsim.federation.deployed import State, logs, state, submitted
from fedsim.federation.folder import is_being_written, read_failure
from fedsim.federation.run import Run

FAILED = 1
"""The exit code of `fedsim status` for a run that failed."""


def status(folder: Path) -> dict[str, Any]:
    """The state of a run (complete, running, failed, interrupted), how far it is, and why it ended."""
    run = Run(folder)
    link, runs = submitted(folder)
    metrics = run.metrics
    last = metrics.iloc[-1] if len(metrics) else None
    going = "running" if is_being_written(folder) else "interrupted"
    found: dict[str, Any] = {
        "folder": str(folder),
        "state": "complete" if run.complete else going,
        "round": int(metrics.index[-1]) if last is not None else None,
        "rounds": run.scenario.rounds,
        "clients": int(last["clients"]) if last is not None else None,
        "failures": int(last["failures"]) if last is not None else None,
        "reason": None,
    }
    if runs:
        found |= {"address": link.address, "run": runs[-1]}
    if runs and not run.complete:
        try:
            now = state(link, runs[-1])
        except DeployError as error:
            now = State("unknown", "", str(error))
        found["state"] = "failed" if now.failed else now.status
        found["reason"] = read_failure(folder) or now.details or None
    return found


def status_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people."""
    rows = [("run", found["folder"]), ("state", found["state"])]
    if found["round"] is not None:
        rows.append(("round", f"{found['round']} of {found['rounds']}"))
        rows.append(("last round", f"{found['clients']} clients, {found['failures']} failures"))
    if "run" in found:
        rows.append(("SuperLink", f"{found['address']}, run {found['run']}"))
    if found["reason"]:
        rows.append(("reason", found["reason"]))
    if found["state"] not in ("complete", "running", "pending", "starting"):
        rows.append(("go on with", f"fedsim run --resume {found['folder']}"))
    return rows


def log_lines(folder: Path, *, follow: bool) -> Iterator[str]:
    """What the ServerApp of a deployed run prints."""
    link, runs = submitted(Run(folder).path)
    if not runs:
        raise RunError(f"{folder} was not run with engine deploy, so there is no log of it on a SuperLink")
    return logs(link, runs[-1], follow=follow)
