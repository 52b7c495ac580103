# SPDX-License-Identifier: Apache-2.0
"""The checksums of a run: SHA256SUMS, as `sha256sum -c SHA256SUMS` reads it.

They are written when a run ends, for everything that the run, its report or an attack reads. A file that is lost, cut
short, or changed by a bit is then known to be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsim.errors import RunError

FILE = "SHA256SUMS"
MODEL = "model.safetensors"
COVERED = (
    "scenario.yaml",
    "summary.json",
    "claims.json",
    "metrics.jsonl",
    "transcript/layout.json",
    "transcript/messages.jsonl",
)
TENSORS = ("transcript", "truth")
"""Folders whose tensors are covered, too."""
_LINE = re.compile(r"([0-9a-f]{64})  ([\w./-]+)")
_PIECE = 1 << 20


def sums_text(path: Path, written: Mapping[str, bytes]) -> str:
    """The checksums of a run folder, with those of files that are about to be written."""
    tensors = sorted(f"{room}/{file.name}" for room in TENSORS for file in (path / room).glob("*.safetensors"))
    sums = {name: _of_file(path / name) for name in (*COVERED, *tensors) if (path / name).is_file()}
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def read_sums(path: Path) -> dict[str, str]:
    """The checksums of a run folder by name; empty for a run that has not ended, or that an earlier version wrote."""
    file = path / FILE
    try:
        lines = file.read_text(encoding="ascii").splitlines() if file.is_file() else []
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged; restore it from a backup, or run the scenario again") from error
    found = [_LINE.fullmatch(line) for line in lines]
    if not all(found):
        raise RunError(f"{file} is damaged; restore it from a backup, or run the scenario again")
    return {match[2]: match[1] for match in found if match}


def note_files(path: Path, files: Iterable[Path]) -> None:
    """Take up, or renew, the checksums of files that were written after the run: what attacks and audits found.

    Results that somebody removed are forgotten with that: new ones were just written.
    """
    if not (path / FILE).is_file():  # of an earlier version, or still growing
        return
    kept = {name: digest for name, digest in read_sums(path).items() if not _removed_result(path, name)}
    sums = kept | {str(file.relative_to(path)): _of_file(file) for file in files if file.is_file()}
    temporary = path / f".{FILE}.tmp"
    temporary.write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="ascii")
    temporary.replace(path / FILE)


def changed_files(path: Path, names: Iterable[str] | None = None) -> list[str]:
    """Which of the files (all that have a checksum) are gone, or are not as they were written."""
    sums = read_sums(path)
    wanted = sums if names is None else [name for name in names if name in sums]
    gone = [name for name in wanted if not (path / name).is_file()]
    return gone + [name for name in wanted if name not in gone and _of_file(path / name) != sums[name]]


def check_transcript(path: Path) -> None:
    """RunError for a transcript that is not as the run wrote it: nothing is read off what was damaged."""
    for name in changed_files(path, [name for name in read_sums(path) if name.startswith("transcript/")]):
        check_file(path, name)


def check_file(path: Path, name: str) -> None:
    """RunError for a file that is not as the run wrote it."""
    if changed_files(path, [name]):
        there = "was changed or damaged after the run" if (path / name).is_file() else "is missing"
        raise RunError(
            f"{path / name} is damaged: it {there} (its SHA-256 in {FILE} is another); restore it from a backup, or run"
            " the scenario again"
        )


def _removed_result(path: Path, name: str) -> bool:
    return name.startswith(("attacks/", "audits/")) and not (path / name).is_file()


def _of_file(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
