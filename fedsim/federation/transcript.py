# SPDX-License-Identifier: Apache-2.0
"""The transcript: what the server saw, written down as it happens, and read by attacks and audits.

    transcript/layout.json                    the names and shapes of the model's tensors
    transcript/messages.jsonl                 one line a message; the SHA-256 of tensors that are kept
    transcript/round-00001-sent.safetensors   the model that the server sent in round 1; "client-7/fc.weight" where it
                                              sent every client another one, and what it made them from
    transcript/round-00001-received.safetensors   the updates that it received, "client-7/fc.weight", or their sum

It holds nothing that a server could not see: under secure aggregation sums only. The files can be read while they grow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from fedsim.errors import RunError
from fedsim.federation.arrays import Row, tensor_of
from fedsim.federation.records import Number, first_problem, read_json
from fedsim.scenario import AdversarySection
from fedsim.training import Layout

Kind = Literal["model", "update", "gradient", "sum", "error"]
_as_json = json.JSONEncoder().encode


@dataclass(frozen=True)
class MessageLine:
    """One message as the server saw it. `client` is None for what concerns the whole cohort."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # of lines that are read

    round: Number
    direction: Literal["sent", "received"]
    kind: Kind
    client: Number | None = None
    clients: Number | None = None
    norm: float | None = None
    examples: Number | None = None
    loss: float | None = None
    bit: float | None = None
    bytes: Number = 0
    sha256: str | None = None
    file: str | None = None
    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


_line_of = TypeAdapter(MessageLine).validate_json


class TranscriptWriter:
    """Appends to a transcript what the adversary of the scenario keeps."""

    def __init__(self, folder: Path, layout: Layout, adversary: AdversarySection) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.layout, self.adversary = folder, layout, adversary
        write_json(folder / "layout.json", {"names": layout.names, "shapes": [list(s) for s in layout.shapes]})
        self.messages = (folder / "messages.jsonl").open("ab")

    def sent(self, line: MessageLine, model: Tensor) -> None:
        """The model (P,) that went to a cohort, with its configuration."""
        file = f"round-{line.round:05d}-sent.safetensors" if keeps_round(self.adversary, line.round) else None
        if file:
            save_tensors(self.folder / file, {"model": model}, self.layout)
        self._append([replace(line, file=file, sha256=sha256(model)) if file else line])

    def sent_to_each(self, lines: Sequence[tuple[MessageLine, Tensor]], template: Tensor | None) -> None:
        """The models (P,) that went to clients which did not all get the same, and what they were made from."""
        if not lines:
            return
        round_ = lines[0][0].round
        file = f"round-{round_:05d}-sent.safetensors" if keeps_round(self.adversary, round_) else None
        if file:
            rows = {key_of(line): model for line, model in lines}
            save_tensors(self.folder / file, rows | ({} if template is None else {"model": template}), self.layout)
        self._append([replace(line, file=file, sha256=sha256(model)) if file else line for line, model in lines])

    def received(self, round_: int, arrivals: Sequence[tuple[MessageLine, Row | None]]) -> None:
        """What came back: each message with its tensor (P,), where it has one."""
        with_tensor = [(line, row) for line, row in arrivals if row is not None]
        kept = {
            key_of(line): tensor_of(row)
            for position, (line, row) in enumerate(with_tensor if keeps_round(self.adversary, round_) else [])
            if line.client is None or keeps_client(self.adversary, line.client, position)
        }
        if not kept:
            self._append([line for line, _ in arrivals])
            return
        file = f"round-{round_:05d}-received.safetensors"
        save_tensors(self.folder / file, kept, self.layout)
        self._append(
            [
                replace(line, file=file, sha256=sha256(kept[key_of(line)]))
                if row is not None and key_of(line) in kept
                else line
                for line, row in arrivals
            ]
        )

    def _append(self, lines: Sequence[MessageLine]) -> None:
        dicts = [{k: v for k, v in vars(line).items() if v is not None and v != {}} for line in lines]
        self.messages.write("".join([_as_json(content) + "\n" for content in dicts]).encode())
        self.messages.flush()


class Transcript:
    """What the server of a run saw, as it lies on disk."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "layout.json").is_file():
            raise RunError(f"{folder} holds no transcript (layout.json is missing); name the folder of a run")
        self.folder = folder

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The name and shape of each of the model's tensors, in the order of the flat vector."""
        try:
            content = read_json(self.folder / "layout.json")
            shapes = {name: torch.Size(shape) for name, shape in zip(content["names"], content["shapes"], strict=True)}
        except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise self._damaged("layout.json", error) from error
        if not shapes:
            raise self._damaged("layout.json", "it names no tensor")
        return shapes

    def messages(self) -> Iterator[MessageLine]:
        """Every message so far, in order; a last line that is still being written is left out."""
        path = self.folder / "messages.jsonl"
        if path.is_file():
            with path.open(encoding="utf-8", errors="surrogateescape") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.endswith("\n"):
                        break
                    try:
                        yield _line_of(line)
                    except ValidationError as error:
                        raise self._damaged("messages.jsonl", f"line {number}: {first_problem(error)}") from error

    def model(self, round_: int, client: int | None = None) -> dict[str, Tensor]:
        """The model that was sent in a round, to a client; without one (a sum), what all clients' were made from."""
        own = () if client is None else (f"client-{client}",)
        return self._tensors(self._file(round_, "sent"), *own, "model")

    def update(self, round_: int, client: int) -> dict[str, Tensor]:
        """The update (or gradient) that a client sent in a round."""
        return self._tensors(self._file(round_, "received"), f"client-{client}")

    def sum(self, round_: int) -> dict[str, Tensor]:
        """The sum of a round's updates, under secure aggregation."""
        return self._tensors(self._file(round_, "received"), "sum")

    def verify(self) -> int:
        """Check every kept message against its SHA-256; the number of messages that were checked."""
        checked = 0
        for line in self.messages():
            if line.file and line.sha256:
                self.check(line, self._tensors(self._file(line.round, line.direction), key_of(line)))
                checked += 1
        return checked

    def check(self, line: MessageLine, tensors: Mapping[str, Tensor]) -> None:
        """RunError if the tensors of a message are not those that were written."""
        if line.sha256 and sha256(torch.cat([tensor.flatten() for tensor in tensors.values()])) != line.sha256:
            raise self._damaged(str(line.file), f"{key_of(line)} does not have its SHA-256")

    def _file(self, round_: int, direction: str) -> str:
        """The file of a round's tensors; if there is none, an error says why."""
        file = f"round-{round_:05d}-{direction}.safetensors"
        if not (self.folder / file).is_file():
            last = max((line.round for line in self.messages()), default=0)
            if not 1 <= round_ <= last:
                raise RunError(f"round {round_} is not in the transcript {self.folder}, which ends with round {last}")
            raise RunError(
                f"{self.folder / file} was not kept; raise adversary.keep_rounds in the scenario and run again"
            )
        return file

    def _tensors(self, file: str, *keys: str) -> dict[str, Tensor]:
        """The tensors of the first of the keys that the file holds."""
        path, first = self.folder / file, next(iter(self.shapes))
        try:
            with safe_open(path, framework="pt") as tensors:
                held = [key for key in keys if f"{key}/{first}" in tensors.keys()]  # noqa: SIM118 - not a mapping
                if held:
                    return {name: tensors.get_tensor(f"{held[0]}/{name}") for name in self.shapes}
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, error) from error
        raise RunError(f"{path} does not hold {keys[-1]}; see adversary.keep_clients and defence.secure_aggregation")

    def _damaged(self, file: str, why: object) -> RunError:
        return RunError(f"{self.folder / file} is damaged ({why}); run the scenario again")


def is_whole(path: Path) -> bool:
    """Whether a file of tensors is there, to its last byte."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def keeps_round(adversary: AdversarySection, round_: int) -> bool:
    """Whether the tensors of this round are written."""
    keep = adversary.keep_rounds
    return keep == "all" or (round_ <= keep if isinstance(keep, int) else round_ in keep)


def keeps_client(adversary: AdversarySection, client: int, position: int) -> bool:
    """Whether the update of this client, at this position of the cohort, is written."""
    keep = adversary.keep_clients
    return keep == "all" or (position < keep if isinstance(keep, int) else client in keep)


def key_of(line: MessageLine) -> str:
    """The name of a message's tensors within its file."""
    if line.client is not None:
        return f"client-{line.client}"
    return "model" if line.kind == "model" else "sum"


def sha256(flat: Tensor) -> str:
    """SHA-256 of the little-endian float32 bytes of a flat vector."""
    return hashlib.sha256(flat.contiguous().numpy().data).hexdigest()


def save_tensors(path: Path, rows: Mapping[str, Tensor], layout: Layout) -> None:
    """Write flat vectors as named tensors `key/name`; the file appears complete or not at all."""
    tensors = {
        f"{key}/{name}": view.numpy() for key, row in rows.items() for name, view in layout.unflatten(row).items()
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that appears complete or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
