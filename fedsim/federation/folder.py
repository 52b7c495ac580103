# SPDX-License-Identifier: Apache-2.0
"""The run folder: written so that a run that is killed at any moment can go on, and ends with the same bytes.

Lines are appended as rounds happen. A checkpoint (after every round, inline every few seconds) says how far the files
were valid, together with the model and the server's state at that point; a resumed run cuts the files back to there and
goes on. A checkpoint carries its own SHA-256. Nothing in the folder holds a wall-clock time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsim.errors import FedsimError, FolderTakenError, RunError
from fedsim.federation import checksums
from fedsim.federation.transcript import TranscriptWriter
from fedsim.scenario import AdversarySection
from fedsim.training import Layout

CHECKPOINT_SECONDS = 2.0
FAILURE = "failure.json"
APPENDED = ("metrics.jsonl", "transcript/messages.jsonl")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a round: the model (P,), and the strategy's state."""

    round: int
    model: Tensor
    state: dict[str, Tensor]


def create_folder(path: Path, files: Mapping[str, str]) -> None:
    """Make a run folder with its first files; it appears complete or not at all."""
    taken = f"{path} is already there; choose another --out, or go on with it by --resume {path}"
    if "\0" in str(path):
        raise RunError(f"the run folder {str(path)!r} holds a zero byte, which no path has; choose another --out")
    if path.exists():
        raise FolderTakenError(taken)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        (temporary / "transcript").mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_text(content)
        temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.exists():  # another process was quicker
            raise FolderTakenError(taken) from error
        raise RunError(f"cannot write the run folder {path}: {error.strerror}; choose another --out") from error


@contextmanager
def clear_write_errors(path: Path) -> Iterator[None]:
    """A disk that is full, or gone, is one sentence; the last checkpoint is still there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"cannot write the run folder {path}: {reason}; its last checkpoint is intact: free some space, then go on"
            f" with --resume {path}"
        ) from error


def note_failure(path: Path, error: BaseException) -> None:
    """Leave the reason of a failed run where `fedsim status` finds it."""
    kind = "" if isinstance(error, FedsimError) else f"{type(error).__name__}: "
    with suppress(OSError):  # the failure may be that nothing can be written
        (path / FAILURE).write_text(json.dumps({"reason": f"{kind}{error}"}) + "\n")


def read_failure(path: Path) -> str | None:
    """Why the run failed, as far as its ServerApp could say."""
    try:
        return str(json.loads((path / FAILURE).read_text())["reason"])
    except (OSError, ValueError, KeyError):
        return None


def next_free_folder(parent: Path, name: str) -> Path:
    """`parent/name-001`, or the first number that is free."""
    return next(path for n in range(1, 10**6) if not (path := parent / f"{name}-{n:03d}").exists())


class RunWriter:
    """Appends to a run folder, from its last checkpoint on. One process at a time; `patience` is in seconds."""

    def __init__(self, path: Path, layout: Layout, adversary: AdversarySection, patience: float = 0.0) -> None:
        self.path, self.last_checkpoint = path, time.monotonic()
        self.lock = _lock(path, time.monotonic() + patience)
        try:
            self.checkpoint = read_checkpoint(path)
            _cut_back(path, self.checkpoint)
        except RunError:
            self.lock.close()
            raise
        self.metrics = (path / "metrics.jsonl").open("ab")
        self.transcript = TranscriptWriter(path / "transcript", layout, adversary)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        self.metrics.write((json.dumps(line) + "\n").encode())
        self.metrics.flush()

    def save(self, checkpoint: Checkpoint, *, now: bool = False) -> None:
        """Make what is written so far durable, if the last time was a while ago (or `now`)."""
        if not now and time.monotonic() - self.last_checkpoint < CHECKPOINT_SECONDS:
            return
        for file in (self.metrics, self.transcript.messages):
            os.fsync(file.fileno())
        place = {"round": checkpoint.round, "bytes": {name: (self.path / name).stat().st_size for name in APPENDED}}
        tensors = {"model": checkpoint.model, **checkpoint.state}
        metadata = {"fedsim": json.dumps(place)}
        metadata["sha256"] = _checksum(metadata["fedsim"], tensors)
        write_durably(self.path / "checkpoint.safetensors", save(tensors, metadata))
        self.last_checkpoint = time.monotonic()

    def finish(self, model: Mapping[str, Tensor]) -> None:
        """The trained model ends a run; its presence is what makes a run complete."""
        content = save({name: tensor.clone() for name, tensor in model.items()})
        for file in (self.metrics, self.transcript.messages):
            file.flush()
        write_durably(self.path / checksums.FILE, checksums.sums_text(self.path, {checksums.MODEL: content}).encode())
        write_durably(self.path / checksums.MODEL, content)
        self.close()
        tidy(self.path)

    def close(self) -> None:
        """Close the files and let go of the folder."""
        for file in (self.metrics, self.transcript.messages, self.lock):
            file.close()


def tidy(path: Path) -> None:
    """Remove what only an unfinished run needs; a run killed after its model was written is tidied by `resume`."""
    for name in ("checkpoint.safetensors", ".lock", FAILURE):
        (path / name).unlink(missing_ok=True)
    _remove_half_written(path)


def _remove_half_written(path: Path) -> None:
    for pattern in ("*.tmp", ".tmp*"):  # ours, and those of safetensors
        for file in path.rglob(pattern):
            file.unlink()


def is_being_written(path: Path) -> bool:
    """Whether a process holds the folder; nothing is made or changed, and the lock is held for a moment at most."""
    try:
        with (path / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or none that we may look at
        return False
    return False


def _lock(path: Path, until: float) -> TextIO:
    """Hold the folder for this process; the lock ends with the process, however that ends."""
    file = (path / ".lock").open("w")
    until = max(until, time.monotonic() + 0.1)  # `is_being_written` holds it for a moment
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                raise RunError(
                    f"{path} is being written by another process; wait for it, or choose another --out"
                ) from None
            time.sleep(0.05)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The last checkpoint of a run folder, if it has one."""
    file = path / "checkpoint.safetensors"
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata()
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        if _checksum(metadata["fedsim"], state) != metadata["sha256"]:
            raise ValueError("its SHA-256 is another")
        return Checkpoint(json.loads(metadata["fedsim"])["round"], state.pop("model"), state)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged ({error}); delete it and resume, the run then starts at round 1") from error


def _checksum(place: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of everything that a checkpoint says."""
    digest = hashlib.sha256(place.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _cut_back(path: Path, checkpoint: Checkpoint | None) -> None:
    """Undo whatever was written after the checkpoint."""
    sizes = dict.fromkeys(APPENDED, 0)
    if checkpoint is not None:
        with safe_open(path / "checkpoint.safetensors", framework="pt") as tensors:
            sizes = json.loads(tensors.metadata()["fedsim"])["bytes"]
    for name, size in sizes.items():
        file = path / name
        if (file.stat().st_size if file.is_file() else 0) < size:
            raise RunError(f"{file} is damaged: it is shorter than when the checkpoint was written; run it anew")
        if file.is_file():
            os.truncate(file, size)
    (path / checksums.FILE).unlink(missing_ok=True)  # of a run whose model is gone
    _remove_half_written(path)
    last = checkpoint.round if checkpoint else 0
    for file in (path / "transcript").glob("round-[0-9][0-9][0-9][0-9][0-9]-*"):
        if int(file.name[6:11]) > last:
            file.unlink()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all, also after a power cut."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: what was there before stays
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
