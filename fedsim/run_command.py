# SPDX-License-Identifier: Apache-2.0
"""The commands that run something: a scenario from its start, an interrupted run, attacks on what a server saw."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fedsim.errors import AuditError, DataError, FolderTakenError, ModelError, PrivacyError, RunError, ScenarioError

if TYPE_CHECKING:
    from fedsim.federation.run import Run
    from fedsim.scenario import Scenario


def report(finished: Run, no_report: bool) -> Path | None:
    """Write the report of a run, if it is wanted; its path."""
    if no_report:
        return None
    from fedsim.report import write_report

    return write_report(finished.path)


def play_attacks(target: Run, scenario: Scenario, quiet: bool, *, again: bool) -> set[str]:
    """Play the attacks of a scenario on a run; the names of the result files."""
    from fedsim.attack_screen import showing_attacks
    from fedsim.attacking import attack_run

    with showing_attacks(quiet=quiet) as progress:
        try:
            return {path.name for path in attack_run(target, scenario, again=again, progress=progress)}
        except KeyboardInterrupt:
            sentence = f"interrupted; play the attacks again with `fedsim attack {target.path}`"
            raise click.exceptions.Exit(fail(sentence, code=130)) from None


def start(name: str | None, overrides: list[str] | None, out: Path | None, quiet: bool) -> Run:
    """Run a scenario in a new folder."""
    if name is None:
        raise ScenarioError("run needs a SCENARIO, for example `fedsim run quickstart`; see `fedsim scenarios`")
    from fedsim.scenario_file import load_scenario

    scenario = load_scenario(name, overrides or ())  # before torch is imported: a wrong scenario is told at once
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
                raise click.exceptions.Exit(_interrupted(path)) from None


def go_on(name: str | None, overrides: list[str] | None, out: Path | None, folder: Path, quiet: bool) -> Run:
    """Go on with the run in a folder; whatever else was said is refused."""
    if name is not None or overrides or out is not None:
        raise RunError(
            f"--resume {folder} goes on with the scenario in that folder; leave SCENARIO, --set, --engine and --out out"
        )
    from fedsim import screen
    from fedsim.federation.run import resume
    from fedsim.scenario_file import load_scenario

    known = folder / "scenario.yaml"
    rounds = load_scenario(known).rounds if known.is_file() else None
    with screen.showing_progress(quiet=quiet, rounds=rounds) as progress:
        try:
            return resume(folder, progress=progress)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_interrupted(folder)) from None


@contextmanager
def locating(name: str, overrides: list[str] | None) -> Iterator[None]:
    """Add the file and line of the field that an error names, if it names one of the scenario."""
    try:
        yield
    except (AuditError, ScenarioError, DataError, ModelError, PrivacyError) as error:
        from fedsim.scenario_file import located

        raise located(error, name, overrides or ()) from error


def _interrupted(folder: Path) -> int:
    begun = (folder / "scenario.yaml").is_file()
    how = f"go on with `fedsim run --resume {folder}`" if begun else "nothing was written"
    return fail(f"interrupted; {how}", code=130)


def fail(sentence: str, code: int = 2) -> int:
    """Say what is wrong; the exit code."""
    print(f"error: {sentence}", file=sys.stderr)
    return code
