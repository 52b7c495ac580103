# SPDX-License-Identifier: Apache-2.0
"""The files of a run, read for the report. A run that is still growing is read as far as it got."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedsim.errors import PrivacyError, RunError, ScenarioError
from fedsim.privacy.claim import PrivacyClaim
from fedsim.report.attack_files import AttackFiles, read_attacks
from fedsim.report.audit_files import Audit, read_audit_files
from fedsim.scenario import Scenario
from fedsim.scenario_file import parse_scenario


class _Line(BaseModel):
    """A JSON object of the folder. Fields that the report does not use may be there."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Spent(_Line):
    """The privacy that one claim had spent after a round."""

    epsilon: float
    delta: float
    unit: str
    adjacency: str = ""
    observer: str = ""


class Round(_Line):
    """One line of `metrics.jsonl`. Round 0 is the model before training."""

    round: int
    clients: int = 0
    failures: int = 0
    train_loss: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    update_norm_mean: float | None = None
    privacy: tuple[Spent, ...] = ()


class Message(_Line):
    """One line of `transcript/messages.jsonl`: a message as the server saw it."""

    round: int
    direction: Literal["sent", "received"]
    kind: str
    client: int | None = None
    clients: int | None = None
    norm: float | None = None
    examples: int | None = None
    loss: float | None = None
    bytes: int = 0
    file: str | None = None
    reason: str | None = None


class PartitionPicture(_Line):
    """What some of the clients hold: rows of each class, and in all."""

    clients: tuple[int, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()


class Summary(_Line):
    """`summary.json`: what became known when the run was set up. `cohorts[r - 1]` are the clients of round r."""

    parameters: int | None = None
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    train_rows: int | None = None
    test_rows: int | None = None
    population: int | None = None
    input_shape: tuple[int, ...] = ()
    model_text: str = ""
    notes: tuple[str, ...] = ()
    partition: PartitionPicture = PartitionPicture()
    cohorts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class RunFiles:
    """Everything that the report says comes from here."""

    path: Path
    scenario: Scenario
    scenario_text: str
    summary: Summary
    rounds: tuple[Round, ...]
    claims: tuple[PrivacyClaim, ...]
    messages: tuple[Message, ...]
    transcript_sizes: Mapping[str, int]  # bytes of each file below transcript/
    has_model: bool

    @cached_property
    def rounds_done(self) -> int:
        """The last round that was finished."""
        return max((line.round for line in self.rounds), default=0)

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are done and the model is written."""
        return self.rounds_done >= self.scenario.rounds and self.has_model

    @cached_property
    def messages_by_round(self) -> Mapping[int, Sequence[Message]]:
        """The messages of each round that has any, in order."""
        by_round: defaultdict[int, list[Message]] = defaultdict(list)
        for message in self.messages:
            by_round[message.round].append(message)
        return dict(sorted(by_round.items()))

    @cached_property
    def attacks(self) -> tuple[AttackFiles, ...]:
        """What attacks have found, in order; read when it is first asked for."""
        return read_attacks(self.path)

    @cached_property
    def audits(self) -> tuple[Audit, ...]:
        """What audits have found, in order; read when it is first asked for."""
        return read_audit_files(self.path)

    @cached_property
    def received(self) -> tuple[Message, ...]:
        """What came back from the clients, failures left out."""
        return tuple(m for m in self.messages if m.direction == "received" and m.kind != "error")

    @cached_property
    def failures(self) -> tuple[Message, ...]:
        """The messages that say that something failed."""
        return tuple(m for m in self.messages if m.kind == "error")


def read_run_files(path: Path) -> RunFiles:
    """Read a run folder; RunError when it is missing or damaged. What a growing run does not have yet is left empty."""
    if not path.is_dir():
        raise RunError(f"{path} is not a run folder; name a folder that `fedsim run` made")
    text, scenario = _read_scenario(path / "scenario.yaml")
    transcript = path / "transcript"
    files = sorted(transcript.iterdir()) if transcript.is_dir() else []
    return RunFiles(
        path=path,
        scenario=scenario,
        scenario_text=text,
        summary=_read_summary(path / "summary.json"),
        rounds=_read_lines(path / "metrics.jsonl", Round),
        claims=_read_claims(path / "claims.json"),
        messages=_read_lines(transcript / "messages.jsonl", Message),
        transcript_sizes={file.name: file.stat().st_size for file in files if file.is_file() and file.suffix != ".tmp"},
        has_model=(path / "model.safetensors").is_file(),
    )


def _read_scenario(path: Path) -> tuple[str, Scenario]:
    if not path.is_file():
        raise RunError(
            f"{path.parent} is not a run folder: it holds no scenario.yaml; name a folder that `fedsim run` made"
        )
    text = _read_text(path)
    try:
        return text, parse_scenario(text, str(path))
    except ScenarioError as error:
        raise RunError(f"the scenario of the run cannot be read: {error}") from error


def _read_summary(path: Path) -> Summary:
    if not path.is_file():
        return Summary()
    try:
        summary = Summary.model_validate_json(_read_text(path))
    except ValidationError as error:
        raise _damaged(path, _first(error)) from error
    picture = summary.partition
    if len(picture.sizes) != len(picture.clients) or len(picture.counts) not in (0, len(picture.clients)):
        raise _damaged(path, "partition.clients, partition.sizes and partition.counts are not equally long")
    if len({len(row) for row in picture.counts}) > 1:
        raise _damaged(path, "the rows of partition.counts are not equally long")
    return summary


def _read_claims(path: Path) -> tuple[PrivacyClaim, ...]:
    if not path.is_file():
        return ()
    try:
        content = json.loads(_read_text(path))
        return tuple(PrivacyClaim.from_dict(entry) for entry in content)
    except (PrivacyError, ValueError, TypeError) as error:
        raise _damaged(path, "it is not a list of privacy claims") from error


L = TypeVar("L", bound=_Line)


def _read_lines(path: Path, line_type: type[L]) -> tuple[L, ...]:
    """The complete lines of a JSON Lines file; a last line without its end is still being written, and is left out."""
    if not path.is_file():
        return ()
    lines: Sequence[str] = _read_text(path).split("\n")[:-1]
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(line_type.model_validate_json(line))
        except ValidationError as error:
            raise _damaged(path, f"line {number}: {_first(error)}") from error
    return tuple(parsed)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, "it cannot be read as text") from error


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    return f"{field}: {detail['msg']}" if field else str(detail["msg"])


def _damaged(path: Path, why: str) -> RunError:
    why = " ".join(why.split()).rstrip(".")
    run = path.parent.parent if path.parent.name == "transcript" else path.parent
    if path.name == "summary.json":
        remedy = f"remove it, and let `fedsim run --resume {run}` write it again"
    elif path.name == "scenario.yaml" or (run / "model.safetensors").is_file():
        remedy = "restore it from a backup, or run the scenario again"
    else:  # what was written after the last checkpoint is written anew
        remedy = f"go on with `fedsim run --resume {run}`, or run the scenario again"
    return RunError(f"{path} is damaged ({why}); {remedy}")
