# SPDX-License-Identifier: Apache-2.0
"""The commands that run something: a scenario from its start, an interrupted run, attacks on what a server saw."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.errors import (
    AuditError,
    DataError,
    FolderTakenError,
    InterruptedCommandError,
    ModelError,
    PrivacyError,
    RunError,
    ScenarioError,
    printable,
)

if TYPE_CHECKING:
    from fedsim.federation.run import Run
    from fedsim.scenario import Scenario


def report(finished: Run, no_report: bool) -> Path | None:
    """Write the report of a run, if it is wanted; its path."""
    if no_report:
        return None
    again = f"{finished.path} is complete but for its report, write that with `fedsim report {finished.path}`"
    with interruptible(again):
        from fedsim.report import write_report

        return write_report(finished.path)


def play_attacks(target: Run, scenario: Scenario, quiet: bool, *, again: bool) -> set[str]:
    """Play the attacks of a scenario on a run; the names of the result files."""
    from fedsim.attack_screen import showing_attacks
    from fedsim.attacking import attack_run

    how = f"play the attacks again with `fedsim attack {target.path}`"
    with interruptible(how), showing_attacks(quiet=quiet) as progress:
        return {path.name for path in attack_run(target, scenario, again=again, progress=progress)}


def start(name: str | None, overrides: list[str] | None, out: Path | None, quiet: bool) -> Run:
    """Run a scenario in a new folder."""
    if name is None:
        raise ScenarioError("run needs a SCENARIO, for example `fedsim run quickstart`; see `fedsim scenarios`")
    from fedsim.scenario_file import load_scenario

    scenario = load_scenario(name, overrides or ())  # before torch is imported: a wrong scenario is told at once
    with interruptible("nothing was written"):
        from fedsim import screen
        from fedsim.federation.folder import next_free_folder
        from fedsim.federation.run import run as run_federation

    with locating(name, overrides), screen.showing_progress(quiet=quiet, rounds=scenario.rounds) as progress:
        while True:
            path = out or next_free_folder(Path("runs"), scenario.name)
            try:
                return run_federation(scenario, out=path, progress=progress)
            except FolderTakenError:
                if out is not None:  # else another process took the number: take the next one
                    raise
            except KeyboardInterrupt:
                raise _interrupted(path) from None


def of_deployment(name: str, overrides: list[str] | None, folder: Path | None) -> Scenario:
    """A scenario, as it would run on the deployment in a folder, if one is named."""
    from fedsim.scenario_file import load_scenario

    loaded = load_scenario(name, overrides or ())
    if folder is None:
        return loaded
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.submission import deployed_overrides

    return load_scenario(name, [*(overrides or ()), *deployed_overrides(open_server(folder), loaded)])


def go_on(name: str | None, overrides: list[str] | None, out: Path | None, folder: Path, quiet: bool) -> Run:
    """Go on with the run in a folder; whatever else was said is refused."""
    if name is not None or overrides or out is not None:
        raise RunError(
            f"--resume {folder} goes on with the scenario in that folder; leave SCENARIO, --set, --engine and --out out"
        )
    with interruptible(f"go on with `fedsim run --resume {folder}`"):
        from fedsim import screen
        from fedsim.federation.run import resume
        from fedsim.scenario_file import load_scenario

    known = folder / "scenario.yaml"
    rounds = load_scenario(known).rounds if known.is_file() else None
    with screen.showing_progress(quiet=quiet, rounds=rounds) as progress:
        try:
            return resume(folder, progress=progress)
        except KeyboardInterrupt:
            raise _interrupted(folder) from None


@contextmanager
def locating(name: str, overrides: list[str] | None) -> Iterator[None]:
    """Add the file and line of the field that an error names, if it names one of the scenario."""
    try:
        yield
    except (AuditError, ScenarioError, DataError, ModelError, PrivacyError) as error:
        from fedsim.scenario_file import located

        raise located(error, name, overrides or ()) from error


@contextmanager
def interruptible(how: str) -> Iterator[None]:
    """Say what is left, or how to go on, if the user interrupts this."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedCommandError(f"interrupted; {how}") from None


def _interrupted(folder: Path) -> InterruptedCommandError:
    begun = (folder / "scenario.yaml").is_file()
    how = f"go on with `fedsim run --resume {folder}`" if begun else "nothing was written"
    return InterruptedCommandError(f"interrupted; {how}")


def fail(sentence: str, code: int = 2) -> int:
    """Say what is wrong; the exit code."""
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return code
