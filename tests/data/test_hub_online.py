# SPDX-License-Identifier: Apache-2.0
"""The hub source through the real client (flwr-datasets, datasets, huggingface_hub), against a hub on loopback.

The client reads its settings when it is imported, so that it lives in processes of its own.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from loopback_hub import Hub, serving
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

if importlib.util.find_spec("flwr_datasets") is None:
    pytest.skip('flwr-datasets is not installed: pip install -c constraints.txt -e ".[hub]"', allow_module_level=True)

DIGITS = load_digits()
NAMES = [f"digit {i}" for i in range(10)]


# --- what the hub holds: real digits and tumours, as files of the hub ------------------------------------------------


def images(rows: slice, mode: str = "L", size: int = 8) -> list[Image.Image]:
    grey = [Image.fromarray((image * 15.9375).astype(np.uint8)) for image in DIGITS.images[rows]]
    return [image.convert(mode).resize((size, size), Image.Resampling.NEAREST) for image in grey]


def encoded(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": ""}


def parquet(columns: dict[str, Any], **features: Any) -> bytes:
    """A table as the hub stores it: what its columns mean is in the metadata of its schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    info = json.dumps({"info": {"features": features}})
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"huggingface": info}) if features else table, file)
    return file.getvalue()


def pictures(rows: slice, *more: Image.Image, x: str = "image", target: str = "label", **form: Any) -> bytes:
    values = [encoded(image) for image in [*images(rows, **form), *more]]
    labels = [*DIGITS.target[rows].tolist(), *[0] * len(more)]
    classes = {"names": NAMES, "_type": "ClassLabel"}
    return parquet({x: values, target: labels}, **{x: {"_type": "Image"}, target: classes})


def tumours() -> pd.DataFrame:
    data = load_breast_cancer(as_frame=True)
    frame = data.data.iloc[:, :3].assign(size=np.where(data.data["mean radius"] > 15, "big", "small"))
    return frame.assign(diagnosis=data.target_names[data.target])


def csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False).encode()


def classes_in_a_table() -> bytes:
    yes, stage = {"names": ["no", "yes"], "_type": "ClassLabel"}, {"names": ["early", "late"], "_type": "ClassLabel"}
    columns = {"age": list(range(40)), "stage": [0, 1] * 20, "label": [0, 0, 1, 1] * 10}
    return parquet(columns, age={"dtype": "int64", "_type": "Value"}, stage=stage, label=yes)


def labelled(labels: list[str] | list[int], kind: str, values: list[dict[str, Any]]) -> bytes:
    features = {"image": {"_type": "Image"}, "label": {"dtype": kind, "_type": "Value"}}
    return parquet({"image": values, "label": labels}, **features)


def repositories() -> dict[str, dict[str, bytes]]:
    train, test = slice(0, 100), slice(100, 140)
    table, holes = tumours(), tumours()
    holes.loc[3, "mean texture"] = np.nan
    deep, broken = Image.fromarray(np.full((8, 8), 4096, np.uint16)), {"bytes": b"no image", "path": ""}
    odd = {
        "price": [Decimal(i) for i in range(20)],
        "day": pd.date_range("2026-01-01", periods=20),
        "post": ["8000"] * 20,
    }
    two = "---\nconfigs:\n- {config_name: a, data_files: a.csv}\n- {config_name: b, data_files: b.csv}\n---\n"
    contest = pd.DataFrame({"a": range(40), "label": [0, 1] * 20})
    drawn = enumerate(encoded(image)["bytes"] for image in images(slice(12)))
    return {
        "who/digits": {
            "README.md": b"---\nlicense: mit\n---\n",
            "data/train-00000-of-00001.parquet": pictures(train),
            "data/test-00000-of-00001.parquet": pictures(test),
        },
        "who/colours": {"train.parquet": pictures(train, mode="RGB", x="img", target="fine_label")},
        "who/palette": {"train.parquet": pictures(train, images(train)[0].convert("RGB").quantize(4))},
        "who/half-grey": {"train.parquet": pictures(train), "test.parquet": pictures(test, mode="RGBA")},
        "who/sizes": {"train.parquet": pictures(train), "validation.parquet": pictures(test, size=12)},
        "who/deep": {"train.parquet": pictures(train, deep)},
        "who/broken": {"train.parquet": labelled([0, 1, 2] * 3, "int64", [broken] * 9)},
        "who/words": {"train.parquet": labelled(["cat", "dog"] * 20, "string", list(map(encoded, images(slice(40)))))},
        "who/folder": {f"train/{'even' if i % 2 == 0 else 'odd'}/{i}.png": data for i, data in drawn},
        "who/contest": {"train.csv": csv(contest), "test.csv": csv(contest.assign(label=-1))},
        "who/tumours": {"train.csv": csv(table[:400]), "test.csv": csv(table[400:])},
        "who/holes": {"holes.csv": csv(holes)},
        "who/classes": {"train.parquet": classes_in_a_table()},
        "who/lists": {"train.parquet": parquet({"vector": [[float(i), 1.0] for i in range(20)], "label": [0, 1] * 10})},
        "who/odd": {"train.parquet": parquet({**odd, "label": [0, 1] * 10})},
        "who/two": {"README.md": two.encode(), "a.csv": csv(table), "b.csv": csv(table[:100])},
        "who/test-only": {"test.csv": csv(table)},
        "who/garbage": {"train.parquet": b"this is no table"},
        "who/code": {"code.py": b"raise SystemExit('this ran')"},
        "who/empty": {"README.md": b"---\nlicense: mit\n---\n"},
        "who/gated": {"train.csv": csv(table)},
    }


# --- the client, in a process of its own ----------------------------------------------------------------------------

PROBE = """
import json, sys, time
from pydantic import TypeAdapter
from fedsim.data import load_dataset
from fedsim.errors import FedsimError
from fedsim.scenario import DataSection

time.sleep = lambda seconds: None  # the client waits half a minute before it gives up a hub that is not there

def answer(spec):
    try:
        data = load_dataset(TypeAdapter(DataSection).validate_python(spec), 0)
    except FedsimError as error:
        return {"error": str(error)}
    columns = [type(column).__name__ for column in data.encoding.columns] if data.encoding else []
    return {"train": list(data.x_train.shape), "test": len(data.x_test), "names": list(data.class_names),
            "columns": columns, "first": data.x_train[0].flatten().tolist(), "y": data.y_train.tolist()}

load_dataset(TypeAdapter(DataSection).validate_python({"source": "digits"}), 0)
early = [name for name in ("flwr_datasets", "datasets", "huggingface_hub") if name in sys.modules]
print(json.dumps({"early": early, "answers": [answer(spec) for spec in json.load(sys.stdin)]}))
"""
CASES: dict[str, dict[str, Any]] = {
    "digits": {},
    "colours": {"target": "fine_label"},
    "colours by name": {"x": "img", "target": "fine_label"},
    "colours, x misspelt": {"x": "image", "target": "fine_label"},
    "colours, no target": {},
    "palette": {},
    "half-grey": {},
    "sizes": {},
    "sizes, scaled": {"size": 10},
    "deep": {},
    "broken": {},
    "words": {},
    "contest": {},
    "folder": {},
    "tumours": {"target": "diagnosis"},
    "holes": {"target": "diagnosis"},
    "holes, dropped": {"target": "diagnosis", "drop": ["mean texture"]},
    "classes": {},
    "classes, coded": {"categorical": ["age"]},
    "lists": {},
    "lists by name": {"x": "vector"},
    "odd": {},
    "two": {"target": "diagnosis"},
    "two, b": {"target": "diagnosis", "subset": "b"},
    "test-only": {"target": "diagnosis"},
    "garbage": {},
    "code": {},
    "empty": {},
    "gated": {},
    "nowhere": {},
}


def probe(hub: Hub, home: Path, specs: list[dict[str, Any]], **more: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, **hub.environment(home), **more}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(specs), env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def spec_of(case: str) -> dict[str, Any]:
    name = case.split(",")[0].split(" by")[0]
    return {"source": "hub", "dataset": f"who/{name}", **CASES[case]}


@dataclass(frozen=True)
class World:
    hub: Hub
    home: Path
    answers: dict[str, Any]
    early: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A hub, and what the client made of every case in one process, from an empty cache."""
    with serving(Hub(repositories(), gated={"who/gated"})) as hub:
        home = tmp_path_factory.mktemp("home")
        said, _ = probe(hub, home, [spec_of(case) for case in CASES])
        yield World(hub, home, dict(zip(CASES, said["answers"], strict=True)), said["early"])


# --- what comes out -------------------------------------------------------------------------------------------------


def test_images(world: World) -> None:
    found = world.answers["digits"]
    assert (found["train"], found["test"], found["names"]) == ([100, 1, 8, 8], 40, NAMES)
    assert found["y"] == DIGITS.target[:100].tolist()
    np.testing.assert_allclose(found["first"], np.asarray(images(slice(1))[0]).ravel() / 255, rtol=1e-6)
    assert world.answers["colours"] == world.answers["colours by name"]


@pytest.mark.parametrize(
    ("case", "train", "test"),
    [
        ("colours", [80, 3, 8, 8], 20),
        ("palette", [81, 3, 8, 8], 20),
        ("half-grey", [100, 3, 8, 8], 40),  # a test part in colour makes the grey training part colourful too
        ("sizes, scaled", [100, 1, 10, 10], 40),  # validation where there is no test
        ("words", [32, 1, 8, 8], 8),
        ("folder", [10, 1, 8, 8], 2),
        ("tumours", [400, 5], 169),
        ("holes, dropped", [455, 4], 114),
        ("contest", [32, 1], 8),  # a test part without answers is none
        ("classes", [32, 3], 8),
        ("classes, coded", [32, 42], 8),
        ("lists by name", [16, 2], 4),
        ("odd", [16, 22], 4),
        ("two, b", [80, 5], 20),
    ],
)
def test_shapes(world: World, case: str, train: list[int], test: int) -> None:
    found = world.answers[case]
    assert "error" not in found, found["error"]
    assert (found["train"], found["test"]) == (train, test)


def test_categories_are_no_quantities(world: World) -> None:
    assert world.answers["classes"]["columns"] == ["NumericColumn", "CategoricalColumn"]
    assert world.answers["classes"]["names"] == ["no", "yes"]
    assert world.answers["odd"]["columns"] == ["NumericColumn", "CategoricalColumn", "CategoricalColumn"]
    assert world.answers["words"]["names"] == ["cat", "dog"]
    assert world.answers["folder"]["names"] == ["even", "odd"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("colours, x misspelt", "data.x names the column image, but who/colours has img, fine_label"),
        ("colours, no target", "data.target names the column label, but who/colours has img, fine_label"),
        ("sizes", "2 different sizes; scale images to one by data.size"),
        ("deep", "mode I;16"),
        ("broken", "cannot be read (UnidentifiedImageError)"),
        ("holes", "1 missing value in column mean texture; fill in what is missing, leave out such rows, or name"),
        ("lists", "no table of numbers and texts; name its input column in data.x"),
        ("two", "['a', 'b']"),
        ("two", "name one in data.subset"),
        ("test-only", "The given split: 'train' is not present"),
        ("garbage", "not a parquet file"),
        ("code", "scripts are no longer supported"),
        ("empty", "doesn't contain any data files"),
        ("gated", "gated dataset on the Hub. You must be authenticated"),
        ("gated", "`hf auth login` or HF_TOKEN"),
        ("nowhere", "doesn't exist on the Hub or cannot be accessed; check the name"),
    ],
)  # fmt: skip
def test_refusals(world: World, case: str, words: str) -> None:
    sentence = world.answers[case]["error"]
    assert words in sentence
    assert "\n" not in sentence


# --- the network ----------------------------------------------------------------------------------------------------


def test_nobody_else_is_asked(world: World) -> None:
    """Neither before the hub is asked for, nor then: no telemetry, no counter of downloads, no list of agents."""
    assert world.early == []
    viewer = world.hub.endpoint.replace("http://", "datasets-server.")  # the hub's own service, by its endpoint
    assert set(world.hub.strangers) <= {viewer}
    assert all(path.startswith(("/datasets/who/", "/api/datasets/who/")) for path in world.hub.requests)


def test_cache(world: World, tmp_path: Path) -> None:
    """What was loaded once is there without a hub; what was not is refused in one sentence."""
    asked = len(world.hub.requests)
    specs = [spec_of("digits"), spec_of("tumours")]
    for more in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):  # the port that discards, closed
        said, _ = probe(world.hub, world.home, specs, **more)
        assert said["answers"] == [world.answers["digits"], world.answers["tumours"]]
    said, _ = probe(world.hub, tmp_path, specs[:1], HF_ENDPOINT="http://127.0.0.1:9")
    assert "Couldn't reach 'who/digits' on the Hub" in said["answers"][0]["error"]
    assert "check the connection" in said["answers"][0]["error"]
    assert len(world.hub.requests) == asked


# --- the command line -----------------------------------------------------------------------------------------------

SCENARIO = """
name: hub
data: {{source: hub, dataset: {dataset}}}
model: {{name: mlp, hidden: [16]}}
client: {{learning_rate: 0.1, epochs: 2, batch_size: 5}}
cohort: {{population: 4}}
rounds: 2
"""


def fedsim(world: World, folder: Path, command: str, dataset: str) -> subprocess.CompletedProcess[str]:
    (folder / "hub.yaml").write_text(SCENARIO.format(dataset=dataset))
    return subprocess.run(
        [sys.executable, "-m", "fedsim.cli", command, "hub.yaml"], cwd=folder, capture_output=True, text=True,
        env={**os.environ, **world.hub.environment(folder / "home")}, check=False,
    )  # fmt: skip


def test_check_and_run(world: World, tmp_path: Path) -> None:
    checked = fedsim(world, tmp_path, "check", "who/digits")
    assert checked.returncode == 0, checked.stderr
    assert "who/digits: 100 rows to train on, 40 held out, input 1x8x8, 10 classes" in checked.stdout
    ran = fedsim(world, tmp_path, "run", "who/tumours, target: diagnosis")
    assert ran.returncode == 0, ran.stderr
    assert "on who/tumours" in ran.stdout
    assert (tmp_path / "runs" / "hub-001" / "report.html").is_file()
    assert checked.stderr == ran.stderr == ""


def test_refused_by_the_command_line(world: World, tmp_path: Path) -> None:
    done = fedsim(world, tmp_path, "run", "who/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: hub.yaml:3: data.dataset who/nowhere cannot be loaded from the hub")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
