# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.data import load_dataset
from fedsim.data.table import CategoricalColumn, NumericColumn, TableEncoding, _column
from fedsim.errors import DataError
from fedsim.scenario import CsvData

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data of ../shared/data is not at hand")

ROWS = """age,city,code,score,smoker,constant,sick
39,Bern,1,0.25,True,7,yes
50, Köln,2,1.5,False,7,no
38,?,1,-3.75,True,7,no
53,NA,3,2.0,False,7,yes
28,Bern,2,9.5,True,7,no
37,Köln,1,0.125,False,7,yes
"""


def csv(tmp_path: Path, content: str = ROWS, name: str = "t.csv", **fields: Any) -> CsvData:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return CsvData.model_validate({"source": "csv", "path": str(tmp_path / name), "target": "sick"} | fields)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_columns_are_encoded_and_decoded(tmp_path: Path, name: str) -> None:
    data = load_dataset(csv(tmp_path, name=name, categorical=["code"]), 0)
    encoding = data.encoding
    assert isinstance(encoding, TableEncoding)
    assert data.class_names == ("no", "yes")
    # age 1, city 4 (?, Bern, Köln, NA), code 3, score 1, smoker 2, constant 1
    assert data.x_train.shape == (5, 12)
    assert encoding.slices()["code"] == slice(5, 8)
    assert data.table is not None
    pd.testing.assert_frame_equal(encoding.decode(data.x_train), data.table.drop(columns="sick"), check_dtype=False)
    whole = pd.read_csv(tmp_path / name, keep_default_na=False, skipinitialspace=True).drop(columns="sick")
    assert torch.equal(encoding.encode(encoding.decode(data.x_test)), data.x_test)
    pd.testing.assert_frame_equal(encoding.decode(encoding.encode(whole)), whole, check_dtype=False)
    assert np.isin(["?", "NA"], encoding.columns[1].values).all()  # type: ignore[union-attr]


def test_statistics_are_those_of_the_training_rows(tmp_path: Path) -> None:
    data = load_dataset(csv(tmp_path), 0)
    assert data.table is not None
    age = data.encoding.columns[0]  # type: ignore[union-attr]
    assert isinstance(age, NumericColumn)
    assert age.mean == pytest.approx(data.table["age"].mean())
    assert age.scale == pytest.approx(data.table["age"].std(ddof=0))
    assert data.x_train[:, -1].tolist() == [0.0] * 5  # the constant column


def test_decode_takes_the_nearest_row(tmp_path: Path) -> None:
    data = load_dataset(csv(tmp_path, drop=["code", "constant"]), 0)
    assert isinstance(data.encoding, TableEncoding)
    noisy = data.x_train + 0.001 * torch.randn(data.x_train.shape, generator=torch.Generator().manual_seed(0))
    clear, rough = data.encoding.decode(data.x_train), data.encoding.decode(noisy)
    assert (clear[["age", "city", "smoker"]] == rough[["age", "city", "smoker"]]).all().all()
    assert data.encoding.decode(torch.full_like(data.x_train, torch.nan))["age"].isna().all()


def test_encoding_refuses_what_it_does_not_know() -> None:
    column = CategoricalColumn("city", ("Bern", "Köln"))
    with pytest.raises(DataError, match="'Rom'"):
        column.encode(pd.Series(["Bern", "Rom"]))


NUMBERS = st.lists(st.decimals(-10_000, 10_000, places=2).map(float), min_size=3, max_size=30)


@settings(max_examples=50, deadline=None)
@given(numbers=NUMBERS, texts=st.lists(st.text(max_size=5), min_size=3, max_size=30), seed=st.integers(0, 99))
def test_round_trip_of_any_table(numbers: list[float], texts: list[str], seed: int) -> None:
    rows = min(len(numbers), len(texts))
    frame = pd.DataFrame({"n": numbers[:rows], "t": [f"x{text}" for text in texts[:rows]]})
    train = frame.iloc[np.random.default_rng(seed).permutation(rows)[: max(rows // 2, 1)]]
    encoding = TableEncoding(tuple(_column(frame[c], train[c], False, "test") for c in frame.columns))
    decoded = encoding.decode(encoding.encode(frame))
    assert decoded["t"].tolist() == frame["t"].tolist()
    largest = frame["n"].abs().max() + abs(train["n"].mean())
    np.testing.assert_allclose(decoded["n"], frame["n"], rtol=0, atol=max(1e-6 * largest, 1e-9))


def replaced(old: str, new: str) -> str:
    assert old in ROWS
    return ROWS.replace(old, new)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown target": (ROWS, {"target": "ill"}, "ill, but .* has age, city, code, score, smoker, constant, sick"),
    "unknown drop": (ROWS, {"drop": ["ill"]}, "data.drop names the column ill"),
    "unknown categorical": (ROWS, {"categorical": ["ill"]}, "data.categorical names the column ill"),
    "target dropped": (ROWS, {"drop": ["sick"]}, "is the target"),
    "nothing left": (ROWS, {"drop": ["age", "city", "code", "score", "smoker", "constant"]}, "no columns left"),
    "empty file": ("", {}, "cannot be read as CSV"),
    "header only": (ROWS.splitlines()[0] + "\n", {}, "no rows"),
    "missing number": (replaced("39,", ","), {}, "1 missing value in column age"),
    "missing text": (replaced("Bern", ""), {}, "2 missing values in column city"),
    "missing target": (replaced("yes", ""), {}, "3 missing values in column sick"),
    "number with text": (
        replaced("50,", "unknown,"),
        {},
        "1 value that is no number in column age, such as 'unknown'",
    ),
    "nan text": (replaced("0.25", "nan"), {}, "no numbers? in column score, such as 'nan'"),
    "infinite": (replaced("0.25", "inf"), {}, "infinite values in column score"),
    "one class": (ROWS.replace("yes", "no"), {}, "1 class"),
    "fractional target": (ROWS, {"target": "score"}, "fractional"),
    "target of many": (ROWS, {"target": "age"}, "6 different values in its target age"),
    "long row": (replaced("39,Bern", "39,Bern,Bern"), {}, "cannot be read as CSV"),
    "long row later": (replaced("28,Bern", "28,Bern,Bern"), {}, "cannot be read as CSV"),
    "two columns of one name": (replaced("city", "age"), {}, "2 columns named age; give every column"),
    "two targets": (replaced("city", "sick"), {}, "2 columns named sick"),
    "zero byte": (replaced("39,", "39\0,"), {}, "zero byte in its line [0-9]+.; save it as plain text"),
    "too few rows": ("a,sick\n1,yes\n2,no\n", {}, "at least 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(tmp_path: Path, case: str) -> None:
    content, fields, words = BAD[case]
    with pytest.raises(DataError, match=words) as caught:
        load_dataset(csv(tmp_path, content, **fields), 0)
    assert "\n" not in str(caught.value)


def test_a_column_of_numbers_with_marks_can_be_called_categorical(tmp_path: Path) -> None:
    data = load_dataset(csv(tmp_path, replaced("50,", "?,"), categorical=["age"]), 0)
    assert isinstance(data.encoding, TableEncoding)
    assert isinstance(data.encoding.columns[0], CategoricalColumn)


def test_too_many_categories(tmp_path: Path) -> None:
    rows = "name,a,sick\n" + "".join(f"n{i},{i},{i % 2}\n" for i in range(1200))
    with pytest.raises(DataError, match="1,200 different values in the categorical column name"):
        load_dataset(csv(tmp_path, rows), 0)
    assert load_dataset(csv(tmp_path, rows, drop=["name"]), 0).class_names == ("0", "1")


def test_not_text_and_not_gzip(tmp_path: Path) -> None:
    for name, content in (
        ("t.csv", b"a,sick\n\xff\xfe,\x00\n"),
        ("t.csv.gz", b"not gzip"),
        ("u.csv.gz", b"\x1f\x8b\x08 broken"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            load_dataset(CsvData(source="csv", path=str(tmp_path / name), target="sick"), 0)
    with pytest.raises(DataError, match="is a folder"):
        load_dataset(CsvData(source="csv", path=str(tmp_path), target="sick"), 0)


@needs_shared
@pytest.mark.parametrize(
    ("file", "target", "drop", "width"),
    [
        ("adult", "income", ("split",), 108),
        ("german_credit", "credit-risk", (), 61),
        ("law_school", "pass_bar", (), 12),
    ],
)
def test_real_tables_survive_the_round_trip(file: str, target: str, drop: tuple[str, ...], width: int) -> None:
    spec = CsvData(source="csv", path=str(SHARED / f"{file}.csv.gz"), target=target, drop=drop, limit=2000)
    data = load_dataset(spec, 0)
    assert isinstance(data.encoding, TableEncoding)
    assert data.table is not None
    assert data.x_train.shape[1] == width
    decoded = data.encoding.decode(data.x_train)
    pd.testing.assert_frame_equal(decoded, data.table[decoded.columns], check_dtype=False, check_exact=True)
