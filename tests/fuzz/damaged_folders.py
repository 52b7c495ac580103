# SPDX-License-Identifier: Apache-2.0
"""Damage to a run folder: what disks, transfers, editors and people do to files."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

STRANGERS = (
    "transcript/round-99999-received.safetensors", "attacks/002-x.json", "attacks/x", "checkpoint.safetensors",
    "failure.json",
    ".lock", "deployed.json", "truth/x.tmp", "begun.txt", "ledger.sqlite",
)  # fmt: skip
Damage = Callable[[Path, Path, Random], None]

VALUES: tuple[Any, ...] = (
    None, True, "", "x", "\x1b[2J", "\u202ex", -1, 0, 10**6, 2**63, 10**30, 1.5, -0.5, 1e308, 5e-324,
    math.nan, math.inf, -math.inf,
    [], {}, [[[]]], {"a": {"b": []}}, "../../../etc/passwd", [None, None], ["x"], "inf", "nan", "x" * 10_000,
)  # fmt: skip


def _delete(file: Path, run: Path, rng: Random) -> None:
    file.unlink()


def _empty(file: Path, run: Path, rng: Random) -> None:
    file.write_bytes(b"")


def _cut(file: Path, run: Path, rng: Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) + 1)])


def _flip(file: Path, run: Path, rng: Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _header(file: Path, run: Path, rng: Random) -> None:
    """The first bytes of a file decide how all others are read."""
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 4))):
        if content:
            content[rng.randrange(min(len(content), 200))] = rng.randrange(256)
    file.write_bytes(content)


def _not_utf8(file: Path, run: Path, rng: Random) -> None:
    content = file.read_bytes()
    place = rng.randrange(len(content) + 1)
    file.write_bytes(content[:place] + rng.choice((b"\xff", b"\xc3\x28", b"\x00", b"\xed\xa0\x80")) + content[place:])


def _swap(file: Path, run: Path, rng: Random) -> None:
    other = rng.choice(files_of(run))
    mine, others = file.read_bytes(), other.read_bytes()
    file.write_bytes(others)
    other.write_bytes(mine)


def _folder(file: Path, run: Path, rng: Random) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path, run: Path, rng: Random) -> None:
    file.unlink()
    file.symlink_to(rng.choice((file, Path("nowhere"), Path("/dev/null"), rng.choice(files_of(run)), run)))


def _read_only(file: Path, run: Path, rng: Random) -> None:
    file.chmod(rng.choice((0o000, 0o400)))


def _doubled(file: Path, run: Path, rng: Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _lines(file: Path, run: Path, rng: Random) -> None:
    """Lines lost, doubled, in another order, or strange."""
    lines = file.read_bytes().splitlines(keepends=True)
    if not lines:
        return
    place = rng.randrange(len(lines))
    what = rng.randrange(5)
    if what == 0:
        del lines[place]
    elif what == 1:
        lines.insert(place, lines[place])
    elif what == 2:
        rng.shuffle(lines)
    elif what == 3:
        lines.insert(
            place,
            rng.choice(
                (b"{}\n", b"[]\n", b"null\n", b"nonsense\n", b"\n", b"[" * 20_000 + b"\n", b'{"round": 1e400}\n')
            ),
        )
    else:
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    file.write_bytes(b"".join(lines))


def _json(file: Path, run: Path, rng: Random) -> None:
    """One value of a JSON document, or of one line of it, is another, or gone, or one more."""
    text = file.read_text(errors="replace")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    place = rng.randrange(len(lines)) if lines else 0
    try:
        document = json.loads(lines[place])
    except (ValueError, IndexError):
        return _flip(file, run, rng)
    holder: Any = {"document": document}
    key: Any = "document"
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    wrapper = holder if key == "document" else None
    what = rng.randrange(4)
    if what == 0 and wrapper is None:
        del holder[key]
    elif what == 1 and isinstance(holder, dict) and wrapper is None:
        holder["one more"] = rng.choice(VALUES)
    else:
        holder[key] = rng.choice(VALUES)
    lines[place] = json.dumps(wrapper["document"] if wrapper else document, indent=None if len(lines) > 1 else 1)
    file.write_text("\n".join(lines) + "\n")
    return None


def _nested(file: Path, run: Path, rng: Random) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


def _stranger(file: Path, run: Path, rng: Random) -> None:
    """A file that no run writes, beside those that it does."""
    place = run / rng.choice(STRANGERS)
    place.parent.mkdir(exist_ok=True)
    if not place.exists():
        place.write_bytes(rng.choice((b"", b"{}", b"nonsense\xff", file.read_bytes())))


DAMAGES: tuple[Damage, ...] = (
    _delete, _empty, _cut, _flip, _header, _not_utf8, _swap, _folder, _link, _read_only, _doubled, _lines, _json,
    _json, _json,
    _json, _nested, _stranger,
)  # fmt: skip


def files_of(run: Path) -> list[Path]:
    """What may be damaged: everything but the pages, which are written anew."""
    found = sorted(file for file in run.rglob("*") if file.is_file() and not file.is_symlink())
    return [file for file in found if file.suffix not in (".html", ".svg", ".csv")]


def damage(whole: Path, run: Path, rng: Random) -> tuple[str, set[str]]:
    """Copy a run and damage it, mostly in one place; what was done, and which files are not as they were."""
    shutil.copytree(whole, run)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        file, how = rng.choice(files_of(run)), rng.choice(DAMAGES)
        done.append(f"{how.__name__[1:]} {file.relative_to(run)}")
        how(file, run, rng)
    before = {str(file.relative_to(whole)): file for file in files_of(whole)}
    return ", ".join(done), {name for name, file in before.items() if not _same(file, run / name)}


def _same(one: Path, other: Path) -> bool:
    if not other.is_file():
        return False
    if not os.access(other, os.R_OK):
        return False
    return one.read_bytes() == other.read_bytes()
