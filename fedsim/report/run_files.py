# SPDX-License-Identifier: Apache-2.0
"""The files of a run, read for the report. A run that is still growing is read as far as it got."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsim.errors import RunError, ScenarioError
from fedsim.federation.checksums import FILE as CHECKSUMS
from fedsim.federation.checksums import changed_files
from fedsim.federation.records import (
    Message,
    PartitionPicture,
    Round,
    Spent,
    Summary,
    read_claims,
    read_lines,
    read_rounds,
    read_summary,
    read_text,
)
from fedsim.federation.transcript import is_whole
from fedsim.privacy.claim import PrivacyClaim
from fedsim.report.attack_files import AttackFiles, read_attacks
from fedsim.report.audit_files import Audit, read_audit_files
from fedsim.scenario import Scenario
from fedsim.scenario_file import parse_scenario

__all__ = ["Message", "PartitionPicture", "Round", "RunFiles", "Spent", "Summary", "read_run_files"]


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
    damage: tuple[str, ...] = ()
    """Files that are lost, cut short, or not as the run wrote them."""

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
    messages = read_lines(transcript / "messages.jsonl", Message)
    files = sorted(transcript.iterdir()) if transcript.is_dir() else []
    return RunFiles(
        path=path,
        scenario=scenario,
        scenario_text=text,
        summary=read_summary(path / "summary.json") if (path / "summary.json").is_file() else Summary(),
        rounds=read_rounds(path / "metrics.jsonl"),
        claims=read_claims(path / "claims.json") if (path / "claims.json").is_file() else (),
        messages=messages,
        transcript_sizes={file.name: file.stat().st_size for file in files if file.is_file() and file.suffix != ".tmp"},
        has_model=(path / "model.safetensors").is_file(),
        damage=_damage(path, messages),
    )


def _damage(path: Path, messages: Sequence[Message]) -> tuple[str, ...]:
    """What is lost, cut short or changed of a run that has ended; the numbers in tensors are not looked at here."""
    if not (path / CHECKSUMS).is_file():  # still growing, or of an earlier version
        return ()
    named = sorted({f"transcript/{Path(message.file).name}" for message in messages if message.file})
    found = (*changed_files(path), *(name for name in named if not is_whole(path / name)))
    if found:
        logging.getLogger("fedsim").warning("%s is damaged: %s", path, ", ".join(found[:5]))
    return found


def _read_scenario(path: Path) -> tuple[str, Scenario]:
    if not path.is_file():
        raise RunError(
            f"{path.parent} is not a run folder: it holds no scenario.yaml; name a folder that `fedsim run` made"
        )
    text = read_text(path)
    try:
        return text, parse_scenario(text, str(path))
    except ScenarioError as error:
        raise RunError(f"the scenario of the run cannot be read: {error}") from error
