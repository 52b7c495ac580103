# SPDX-License-Identifier: Apache-2.0
"""Standard output whose reader may leave (`fedsim run quickstart | head`), and which may be full.

Neither is a reason to abandon a run, nor anything that its folder could be blamed for: the command goes on to its end,
in silence. That nobody reads is as other tools take it; that nothing could be written is told at the end.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Output(io.RawIOBase):
    """The bytes of standard output; after the first that cannot be written, all are dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure: OSError | None = None

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self.descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self.descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, content: bytes, /) -> int:  # type: ignore[override]
        """How many bytes were taken."""
        if self.failure is None:
            try:
                return os.write(self.descriptor, content)
            except OSError as error:
                self.failure = error
        return len(content)

    @property
    def unread(self) -> bool:
        """Whether the reader has left."""
        return isinstance(self.failure, BrokenPipeError)

    @property
    def complaint(self) -> str | None:
        """What to say where something could not be written though somebody may have wanted to read it."""
        if self.failure is None or self.unread:
            return None
        reason = self.failure.strerror
        return f"standard output cannot be written: {reason}; the command ran to its end, send its output elsewhere"


@contextmanager
def guarded() -> Iterator[Output | None]:
    """Standard output by way of `Output`; one that somebody else has put in place stays as it is (None)."""
    before = sys.stdout
    if before is None:  # the process was started without one
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - to the end of the process
        yield None
        return
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):
        yield None
        return
    before.flush()
    output = Output(before.fileno())
    # An ε on a terminal that has none is no reason to fail.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output), before.encoding, "replace", line_buffering=before.line_buffering
    )
    try:
        yield output
    finally:
        sys.stdout.flush()
        sys.stdout = before


def unread() -> bool:
    """Whether whoever read standard output has left."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, Output) and raw.unread
