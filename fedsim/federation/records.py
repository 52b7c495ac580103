# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a run folder, read with their types: one reader, whoever reads them.

A number that no run writes (a round before the first, a share above 1) is damage, as a file is that is no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedsim.errors import PrivacyError, RunError
from fedsim.federation.checksums import MODEL
from fedsim.privacy.claim import PrivacyClaim

Number = Annotated[int, Field(ge=0, le=2**53)]
Accuracy = Annotated[float, Field(ge=0, le=1)]


class Record(BaseModel):
    """A JSON object of the folder. Fields that the reader does not use may be there."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Spent(Record):
    """The privacy that one claim had spent after a round."""

    epsilon: Annotated[float, Field(ge=0)]
    delta: Accuracy
    unit: str
    adjacency: str = ""
    observer: str = ""


class Round(Record):
    """One line of `metrics.jsonl`. Round 0 is the model before training."""

    round: Number
    clients: Number = 0
    failures: Number = 0
    train_loss: float | None = None
    loss: float | None = None
    accuracy: Accuracy | None = None
    update_norm_mean: float | None = None
    privacy: tuple[Spent, ...] = ()


class Message(Record):
    """One line of `transcript/messages.jsonl`: a message as the server saw it."""

    round: Number
    direction: Literal["sent", "received"]
    kind: str
    client: Number | None = None
    clients: Number | None = None
    norm: float | None = None
    examples: Number | None = None
    loss: float | None = None
    bytes: Number = 0
    file: str | None = None
    reason: str | None = None


class PartitionPicture(Record):
    """What some of the clients hold: rows of each class, and in all."""

    clients: tuple[Number, ...] = ()
    counts: tuple[tuple[Number, ...], ...] = ()
    sizes: tuple[Number, ...] = ()


class Summary(Record):
    """`summary.json`: what became known when the run was set up. `cohorts[r - 1]` are the clients of round r."""

    parameters: Number | None = None
    classes: Number | None = None
    class_names: tuple[str, ...] = ()
    train_rows: Number | None = None
    test_rows: Number | None = None
    population: Number | None = None
    input_shape: tuple[Number, ...] = ()
    model_text: str = ""
    notes: tuple[str, ...] = ()
    partition: PartitionPicture = PartitionPicture()
    cohorts: tuple[tuple[Number, ...], ...] = ()


L = TypeVar("L")


def read_text(path: Path) -> str:
    """The text of a file of a run."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, "it cannot be read as text") from error


def read_json(path: Path) -> Any:
    """The JSON document in a file of a run."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is no JSON document") from error


def read_lines(path: Path, line_type: type[L]) -> tuple[L, ...]:
    """The complete lines of a JSON Lines file; a last line without its end is still being written, and is left out."""
    if not path.is_file():
        return ()
    adapter = TypeAdapter(line_type)
    lines: Sequence[str] = read_text(path).split("\n")[:-1]
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(adapter.validate_json(line))
        except ValidationError as error:
            raise damaged(path, f"line {number}: {first_problem(error)}") from error
    return tuple(parsed)


def read_rounds(path: Path) -> tuple[Round, ...]:
    """The lines of `metrics.jsonl`: the rounds in their order, from the round 0 before training on."""
    rounds = read_lines(path, Round)
    if [line.round for line in rounds] != list(range(len(rounds))):
        raise damaged(path, "its rounds are not 0, 1, 2, ...")
    return rounds


def read_claims(path: Path) -> tuple[PrivacyClaim, ...]:
    """The claims of `claims.json`."""
    content = read_json(path)
    try:
        if not isinstance(content, list):
            raise TypeError
        return tuple(PrivacyClaim.from_dict(entry) for entry in content)
    except (PrivacyError, ValueError, TypeError, OverflowError) as error:
        raise damaged(path, "it is not a list of privacy claims") from error


def read_summary(path: Path) -> Summary:
    """What `summary.json` holds."""
    try:
        summary = Summary.model_validate_json(read_text(path))
    except ValidationError as error:
        raise damaged(path, first_problem(error)) from error
    picture = summary.partition
    if len(picture.sizes) != len(picture.clients) or len(picture.counts) not in (0, len(picture.clients)):
        raise damaged(path, "partition.clients, partition.sizes and partition.counts are not equally long")
    if len({len(row) for row in picture.counts}) > 1:
        raise damaged(path, "the rows of partition.counts are not equally long")
    return summary


def first_problem(error: ValidationError) -> str:
    """The first of what pydantic found, in words."""
    detail = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    return f"{field}: {detail['msg']}" if field else str(detail["msg"])


def damaged(path: Path, why: str) -> RunError:
    """The error for a file of a run that is not what a run writes, with the way out."""
    why = " ".join(why.split()).rstrip(".")
    run = path.parent.parent if path.parent.name in ("transcript", "truth", "attacks") else path.parent
    if path.name == "summary.json":
        remedy = f"remove it, and let `fedsim run --resume {run}` write it again"
    elif path.name == "scenario.yaml" or (run / MODEL).is_file():
        remedy = "restore it from a backup, or run the scenario again"
    else:  # what was written after the last checkpoint is written anew
        remedy = f"go on with `fedsim run --resume {run}`, or run the scenario again"
    return RunError(f"{path} is damaged ({why}); {remedy}")
