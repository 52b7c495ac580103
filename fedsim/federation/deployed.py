# SPDX-License-Identifier: Apache-2.0
"""The deploy engine: a run on an existing SuperLink, started, followed to its end, and resumed.

The ServerApp runs on the SuperLink's machine and writes the run folder itself, so a run is submitted there, or where
the folder is shared. Flower's own stream of logs ends with exit code 0 whatever happened; here the state of the run is
asked for, and a failed run is an error with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest, StreamLogsRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from pydantic import Field, ValidationError

from fedsim.errors import DeployError, RunError
from fedsim.federation.bundle import build_bundle, public_scenario
from fedsim.federation.folder import FAILURE, read_failure
from fedsim.federation.link import Link, control
from fedsim.federation.plan import Plan
from fedsim.federation.records import Record, first_problem, read_lines, read_text
from fedsim.federation.server import Progress, RoundReport
from fedsim.federation.transcript import write_json

__all__ = ["Link", "State", "control", "follow", "logs", "run_deployed", "state", "stop", "submit", "submitted"]

SUBMITTED = "deployed.json"
POLL_SECONDS = 1.0
ROOM = 64 * 2**20


@dataclass(frozen=True)
class State:
    """How a run stands: Flower's status (pending, starting, running, finished), how it ended, and why."""

    status: str
    ending: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        return self.status == "finished"

    @property
    def failed(self) -> bool:
        """Whether it ended in another way than by coming to its end."""
        return self.finished and self.ending != "completed"


def submit(plan: Plan, folder: Path) -> int:
    """Start the run whose folder is made, on the SuperLink of its scenario; its number there."""
    scenario = plan.scenario
    link = Link.of(scenario.engine)
    configuration: dict[str, str | int | float | bool] = {
        "scenario": public_scenario(scenario),
        "folder": str(folder.absolute()),
        "deployed": True,
        "largest-reply": largest_reply(plan.layout.size),
    }
    with control(link) as client:
        _stop_those_before(client, folder)
        (folder / FAILURE).unlink(missing_ok=True)
        fab = Fab("", build_bundle(), {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(configuration))
        answer = client.StartRun(request)
    if not answer.HasField("run_id"):
        raise DeployError(f"the SuperLink at {link.address} started no run: {answer.note or 'it does not say why'}")
    write_json(
        folder / SUBMITTED,
        {
            "address": link.address,
            "root_certificates": str(link.root_certificates) if link.root_certificates else None,
            "runs": [*submitted(folder)[1], answer.run_id],
        },
    )
    return int(answer.run_id)


def largest_reply(size: int) -> int:
    """Bytes that a client's reply may have, for a model of so many numbers: no client is to fill the server.

    A masked sum takes 8 for each; twice, as what gets lost on the way is sent again; and room for what is no update.
    """
    return 16 * size + ROOM


RunId = Annotated[int, Field(ge=0, lt=2**64)]
"""Flower's number of a run: any of 64 bits."""


class _Submission(Record):
    """Where a run was submitted to, and its numbers there."""

    address: str
    root_certificates: str | None
    runs: tuple[RunId, ...]


def submitted(folder: Path) -> tuple[Link, list[int]]:
    """The SuperLink that a run folder was submitted to, and the numbers of its runs there, the last of which counts."""
    file = folder / SUBMITTED
    if not file.is_file():
        return Link(), []
    try:
        found = _Submission.model_validate_json(read_text(file))
    except ValidationError as error:
        raise RunError(f"{file} is damaged ({first_problem(error)}); delete it and resume the run") from error
    return Link(found.address, Path(found.root_certificates) if found.root_certificates else None), list(found.runs)


def _stop_those_before(client: ControlHttpClient, folder: Path) -> None:
    """A run that goes on may still have a ServerApp somewhere: it must let go of the folder first."""
    for run in submitted(folder)[1][-1:]:
        with suppress(httpx.HTTPStatusError):  # a SuperLink that was set up anew does not know it
            if not _state(client, run).finished:
                client.StopRun(StopRunRequest(run_id=run))


def state(link: Link, run: int) -> State:
    """How a run stands."""
    with control(link) as client:
        return _state(client, run)


def _state(client: ControlHttpClient, run: int) -> State:
    found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict.get(run)
    if found is None:
        return State("unknown", "", "the SuperLink does not know this run")
    return State(found.status.status, found.status.sub_status, found.status.details)


def stop(link: Link, run: int) -> None:
    """End a run."""
    with control(link) as client, suppress(httpx.HTTPStatusError):
        client.StopRun(StopRunRequest(run_id=run))


def logs(link: Link, run: int, *, follow: bool) -> Iterator[str]:
    """What the ServerApp of a run has printed, in pieces; with `follow`, to the run's end."""
    with control(link) as client:
        for piece in client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
            yield piece.log_output
            if not follow:
                return


def run_deployed(plan: Plan, folder: Path, progress: Progress | None = None) -> None:
    """Start a run (or start it again where it stopped) and follow it to its end; RunError if that is not the good one.

    Who interrupts it ends the run, which then can be resumed.
    """
    run = submit(plan, folder)
    try:
        follow(plan, folder, progress)
    except KeyboardInterrupt:
        stop(Link.of(plan.scenario.engine), run)
        raise


def follow(plan: Plan, folder: Path, progress: Progress | None = None) -> None:
    """Report the rounds of the folder's last run as they come; RunError with the reason, if it fails."""
    link, runs = submitted(folder)
    shown, silent = _rounds_so_far(folder), 0
    while True:
        try:
            now = state(link, runs[-1])
            silent = 0
        except DeployError:
            silent += 1
            if silent * POLL_SECONDS > 60:  # a SuperLink that is started again is there before that
                raise
            now = State("unknown", "", "")
        for line in _metric_lines(folder)[shown:]:
            shown += 1
            if progress is not None:
                progress(_report(plan, line))
        if now.finished:
            break
        time.sleep(POLL_SECONDS)
    if now.failed or not (folder / "model.safetensors").is_file():
        reason = read_failure(folder) or now.details or f"Flower says {now.status}:{now.ending}"
        raise RunError(f"{reason.rstrip('.')} (deployed run {runs[-1]}; see `fedsim logs {folder}`)")


def _rounds_so_far(folder: Path) -> int:
    return len(_metric_lines(folder))


def _metric_lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "metrics.jsonl", dict[str, Any]))


def _report(plan: Plan, line: dict[str, Any]) -> RoundReport:
    round_ = int(line["round"] or 0)
    known = {key: value for key, value in line.items() if key in RoundReport.__dataclass_fields__}
    known |= {key: int(known[key] or 0) for key in ("round", "clients", "failures")}
    # The server counts what clients really hold, and rounds that began again; the plan does not know of either.
    spent = {(each["unit"], each["observer"]): float(each["epsilon"]) for each in line.get("privacy") or ()}
    planned = plan.claims_after(round_)
    claims = tuple(replace(c, epsilon=spent[c.unit, c.observer]) for c in planned if (c.unit, c.observer) in spent)
    return RoundReport(**known, rounds=plan.scenario.rounds, claims=claims)
