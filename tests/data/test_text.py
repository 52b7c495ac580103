# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.data import load_dataset
from fedsim.data.text import UNKNOWN, Vocabulary
from fedsim.errors import DataError
from fedsim.scenario import TextData
from fedsim.scenario.data import DescriptionsData

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data of ../shared/data is not at hand")

SPEAKERS = {"ROMEO": ["But soft, what light?", "It is the east."], "JULIET": ["O Romeo, Romeo!"] * 3, "PAGE": ["Ho"]}


def text(tmp_path: Path, content: object, name: str = "t.json", **fields: object) -> TextData:
    data = (
        content
        if isinstance(content, bytes)
        else content.encode()
        if isinstance(content, str)
        else json.dumps(content).encode()
    )
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return TextData.model_validate({"source": "text", "path": str(tmp_path / name), "length": 4} | fields)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_speakers_are_clients_and_targets_are_next_tokens(tmp_path: Path, name: str) -> None:
    data = load_dataset(text(tmp_path, SPEAKERS, name), 0)
    assert isinstance(data.encoding, Vocabulary)
    assert data.group_names == ("ROMEO", "JULIET")  # PAGE said too little for one window
    assert data.classes == len(data.class_names) == len(data.encoding.tokens)
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
    assert data.groups is not None
    joined = {speaker: "\n".join(texts) for speaker, texts in SPEAKERS.items()}
    for x, y, group in zip(data.x_train, data.y_train, data.groups, strict=True):
        window = data.encoding.decode([*x.tolist(), int(y[-1])])
        assert window in joined[data.group_names[group]]


def test_plain_text_of_words(tmp_path: Path) -> None:
    data = load_dataset(text(tmp_path, "To be, or not to be: that's the question.\n" * 9, "t.txt", tokens="words"), 0)
    assert isinstance(data.encoding, Vocabulary)
    assert data.groups is None
    assert "that's" in data.class_names
    assert data.encoding.decode(data.encoding.encode("To be, or what")) == f"To be , or {UNKNOWN}"


def test_vocabulary_keeps_the_most_frequent(tmp_path: Path) -> None:
    data = load_dataset(text(tmp_path, "aaaaaabbbbbccccdd" * 3, "t.txt", vocabulary=3), 0)
    assert data.class_names == (UNKNOWN, "a", "b")
    assert data.classes == 3
    assert int(data.x_train.max()) <= 2


@given(st.text(alphabet="abc xyz\n", max_size=40))
def test_characters_round_trip(sentence: str) -> None:
    vocabulary = Vocabulary((UNKNOWN, *"abc xyz\n"), "characters")
    assert vocabulary.decode(vocabulary.encode(sentence)) == sentence


BAD: dict[str, tuple[object, str, str]] = {
    "empty": ("", "t.txt", "is empty"),
    "short": ("abc", "t.txt", "at most 3 characters"),
    "one letter": ("a" * 50, "t.txt", "1 class"),
    "one window": ("abcdefg", "t.txt", "too few to hold some out"),
    "no JSON": ("{", "t.json", "is not JSON"),
    "list": (["a"], "t.json", "must map speakers"),
    "no speakers": ({}, "t.json", "must map speakers"),
    "numbers": ({"A": [1]}, "t.json", "'A' has something else"),
    "string": ({"A": "text"}, "t.json", "'A' has something else"),
    "not UTF-8": (b"\xff\xfe\xfa", "t.txt", "cannot be read as UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text(tmp_path: Path, case: str) -> None:
    content, name, words = BAD[case]
    with pytest.raises(DataError, match=words) as caught:
        load_dataset(text(tmp_path, content, name), 0)
    assert "\n" not in str(caught.value)


def test_broken_gzip_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(b"\x1f\x8b broken")
    for path, words in (("t.json.gz", "cannot be read"), ("no.txt", "does not exist")):
        with pytest.raises(DataError, match=words):
            load_dataset(TextData(source="text", path=str(tmp_path / path)), 0)


@needs_shared
def test_shakespeare() -> None:
    data = load_dataset(TextData(source="text", path=str(SHARED / "shakespeare_by_role.json.gz")), 0)
    assert len(data.group_names) == 80
    assert data.x_train.shape[1] == 32
    assert data.classes < 100


@pytest.mark.parametrize("tokens", ["characters", "words"])
def test_descriptions_of_scikit_learn(tokens: str) -> None:
    """Embedded text: each description is a client, and its windows are pieces of it."""
    data = load_dataset(DescriptionsData.model_validate({"source": "descriptions", "tokens": tokens}), 0)
    assert data.name == "descriptions"
    assert data.kind == "text"
    assert {"iris", "breast_cancer", "twenty_newsgroups"} <= set(data.group_names)
    assert data.groups is not None
    assert len(data.x_train) + len(data.x_test) > (1000 if tokens == "characters" else 200)
    assert isinstance(data.encoding, Vocabulary)
    iris = data.x_train[data.groups == data.group_names.index("iris")]
    assert any("Fisher" in data.encoding.decode(row.tolist()) for row in iris)
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
