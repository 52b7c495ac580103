# SPDX-License-Identifier: Apache-2.0
"""A client's table by a public schema: each row by itself, and what does not fit is told with its line."""

from __future__ import annotations

import gzip
import stat
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedsim.cli import main
from fedsim.deploy import client as clients
from fedsim.deploy import init
from fedsim.deploy.encoding import encode, load_schema, write_encoded
from fedsim.deploy.layout import open_client
from fedsim.errors import DataError, DeployError, PolicyError
from fedsim.federation.bundle import public_scenario
from fedsim.federation.client import _place
from fedsim.scenario import Scenario

SCHEMA = """\
target: diagnosis
classes: [benign, malignant]
columns:
  age: {range: [0, 120]}
  sex: {categories: [f, m, x]}
  stage: {categories: [1, 2]}
"""
TABLE = """\
stage,name,age,diagnosis,sex
1,Ada,60,benign,f
2,Bob,150,malignant,m
1, Cy ,-3.5, benign, m
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path / "schema.yaml", tmp_path / "table.csv"


def test_numbers_are_scaled_by_their_range_and_categories_are_one_hot(files: tuple[Path, Path]) -> None:
    schema, table = files
    found = encode(load_schema(schema), table)
    expected = [[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1], [-1, 0, 1, 0, 1, 0]]
    np.testing.assert_array_equal(found.x, np.array(expected, np.float32))
    assert found.y.tolist() == [0, 1, 0]
    assert found.clipped == 2
    packed = table.with_name("table.csv.gz")
    packed.write_bytes(gzip.compress(TABLE.encode("utf-8-sig")))
    np.testing.assert_array_equal(encode(load_schema(schema), packed).x, found.x)


def test_a_row_is_encoded_by_itself(files: tuple[Path, Path]) -> None:
    """One row more, however odd, changes nothing about the others, and neither does the absence of a class."""
    schema, table = files
    before = encode(load_schema(schema), table).x
    table.write_text(TABLE + "2,Dan,1e300,benign,x\n")
    np.testing.assert_array_equal(encode(load_schema(schema), table).x[:3], before)
    write_encoded(schema, table, table.with_suffix(".npz"))
    with np.load(table.with_suffix(".npz"), allow_pickle=False) as archive:
        assert archive["class_names"].tolist() == ["benign", "malignant"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("2,Bob,150", "2,Bob,old", "line 3: column age is 'old', which is not a number"),
        ("2,Bob,150", "2,Bob,", "line 3: column age is '', which is not a number"),
        ("2,Bob,150", "2,Bob,nan", "line 3: column age is 'nan', which is not a number"),
        ("1,Ada", "3,Ada", "line 2: column stage is '3', which is not among the categories"),
        ("60,benign,f", "60,benign,F", "line 2: column sex is 'F', which is not among the categories"),
        ("60,benign", "60,unclear", "line 2: column diagnosis is 'unclear', which is not among the classes"),
        ("60,benign,f", "60,benign", "line 2 has 4 cells, its header 5"),
        ("name,age", "name,years", "has 0 columns age, the schema needs one"),
        ("name,age", "age,age", "has 2 columns age, the schema needs one"),
        (TABLE, "stage,name,age,diagnosis,sex\n", "has no rows"),
        (TABLE, "", "has 0 columns age"),
        ("1,Ada", '1,"Ada', "cannot be read as CSV"),
    ],
)
def test_what_does_not_fit_is_told_with_its_line(
    old: str, new: str, words: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    schema, table = files
    table.write_text(TABLE.replace(old, new))
    with pytest.raises(DataError) as told:
        encode(load_schema(schema), table)
    assert words in str(told.value)
    assert main(["deploy", "encode", str(schema), str(table), str(table.with_suffix(".npz"))]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(path.name for path in table.parent.iterdir()) == ["schema.yaml", "table.csv"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[0, 120]", "[120, 0]", "the first number of a range must be below the second"),
        ("[0, 120]", "[0, .inf]", "finite number"),
        ("[f, m, x]", "[f, m, f]", "a value is there twice"),
        ("[f, m, x]", "[]", "either a range or categories"),
        ("{range: [0, 120]}", "{range: [0, 120], categories: [a]}", "either a range or categories"),
        ("[benign, malignant]", "[benign]", "at least 2 items"),
        ("  age:", "  diagnosis: {range: [0, 1]}\n  age:", "the target diagnosis is among the columns"),
        ("target:", "targets:", "target"),
        ("columns:", "rows: 3\ncolumns:", "a schema has no field rows"),
        (SCHEMA, "- 1", "a schema is a mapping"),
    ],
)
def test_a_wrong_schema_is_told_in_a_sentence(old: str, new: str, words: str, files: tuple[Path, Path]) -> None:
    schema, _ = files
    schema.write_text(SCHEMA.replace(old, new))
    with pytest.raises(PolicyError) as told:
        load_schema(schema)
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_client_takes_part_with_a_table_as_with_arrays(files: tuple[Path, Path], tmp_path: Path) -> None:
    schema, table = files
    table.write_text(TABLE * 1 + "".join(TABLE.splitlines(keepends=True)[1:]) * 20)
    init.create(tmp_path / "fed", 1, ["localhost"])
    client = open_client(tmp_path / "fed" / "client-1")
    with pytest.raises(DeployError, match="give both"):
        clients.encoded(client, None, schema)
    data = clients.encoded(client, table, schema)
    assert stat.S_IMODE(data.stat().st_mode) == 0o600
    assert f'data-path = "{data}"' in clients.node_configuration(client, data, None)
    # The server evaluates with rows of its own, by the same schema.
    assert main(["deploy", "encode", str(schema), str(table), str(tmp_path / "server.npz")]) == 0
    asked = {"data": {"source": "npz", "path": str(tmp_path / "server.npz")}, "model": {"name": "mlp", "hidden": [4]}}
    asked |= {"defence": {"example_dp": {"noise_multiplier": 1.0}}}
    text = public_scenario(Scenario.model_validate(asked))
    node = {"partition-id": 0, "num-partitions": 1, "data-path": str(data)}
    place = _place(Context(1, 2, node, RecordDict(), {"scenario": text}))
    assert tuple(place.dataset.x_train.shape) == (63, 6)
    assert place.dataset.classes == 2
