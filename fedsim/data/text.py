# SPDX-License-Identifier: Apache-2.0
"""Text: windows of characters or words in which each next token is to be predicted."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedsim.data.dataset import Array, Dataset, existing_file, from_arrays
from fedsim.errors import DataError
from fedsim.scenario.data import DescriptionsData, TextData

UNKNOWN = "�"
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]|\n")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by number; number 0 stands for every token that is not kept."""

    tokens: tuple[str, ...]
    unit: Literal["characters", "words"]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        """The token numbers of a text."""
        return [self.numbers.get(token, 0) for token in tokenise(text, self.unit)]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text again: exact for characters that are kept; words are joined by a space."""
        return ("" if self.unit == "characters" else " ").join(self.tokens[int(number)] for number in numbers)


def tokenise(text: str, unit: Literal["characters", "words"]) -> Sequence[str]:
    """Characters, or words with punctuation marks and line ends as words of their own."""
    return text if unit == "characters" else _WORD.findall(text)


def load_text(spec: TextData | DescriptionsData, seed: int) -> Dataset:
    """A `.txt` file is one text; `.json` or `.json.gz` maps each speaker, a natural client, to a list of texts.

    Each of scikit-learn's descriptions is a client. The texts of a speaker are joined by line ends and cut into windows
    of `length` tokens that do not overlap; what is left over at the end is dropped. The vocabulary is that of the whole
    file: a federation agrees on it beforehand.
    """
    if isinstance(spec, DescriptionsData):
        name, where, natural = str(spec.source), f"data.source {spec.source}", True
        speakers = _descriptions()
    else:
        name, where, natural = Path(spec.path).name, f"data.path {spec.path}", spec.path.endswith((".json", ".json.gz"))
        speakers = _read_speakers(spec)
    streams = {speaker: tokenise(text, spec.tokens) for speaker, text in speakers.items()}
    counts = Counter(token for tokens in streams.values() for token in tokens)
    counts.pop(UNKNOWN, None)
    kept = sorted(counts, key=lambda token: (-counts[token], token))[: spec.vocabulary - 1]
    vocabulary = Vocabulary((UNKNOWN, *kept), spec.tokens)
    windows = {speaker: _windows(tokens, vocabulary, spec.length) for speaker, tokens in streams.items()}
    windows = {speaker: pair for speaker, pair in windows.items() if len(pair[0])}
    if not windows:
        longest = max(len(tokens) for tokens in streams.values())
        raise DataError(
            f"{where} has at most {longest} {spec.tokens} in one text, too few for windows of"
            f" data.length {spec.length} and one to predict"
        )
    x, y = (torch.from_numpy(np.concatenate([pair[i] for pair in windows.values()])) for i in (0, 1))
    groups = np.repeat(np.arange(len(windows)), [len(pair[0]) for pair in windows.values()])
    return from_arrays(
        name, "text", x, y, spec, seed,
        class_names=vocabulary.tokens, encoding=vocabulary,
        groups=groups if natural else None, group_names=tuple(windows) if natural else (),
    )  # fmt: skip


def _windows(tokens: Sequence[str], vocabulary: Vocabulary, length: int) -> tuple[Array, Array]:
    """Inputs and targets (n, length): the target of a place is the token that follows it."""
    numbers = np.array([vocabulary.numbers.get(token, 0) for token in tokens], dtype=np.int64)
    n = max(len(numbers) - 1, 0) // length
    return numbers[: n * length].reshape(n, length), numbers[1 : n * length + 1].reshape(n, length)


def _descriptions() -> dict[str, str]:
    """The text that scikit-learn has on each of its data sets, by the name of the data set."""
    texts = {file.name: file for file in files("sklearn.datasets.descr").iterdir() if file.name.endswith(".rst")}
    return {name.removesuffix(".rst"): texts[name].read_text("utf-8") for name in sorted(texts)}


def _read_speakers(spec: TextData) -> dict[str, str]:
    file = existing_file(spec.path)
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"data.path {spec.path} cannot be read as UTF-8 text ({error})") from None
    if file.name.removesuffix(".gz").endswith(".json"):
        return _speakers_of_json(text, spec.path)
    if not text.strip():
        raise DataError(f"data.path {spec.path} is empty")
    return {file.stem: text}


def _speakers_of_json(text: str, path: str) -> dict[str, str]:
    try:
        speakers = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"data.path {path} is not JSON ({error})") from None
    if not isinstance(speakers, dict) or not speakers:
        raise DataError(f"data.path {path} must map speakers to lists of texts")
    for name, texts in speakers.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"data.path {path} must map speakers to lists of texts, but {name!r} has something else")
    return {name: "\n".join(texts) for name, texts in speakers.items()}
