# SPDX-License-Identifier: Apache-2.0
"""Commands in a process of their own: forked from this one, with limits on time and memory, in a folder of their own.

The process is forked after everything was imported, so a command costs milliseconds; and whatever it does (abort, hang,
allocate without end) is an outcome, not the end of the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HANGS = -1
"""The code of a command that did not end in time."""
MEMORY = 6 << 30
"""Bytes of address space that a command may have; torch alone takes two."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    arguments: Sequence[str]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def refused(self) -> bool:
        return self.code == 2


def warm_up() -> None:
    """Import what commands import, and load the data that they load, once for all processes that are forked."""
    import torch

    import fedsim.attacking
    import fedsim.audit_command
    import fedsim.auditing
    import fedsim.report  # noqa: F401
    from fedsim.cli import main

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        for source in ("digits", "mnist", "descriptions", "breast_cancer"):
            model = "transformer" if source == "descriptions" else "logistic"
            if code := main(["check", "fuzz-base.yaml", "--set", f"data={source}", "--set", f"model={model}"]):
                raise AssertionError(f"the scenario that everything is derived from is refused ({code})")


def play(
    arguments: Sequence[str],
    folder: Path,
    *,
    seconds: int = 60,
    memory: int = MEMORY,
    command: Callable[[Sequence[str]], int] | None = None,
) -> Outcome:
    """Run a command in a folder; what it printed and how it ended.

    `seconds` are of the processor; `command` is by default the command line.
    """
    out, err = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    gc.freeze()  # else the child's collector copies what it only looks at
    child = os.fork()
    if child == 0:
        os._exit(_command(arguments, folder, out, err, seconds, memory, command))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    texts = (file.read_bytes().decode("utf-8", "replace") for file in (out, err))
    outcome = Outcome(
        arguments, HANGS if code in (-signal.SIGALRM, -signal.SIGPROF) else code, *texts, time.monotonic() - started
    )
    out.unlink()
    err.unlink()
    return outcome


def _command(
    arguments: Sequence[str],
    folder: Path,
    out: Path,
    err: Path,
    seconds: int,
    memory: int,
    command: Callable[[Sequence[str]], int] | None,
) -> int:
    """In the forked process: everything that the command line does, from `main` on."""
    code = 70
    try:
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
            faulthandler.register(number, file=sys.stderr, chain=True)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(20 * seconds)  # a machine may be busy with other things
        from fedsim.cli import main

        code = (command or main)(list(arguments))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
    return code


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def complaint(outcome: Outcome, codes: Sequence[int] = (0, 2)) -> str | None:
    """What is wrong with how a command ended, whatever it was asked for; None if nothing is."""
    if outcome.code == HANGS:
        return "it did not end in time"
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        return "it shows a traceback"
    if outcome.code not in codes:
        return f"its exit code is {outcome.code}"
    if found := _CONTROL.search(outcome.out + outcome.err):
        return f"it prints the control character {found.group()!r} of its input"
    if not outcome.refused:
        return None
    sentences = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if len(sentences) != 1:
        return f"a refusal is one sentence, here are {len(sentences)}"
    if len(sentences[0]) > 2000:
        return f"a sentence of {len(sentences[0])} characters is not read by anybody"
    if len(sentences[0].split()) < 4:
        return "a sentence of three words helps nobody"
    return None
