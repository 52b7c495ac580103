# SPDX-License-Identifier: Apache-2.0
"""What audits have found, as files of a run's folder: one for each audit, and none is deleted by another.

RUN/audits/001-example-canaries.json     settings, a sentence, the verdict, and the numbers behind it
RUN/audits/002-MI.json                   the next audit; the same settings keep their number
RUN/audit.json                           all audits of a folder that an older fedsim has written
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedsim
from fedsim.errors import RunError
from fedsim.federation.checksums import note_files
from fedsim.federation.folder import write_durably

FOLDER = "audits"
OLD_FILE = "audit.json"
_NAME = re.compile(r"(\d{3,})-[\w-]+\.json")
Result = dict[str, Any]


def audit_paths(folder: Path) -> list[Path]:
    """The files with results in a folder, in the order in which the audits were first played."""
    old, found = folder / OLD_FILE, folder / FOLDER
    new = [path for path in found.iterdir() if _NAME.fullmatch(path.name)] if found.is_dir() else []
    return [*([old] if old.is_file() else []), *sorted(new, key=_number)]


def read_audits(folder: Path) -> list[Result]:
    """The results in a folder, in order; none where nothing was audited."""
    return [result for path in audit_paths(folder) for result in read_audit(path)]


def read_audit(path: Path) -> list[Result]:
    """The results in one file: one, or all of those that an older fedsim wrote together."""
    try:
        results: list[Result] = json.loads(path.read_text())["audits"]
        if not all(isinstance(result, dict) for result in results):
            raise TypeError("audits")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: it is not the result of an audit; remove it and audit again") from error
    return results


def write_audit(folder: Path, scenario: str, name: str, result: Mapping[str, Any]) -> Path:
    """Write what an audit found beside what others have, whole or not at all; its file."""
    path = _place(folder / FOLDER, name, result["settings"])
    document = {"fedsim": fedsim.__version__, "scenario": scenario, "audits": [result]}
    path.parent.mkdir(exist_ok=True)
    write_durably(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    note_files(folder, [path])
    return path


def check_room(folder: Path) -> None:
    """A RunError if results cannot be written to a folder: asked before an audit is played."""
    path = folder / FOLDER
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is in the way: results are written to a folder of that name; move it away")
    for taken in audit_paths(folder):
        read_audit(taken)


def _place(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Where the result of these settings belongs: an audit that is played again replaces what it had found."""
    taken = [path for path in audit_paths(folder.parent) if path.parent == folder]
    for path in taken:
        if any(result.get("settings") == settings for result in read_audit(path)):
            return path
    number = 1 + max(map(_number, taken), default=0)
    return folder / f"{number:03d}-{name}.json"


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])
