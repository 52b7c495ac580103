# SPDX-License-Identifier: Apache-2.0
"""The command `fedsim audit`: of a scenario, of the scenario of a run, or of any Python function."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.errors import AuditError
from fedsim.run_command import interruptible, locating

if TYPE_CHECKING:
    from fedsim.audit.blackbox.pairs import Pair
    from fedsim.audit.blackbox.search import Count
    from fedsim.federation.run import Run
    from fedsim.scenario import AuditSection, Scenario

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_function(target: str) -> bool:
    """Whether a target is module:function, and no file of that name."""
    return bool(_FUNCTION.fullmatch(target)) and not Path(target).exists()


def audit_function(
    target: str, options: Mapping[str, Any], as_json: bool, out: Path | None = None, no_report: bool = False
) -> None:
    """Audit module:function, show the verdict, and keep it in the folder `out` with its report, if there is one."""
    import sys

    from fedsim import screen
    from fedsim.audit_screen import verdict_rows

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AuditError(f"--out {out} exists already, and nothing is overwritten; name a new folder")
    sys.path.insert(0, str(Path.cwd()))  # a console script does not have the working directory on its path
    try:
        from fedsim.audit.mechanism import examine_target

        verdict, count = examine_target(target, **options)
    finally:
        sys.path.remove(str(Path.cwd()))
    found = {"target": target, "sentence": verdict.sentence(), "verdict": verdict.to_dict()}
    written = None if out is None else _keep(found, count, options, out, no_report)
    if as_json:
        screen.show_json({**found, "report": str(written) if written else None})
    else:
        last = [("report", str(written) if written else "none; with --out FOLDER there is a page with figures")]
        made = [("  the pair", verdict.check)] if verdict.check else []
        screen.show_rows([(target, verdict.sentence()), *verdict_rows(verdict.to_dict()), *made, *last])


def _keep(
    found: Mapping[str, Any], count: Count | None, options: Mapping[str, Any], out: Path, no_report: bool
) -> Path | None:
    """Write the result, as that of a run, the pair counted on and the report to a new folder; the report's path."""
    from fedsim.audit.blackbox.tier_b import numbers_of
    from fedsim.audit.results import write_audit

    out.mkdir(parents=True, exist_ok=True)
    numbers = {} if count is None else numbers_of(count)
    result = {"kind": "mechanism", "settings": dict(options), **found, "numbers": numbers}
    write_audit(out, found["target"], "mechanism", result)
    if count is not None:
        _keep_pair(count.pair, out / "pair.npz")
    if no_report:
        return None
    from fedsim.report import write_report

    return write_report(out)


def _keep_pair(pair: Pair, path: Path) -> None:
    """The two data sets as `first` and `second`, where they are arrays of numbers."""
    import io

    import numpy as np

    from fedsim.federation.folder import write_durably

    parts = {"first": pair.first, "second": pair.second}
    if all(isinstance(part, np.ndarray) and part.dtype.kind in "fiub" for part in parts.values()):
        content = io.BytesIO()
        np.savez(content, **parts)
        write_durably(path, content.getvalue())


def open_target(
    target: str, options: Mapping[str, Any], overrides: Sequence[str], audits: Sequence[str], out: Path | None
) -> Run | None:
    """The run that a target names; None if it names a scenario, which is then to be run."""
    if options:
        name, value = next(iter(options.items()))
        raise AuditError(
            f"--{name} {value} is for module:function; of a scenario or a run use"
            f" --audit '{{kind: example-canaries, confidence: 0.99}}'"
        )
    if not Path(target).is_dir():
        _check(target, overrides, [_override(audits)] if audits else [])
        return None
    if overrides or out is not None:
        raise AuditError(f"{target} is a run, which is over: leave --set and --out out, or audit its scenario")
    import fedsim

    return fedsim.open_run(target)


def _check(target: str, given: Sequence[str], audits: list[str]) -> None:
    """Before a scenario is run: whether the audits that are asked for exist, and fit it."""
    from fedsim.scenario_file import load_scenario

    scenario = load_scenario(target, [*given, *audits])
    if not scenario.audit:
        return
    from fedsim.auditing import check_audits
    from fedsim.federation.plan import plan

    own = load_scenario(target, given) if audits else scenario
    with _advising(target, own, scenario.audit, given), locating(target, [*given, *audits]):
        check_audits(plan(scenario), scenario.audit)


def _override(audits: Sequence[str]) -> str:
    for audit in audits:
        if not audit.strip():
            raise AuditError(
                f"--audit {audit!r} names no audit; name one, for example example-canaries, or leave it out"
            )
    return f"audit=[{', '.join(audits)}]"


def audit(run: Run, audits: Sequence[str], quiet: bool) -> list[dict[str, Any]]:
    """Play audits on the scenario of a run; what they found."""
    from fedsim.audit.results import read_audit
    from fedsim.audit_screen import showing_audits
    from fedsim.auditing import audit_run
    from fedsim.scenario_file import load_scenario

    scenario = load_scenario(run.path / "scenario.yaml", [_override(audits)] if audits else [])
    how = f"audit it again with `fedsim audit {run.path}`"
    with interruptible(how), _advising(run.path, run.scenario, scenario.audit), showing_audits(quiet=quiet) as progress:
        files = audit_run(run, scenario, progress=progress)
    return [result for file in files for result in read_audit(file)]


@contextmanager
def _advising(
    target: Path | str, scenario: Scenario, audits: Sequence[AuditSection], given: Sequence[str] = ()
) -> Iterator[None]:
    """Add to the refusal of audits a command that works."""
    try:
        yield
    except AuditError as error:
        from fedsim.remedies import instead

        command = instead(target, scenario, audits, given)
        raise AuditError(f"{error}; try `{command}`" if command else str(error)) from error


def show(run: Run, audits: Sequence[Mapping[str, Any]], report: Path | None, as_json: bool) -> None:
    """What was found, for people or for programs."""
    from fedsim import screen
    from fedsim.audit_screen import audit_rows
    from fedsim.remedies import settling

    commands = settling(run.path, run.scenario, audits)
    if as_json:
        document = {"folder": str(run.path), "report": str(report) if report else None, "audits": list(audits)}
        screen.show_json({**document, "settled_by": commands})
    else:
        last = [("folder", str(run.path)), *([("report", str(report))] if report else [])]
        screen.show_rows([*audit_rows(audits), *(("to settle it", command) for command in commands), *last])
