# SPDX-License-Identifier: Apache-2.0
"""What attacks have left in RUN/attacks/: what was known, what was found, how good it is, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim.audit.reconstruction import ReconstructionScore
from fedsim.audit.scores.columns import columns_from_list
from fedsim.audit.scores.shares import Share
from fedsim.data.table import TableEncoding
from fedsim.errors import RunError


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class AttackedUpdate(_Object):
    """One update that was attacked."""

    round: int
    client: int | None = None
    key: str
    found: int = 0
    loss: float | None = None
    certified: int | None = None
    label_counts: tuple[float, ...] | None = None
    event: str = ""
    """What its confidences are the probability of; empty: it was not calibrated, and shows no confidence."""
    notes: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    error: str | None = None
    score: dict[str, Any] | None = None

    @cached_property
    def scored(self) -> ReconstructionScore | None:
        """The score, where the truth is known."""
        return None if self.score is None else ReconstructionScore.from_dict(self.score)

    @property
    def name(self) -> str:
        """For people."""
        who = "the sum" if self.client is None else f"client {self.client}"
        return f"round {self.round}, {who}"


class AttackDocument(_Object):
    """The JSON file of one attack."""

    attack: str
    kind: Literal["image", "table", "text"]
    settings: dict[str, Any] = {}
    knowledge: dict[str, str] = {}
    observations: tuple[AttackedUpdate, ...] = ()
    columns: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, eq=False)
class AttackFiles:
    """One attack: its document and its tensors, by "KEY/inputs" and so on. Without a truth `truth` is empty."""

    name: str
    document: AttackDocument
    found: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]

    @property
    def title(self) -> str:
        """What the scenario calls the attack, else its name."""
        return str(self.document.settings.get("title") or self.document.attack)

    @cached_property
    def encoding(self) -> TableEncoding | None:
        """How to read the rows of a table; None where the file does not say."""
        return None if self.document.columns is None else columns_from_list(self.document.columns)

    @cached_property
    def scores(self) -> tuple[ReconstructionScore, ...]:
        """Of all updates that could be attacked and whose truth is known."""
        return tuple(update.scored for update in self.document.observations if update.scored is not None)


def total_right(files: AttackFiles) -> Share:
    """What was right, over all updates with a truth."""
    return sum((score.right for score in files.scores), Share(0, 0))


def read_attacks(run: Path) -> tuple[AttackFiles, ...]:
    """The attacks of a run in order; RunError for files that cannot be read."""
    folder = run / "attacks"
    paths = sorted(folder.glob("[0-9][0-9][0-9]-*.json")) if folder.is_dir() else []
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> AttackFiles:
    try:
        document = AttackDocument.model_validate_json(path.read_bytes())
        files = AttackFiles(
            path.stem,
            document,
            _tensors(path.with_suffix(".safetensors")),
            _tensors(path.with_name(f"{path.stem}-truth.safetensors")),
        )
        _ = files.scores, files.encoding
    except (ValidationError, SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())[:120]
        raise RunError(f"{path} is damaged ({why}); play the attack again with `fedsim attack`") from error
    return files


def _tensors(path: Path) -> Mapping[str, Tensor]:
    return load_file(path) if path.is_file() else {}
