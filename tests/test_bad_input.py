# SPDX-License-Identifier: Apache-2.0
"""Whatever a user can get wrong is one sentence that says where, what and what to do; exit code 2; nothing left behind.

Every case goes through the real command line. A fragment is a regular expression that the sentence must contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import assert_says, refused

from fedsim.cli import main

NAMES = r"digits, breast_cancer, mnist, faces, descriptions, npz, csv, images, text, hub"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused_run(capsys: pytest.CaptureFixture[str], text: str, *more: str) -> str:
    Path("bad.yaml").write_text(text)
    sentence = refused(capsys, "run", "bad.yaml", *more, before={path.name for path in Path().iterdir()})
    assert not Path("runs").exists()
    return sentence


# --- what can be seen from the file alone ---------------------------------------------------------------------------

FILES: list[tuple[str, tuple[str, ...]]] = [
    # wrong types
    ("rounds: many", (r"bad.yaml:1:", "rounds", '"many"', "an integer of at least 1")),
    ("rounds: '5'", ("rounds", '"5"', "an integer")),
    ("rounds: true", ("rounds", "true", "an integer")),
    ("rounds: 2.5", ("rounds", "2.5", "an integer")),
    ("engine: {threads: 1000000000}", ("^bad.yaml:1: engine.threads is 1000000000", "at least 1 and at most 1,024")),
    ("rounds: [1, 2]", ("rounds", r"\[1, 2\]", "an integer")),
    ("client:\n  epochs: 2\n  shuffle: yes", (r":3:", "client.shuffle", '"yes"', "true or false")),
    ("client:\n  learning_rate: fast", (r":2:", "client.learning_rate", '"fast"', "a number of at least 1e-30")),
    ("client: 3", ("client is 3", "a section", "learning_rate")),
    ("client:\n", ("client is empty", "leave it out", "learning_rate")),
    ("client: [1, 2]", (r"client is \[1, 2\]", "a section")),
    ("attacks: inversion", ("attacks", '"inversion"', "a list")),
    ("question: 3", ("question is 3", "text")),
    ("model: {name: mlp, hidden: 64}", ("model.hidden", "64", "a list")),
    ("model:\n  name: mlp\n  hidden:\n    - 64\n    - wide", (r":5:", r"model.hidden\[1\]", '"wide"', "an integer")),
    ("data: 5", ("data is 5", NAMES)),
    ("data: null", ("data is empty", NAMES)),
    # values that are not offered
    ("data: mnits", ("data.source", '"mnits"', r"did you mean mnist\?", NAMES)),
    ("data:\n  source: cifar", (r":1:", "data.source", '"cifar"', NAMES)),
    ("data:\n  source: [mnist]", ("data.source", "mnist", NAMES)),
    ("model: transfromer", ("model.name", "did you mean transformer", "logistic, mlp, cnn", "import:module:function")),
    ("model: {name: 3}", ("model.name is 3", "logistic")),
    ("model: import:nofunction", ("model.name", '"import:nofunction"', "import:")),
    ("strategy: fedprox", ("strategy.name", '"fedprox"', "fedavg, fedsgd")),
    ("partition: {kind: random}", ("partition.kind", '"random"', "iid, dirichlet, shards, column, quantity")),
    ("client: {optimizer: sdg}", ("client.optimizer", '"sdg"', "did you mean sgd", "sgd, adam")),
    ("cohort: {sampling: uniform}", ("cohort.sampling", '"uniform"', "fixed, poisson")),
    ("defence: {compression: zip}", ("defence.compression.kind", '"zip"', "prune, quantise, sign")),
    ("defence: {accountant: moments}", ("defence.accountant", '"moments"', "pld, rdp, prv")),
    ("adversary: {keep_rounds: some}", ("adversary.keep_rounds", '"some"', "all or an integer", "a list")),
    ("adversary: {keep_rounds: [1, x]}", ("adversary.keep_rounds", "x", "a list")),
    ("engine: cloud", ("engine.kind", '"cloud"', "inline")),
    ("name: my run", ("name", '"my run"', "matches")),
    ("name: ../../etc", ("name", "etc", "matches")),
    ("name: " + "x" * 100, ("name", "xxx", "80 characters")),
    # out of range
    ("rounds: 0", ("rounds is 0", "at least 1")),
    ("rounds: 99999999999999999999", ("rounds is 99999999999999999999", "1,?000,?000")),
    ("client: {steps: 99999999999}", ("client.steps is 99999999999", "1,?000,?000")),
    ("defence: {client_dp: {noise_multiplier: 1e308}}", ("client_dp.noise_multiplier", "at most 1")),
    ("seed: -1", ("seed is -1", "at least 0")),
    ("seed: 9223372036854775808", ("seed is 9223372036854775808", "below")),
    ("client: {learning_rate: -0.1}", ("client.learning_rate is -0.1", "at least 1e-30")),
    ("client: {learning_rate: .nan}", ("client.learning_rate is NaN", "finite")),
    ("client: {learning_rate: .inf}", ("client.learning_rate is Infinity", "finite")),
    ("client: {momentum: 1}", ("client.momentum is 1", "below 1")),
    ("cohort: {rate: 1.5}", ("cohort.rate is 1.5", "at least 1e-12 and at most 1")),
    ("partition: {kind: dirichlet, alpha: 0}", ("partition.alpha is 0", "at least 1e-30")),
    ("data: {source: mnist, test_fraction: 1}", ("data.test_fraction is 1", "at least 1e-12 and below 1")),
    ("defence: {compression: {kind: quantise, bits: 99}}", ("defence.compression.bits is 99", "at most 16")),
    ("defence: {client_dp: {noise_multiplier: -1}}", ("defence.client_dp.noise_multiplier is -1", "at least 0")),
    (
        "defence: {example_dp: {noise_multiplier: 1, delta: 0}}",
        ("defence.example_dp.delta is 0", "at least 1e-30 and below 1"),
    ),
    # unknown and missing fields
    ("name: a\nRounds: 4", (r":2:", "has no field Rounds", "did you mean rounds", "here 4", "seed")),
    ("client:\n  epochs: 2\n  epoch: 3", (r":3:", "client has no field epoch ", "did you mean epochs", "batch_size")),
    (
        "data:\n  source: mnist\n  path: x.npz",
        (r":3:", r"data \(mnist\) has no field path", '"x.npz"', "test_fraction, limit, source"),
    ),
    ("model: {name: logistic, hidden: [3]}", ("model", "has no field hidden", r"\[3\]")),
    ("defence: {dp: {epsilon: 1}}", ("defence has no field dp", "client_dp")),
    ("data: {source: csv, path: a.csv}", ("data.target is missing", "column to predict")),
    ("data: {limit: 10}", ("data.source is missing", NAMES)),
    ("partition: {alpha: 1}", ("partition.kind is missing", "dirichlet")),
    ("model: {hidden: [3]}", ("model.name is missing", "mlp")),
    # fields that contradict each other
    ("cohort: {population: 20, size: 30}", ("cohort", "size 30", "population of 20")),
    ("strategy: fedsgd\nclient:\n  epochs: 3", (r":3:", "client.epochs", "fedsgd", "leave it out")),
    (
        "defence:\n  client_dp:\n    noise_multiplier: 0\n    target_epsilon: 1",
        (r":3:", "defence.client_dp", "noise_multiplier 0", "finite target_epsilon"),
    ),
    (
        "defence: {client_dp: {clipping_norm: 1}}",
        ("defence.client_dp", "exactly one of noise_multiplier and target_epsilon, here is neither"),
    ),
    (
        "defence:\n  client_dp:\n    noise_multiplier: 1.0\n    target_epsilon: 2.0",
        ("^bad.yaml:3: defence.client_dp", r"here are both \(1 and 2\); leave one of them out"),
    ),
    ("cohort:\n  population: 10\n  size: 20", ("^bad.yaml:3: cohort: size 20", "of 10; choose a size of at most 10")),
    ("cohort: {size: 2, rate: 0.5}", ("cohort: give either size or rate, here 2 and 0.5; leave one",)),
    ("client:\n  epochs: 2\n  steps: 3", ("^bad.yaml:2: client", "epochs or steps, here 2 and 3; leave one")),
    (
        "rounds: 2\nadversary: {keep_rounds: [1, 99]}",
        ("^bad.yaml:2: adversary.keep_rounds names round 99", "rounds 1 to 2;", "or change rounds"),
    ),
    ("adversary: {keep_rounds: [0]}", ("adversary.keep_rounds names round 0", "rounds 1 to 10;")),
    ("rounds: 1\nadversary: {keep_rounds: [2]}", ("names round 2, but there is round 1;",)),
    (
        "defence: {client_dp: {noise_multiplier: 1, noise: laplace, adaptive: {}}}",
        ("defence.client_dp", "adaptive", "gaussian"),
    ),
    (
        "strategy:\n  name: fedavg\n  weighting: examples\ndefence:\n  client_dp:\n    noise_multiplier: 1",
        (r":3:", "strategy.weighting", "examples", "use uniform"),
    ),
    (
        "model:\n  name: resnet8\n  norm: batch\ndefence:\n  example_dp:\n    noise_multiplier: 1",
        (r":3:", "model.norm", "batch", "group"),
    ),
    # not a scenario at all
    ("", ("bad.yaml is empty", "fedsim new")),
    ("# nothing but a comment\n", ("bad.yaml is empty", "fedsim new")),
    ("- a\n- b\n", ("a mapping of fields", r"\[\"a\", \"b\"\]")),
    ("just words", ("a mapping of fields", "just words")),
    ("data: [mnist", (r"bad.yaml:1:", "cannot be read as YAML")),
    ("client:\n\tepochs: 1", (r"bad.yaml:2:", "YAML", "spaces, not tabs")),
    ("name: 'open", (r"bad.yaml:1:", "cannot be read as YAML")),
    ("rounds: 1\nseed: 2\nrounds: 3", (r"bad.yaml:3:", "rounds is there twice", "line 1")),
    ("client:\n  epochs: 1\n  epochs: 2", (r"bad.yaml:3:", "client.epochs is there twice")),
    ("3: 4", (r"bad.yaml:1:", "3 is no field name")),
    ("data: &d mnist\nmodel: *d", (r"bad.yaml:1:", "anchors", "&d")),
    ("data: mnist\nmodel: *d", (r"bad.yaml:2:", "aliases")),
    ("data: !!python/object/apply:os.system [ls]", (r"bad.yaml:1:", "tag", "os.system")),
    ("name: a\n---\nname: b", (r"bad.yaml:2:", "YAML", "another document")),
    ("a: " + "[" * 5000, ("YAML", "nested too deeply")),
    ("seed: " + "9" * 6000, (r"bad.yaml:1:", "99999", "number")),
    ("name: \x07", ("YAML", "special characters")),
]


@pytest.mark.parametrize(("text", "fragments"), FILES, ids=[repr(text[:40]) for text, _ in FILES])
def test_a_malformed_file_is_one_sentence(
    text: str, fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused_run(capsys, text)
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert_says(sentence, ("bad.yaml", *fragments))


def test_several_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = refused_run(capsys, "rounds: 0\nseed: x\nfoo: 1").split("\n")
    assert first.endswith("(and 2 more):")
    assert_says(first, ("bad.yaml:1: rounds is 0",))
    assert_says(rest[0], ("^  bad.yaml:2: seed",))
    assert_says(rest[1], ("^  bad.yaml:3: .*foo",))
    assert len(rest) == 2


OVERRIDES: list[tuple[str, tuple[str, ...]]] = [
    ("client.epochs=abc", ("^--set client.epochs=abc: ", 'client.epochs is "abc"', "an integer of at least 1")),
    ("client.epochs", ("^--set client.epochs: ", "FIELD=VALUE")),
    ("=5", ("^--set =5: ", "FIELD=VALUE")),
    ("client..epochs=5", ("FIELD=VALUE",)),
    ("client.epochs=", ("client.epochs has no value", "null")),
    ("client.epochs=[1", ("^--set .*YAML",)),
    ("clent.epochs=5", ("^--set clent.epochs=5: ", "no field clent", "did you mean client")),
    ("client.epochz=5", ("^--set client.epochz=5: ", "no field epochz", "did you mean epochs")),
    ("rounds.more=5", ("rounds is 10 and has no fields",)),
    ("data=mnits", ("^--set data=mnits: ", "did you mean mnist")),
    ("data.path=x", ("^--set data.path=x: ", r"data \(digits\) has no field path")),
    ("defence.compression.keep=0.5", ("^--set ", "defence.compression.kind is missing")),
    ("defence=null", ("^--set defence=null: ", "defence is empty")),
    ("cohort.size=30", ("^--set cohort.size=30: ", "size 30", "population of 20")),
]


@pytest.mark.parametrize(("override", "fragments"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_override_is_one_sentence(
    override: str, fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "name: good\ndata: digits\nrounds: 10\ncohort: {population: 20}\n"
    sentence = refused_run(capsys, text, "--set", override)
    assert "\n" not in sentence
    assert_says(sentence, fragments)


# --- files that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda path: None, ("there is no file", "bad.yaml", "quickstart")),
        (lambda path: path.mkdir(), ("bad.yaml is a folder",)),
        (lambda path: path.write_bytes(b"\xff\xfe\x00\x01\x80"), ("bad.yaml", "not a text file")),
        (lambda path: path.write_bytes(b"\x00" * 10), ("bad.yaml", "YAML", "text file")),
        (lambda path: path.write_text("# " + "x" * 2_000_000), ("bad.yaml", "2,000,002 bytes", "at most 1,000,000")),
        (lambda path: path.symlink_to("/dev/zero"), ("bad.yaml", "not a regular file")),
        (lambda path: path.symlink_to("nowhere"), ("there is no file", "bad.yaml")),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    make: Callable[[Path], object], fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    make(Path("bad.yaml"))
    sentence = refused(capsys, "check", "bad.yaml")
    assert "\n" not in sentence
    assert_says(sentence, fragments)


def test_a_misspelt_name_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert_says(refused(capsys, "run", "quikstart"), ('"quikstart"', r"did you mean quickstart\?"))


# --- what is only seen with the data, the model and the cohorts at hand ---------------------------------------------


def _npz(**arrays: object) -> None:
    rng = np.random.default_rng(0)
    good = {"x_train": rng.random((40, 5), dtype=np.float32), "y_train": np.arange(40) % 2}
    np.savez("data.npz", **{**good, **arrays})  # type: ignore[arg-type]


def _x(*, bad: float | None = None, rows: int = 40) -> np.ndarray:
    x = np.random.default_rng(1).random((rows, 5), dtype=np.float32)
    if bad is not None:
        x[3, 2] = bad
    return x


def _images() -> None:
    for name in ("a", "b"):
        Path("pictures", name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(Path("pictures", name, "1.png"))
    Path("pictures", "b", "2.png").write_bytes(b"not a picture")


def _npy() -> None:
    with Path("data.npz").open("wb") as file:
        np.save(file, np.arange(40))


def _csv(text: str) -> Callable[[], None]:
    return lambda: Path("data.csv").write_text(text) and None


LONG = "a" * 300
TABLE = "age,town,ill\n" + "".join(f"{20 + n},{'ab'[n % 2]},{n % 3 % 2}\n" for n in range(40))
NPZ = "data: {source: npz, path: data.npz}\nmodel: logistic\n"
CSV = "data: {source: csv, path: data.csv, target: ill}\nmodel: logistic\ncohort: {population: 2}\n"
DIGITS = "data: digits\nmodel: logistic\n"

WORLD: list[tuple[str, str, Callable[[], object] | None, tuple[str, ...]]] = [
    # who takes part
    ("cohort larger than the population by default", DIGITS + "cohort: {size: 30}", None, ("cohort.size", "30", "20")),
    (
        "more clients than rows",
        DIGITS + "cohort: {population: 5000}",
        None,
        ("population|partition", r"5,?000", "examples_per_client|rows"),
    ),
    (
        "dirichlet that cannot give everybody enough",
        DIGITS + "partition: {kind: dirichlet, alpha: 0.1, min_examples: 1000}",
        None,
        ("partition.min_examples 1,000", "rows"),
    ),
    (
        "more shards than rows",
        DIGITS + "partition: {kind: shards, shards_per_client: 1000}",
        None,
        ("partition.shards_per_client 1,000", "rows"),
    ),
    (
        "quantity that cannot give everybody enough",
        DIGITS + "partition: {kind: quantity, min_examples: 500}",
        None,
        ("partition.min_examples 500", "rows"),
    ),
    ("no natural clients", DIGITS + "partition: column", None, ("partition|column", "digits|column")),
    (
        "a column that is not there",
        CSV.replace("cohort: {population: 2}\n", "partition: {kind: column, column: doctor}"),
        _csv(TABLE),
        ("partition.column|column", "doctor", "town"),
    ),
    ("nobody is ever drawn", DIGITS + "cohort: {rate: 1e-9, sampling: poisson}\nrounds: 1", None, ("cohort", "rate")),
    # files that are not there or not what they should be
    ("npz missing", NPZ, None, ("data.path|data", "data.npz")),
    ("npz that is no npz", NPZ, lambda: Path("data.npz").write_text("hello"), ("data.npz",)),
    ("npz without x_train", NPZ, lambda: np.savez("data.npz", y_train=np.arange(4)), ("data.npz", "x_train")),
    ("npz with objects", NPZ, lambda: _npz(y_train=np.array(["a", None] * 20, dtype=object)), ("data.npz", "objects")),
    ("NaN data", NPZ, lambda: _npz(x_train=_x(bad=np.nan)), ("training inputs|x_train", "NaN")),
    ("infinite data", NPZ, lambda: _npz(x_train=_x(bad=np.inf)), ("training inputs|x_train", "infinite")),
    ("fewer labels than rows", NPZ, lambda: _npz(y_train=np.arange(39) % 2), ("y_train", "39", "40")),
    (
        "labels that are not integers",
        NPZ,
        lambda: _npz(y_train=np.linspace(0, 1, 40)),
        ("y_train", "integer|whole|class"),
    ),
    ("negative labels", NPZ, lambda: _npz(y_train=np.arange(40) % 2 - 1), ("y_train", "-1")),
    ("one class only", NPZ, lambda: _npz(y_train=np.zeros(40, int)), ("class",)),
    ("no rows", NPZ, lambda: _npz(x_train=_x(rows=0), y_train=np.zeros(0, int)), ("x_train|rows",)),
    (
        "npz whose inputs are one number",
        NPZ,
        lambda: np.savez("data.npz", x_train=3.0, y_train=[0, 1]),
        ("^bad.yaml:1: data.path .*data.npz: x_train must be numbers", r"float64 of shape \(\)"),
    ),
    ("npz that is an npy", NPZ, _npy, ("^bad.yaml:1: data.path .*data.npz is a single array", "np.savez", "y_train")),
    (
        "labels, with the line of the file that holds them",
        NPZ,
        lambda: _npz(y_train=np.arange(39) % 2),
        ("^bad.yaml:1: data.path .*data.npz: x_train has 40 rows, but y_train has 39; give",),
    ),
    (
        "pixels of floats that are bytes",
        NPZ,
        lambda: _npz(x_train=np.full((40, 5, 5), 255.0)),
        ("^bad.yaml:1: data.path .*data.npz: x_train", "outside 0 to 1", "from 255 to 255", "divide"),
    ),
    (
        "a path longer than any name",
        NPZ.replace("data.npz", LONG),
        None,
        ("^bad.yaml:1: data.path .*aaa", "does not exist", "relative paths start at"),
    ),
    (
        "a folder of images with a path longer than any name",
        f"data: {{source: images, path: {LONG}}}\nmodel: cnn",
        None,
        ("^bad.yaml:1: data.path .*aaa", "does not exist"),
    ),
    (
        "more examples for each client than there are",
        DIGITS + "partition: {kind: iid, examples_per_client: 1000000000}",
        None,
        (
            "^bad.yaml:3: partition.examples_per_client 1,000,000,000",
            "the 1,438 training rows; set it to at most 1,438",
        ),
    ),
    (
        "csv with two columns of one name",
        CSV,
        _csv(TABLE.replace("town", "age")),
        ("^bad.yaml:1: data.path .*data.csv has 2 columns named age", "a name of its own"),
    ),
    (
        "csv with a zero byte",
        CSV,
        _csv(TABLE.replace("25", "2\0005")),
        ("^bad.yaml:1: data.path .*data.csv", "zero byte in its line 7", "UTF-8"),
    ),
    (
        "csv with one value missing in the column of clients",
        CSV.replace("cohort: {population: 2}", "partition: {kind: column, column: town}").replace(
            "target: ill", "target: ill, drop: [town]"
        ),
        _csv(TABLE.replace("25,b", "25,").replace("0,a", "0,a")),
        ("^bad.yaml:3: partition.column town has 1 missing value;", "another column"),
    ),
    ("csv missing", CSV, None, ("data.path|data", "data.csv")),
    ("csv empty", CSV, _csv(""), ("data.csv", "empty|No columns")),
    ("csv without the target", CSV, _csv(TABLE.replace("ill", "sick")), ("data.target|target", "ill", "sick")),
    ("csv with a header only", CSV, _csv("age,town,ill\n"), ("data.csv", "rows|empty")),
    ("csv with a target that is always the same", CSV, _csv("age,ill\n" + "1,0\n" * 20), ("data.csv", "class")),
    (
        "csv with a column to drop that is not there",
        CSV.replace("target: ill", "target: ill, drop: [height]"),
        _csv(TABLE),
        ("drop", "height"),
    ),
    ("csv that is binary", CSV, lambda: Path("data.csv").write_bytes(bytes(range(256)) * 9), ("data.csv",)),
    (
        "image folder missing",
        "data: {source: images, path: pictures}\nmodel: cnn",
        None,
        ("data.path|data", "pictures"),
    ),
    (
        "image folder empty",
        "data: {source: images, path: pictures}\nmodel: cnn",
        lambda: Path("pictures").mkdir(),
        ("pictures",),
    ),
    (
        "an image that is none",
        "data: {source: images, path: pictures}\nmodel: cnn",
        _images,
        ("^bad.yaml:1: data.path.*2.png",),
    ),
    ("text missing", "data: {source: text, path: a.txt}\nmodel: transformer", None, ("data.path|data", "a.txt")),
    (
        "text too short",
        "data: {source: text, path: a.txt}\nmodel: transformer",
        lambda: Path("a.txt").write_text("hi"),
        ("a.txt", "length|short|window"),
    ),
    # models that do not fit
    ("cnn on a table", "data: breast_cancer\nmodel: cnn\ncohort: {population: 4}", None, ("model", "cnn")),
    ("transformer on images", "data: digits\nmodel: transformer", None, ("model", "transformer")),
    (
        "heads that do not divide the width",
        "data: {source: text, path: a.txt}\nmodel: {name: transformer, dim: 10, heads: 4}\ncohort: {population: 2}",
        lambda: Path("a.txt").write_text("the quick brown fox " * 100),
        ("model", "10", "4"),
    ),
    (
        "a model that no memory holds",
        "data: digits\nmodel: {name: mlp, hidden: [16777216, 16777216]}",
        None,
        (
            "^bad.yaml:2: model.name mlp",
            r"281,[\d,]+ parameters",
            r"about [\d,]+ TB",
            r"this machine has [\d.]+ [GT]B",
        ),
    ),
    ("a module that is not there", "data: digits\nmodel: import:no_such_module:f", None, ("model", "no_such_module")),
    ("a function that is not there", "data: digits\nmodel: import:math:no_such", None, ("model", "math", "no_such")),
    (
        "a module that ends the program",
        "data: digits\nmodel: import:leaves_silently:f",
        lambda: Path("leaves_silently.py").write_text("raise SystemExit(0)"),
        ("^bad.yaml:2: model.name import:leaves_silently:f", "SystemExit: 0", "mend"),
    ),
    ("a function that builds no model", "data: digits\nmodel: import:math:hypot", None, ("model", "hypot")),
    # defences that support nothing of what is asked
    (
        "an accountant that does not know the noise",
        DIGITS + "defence: {accountant: prv, client_dp: {noise_multiplier: 1, noise: laplace}}",
        None,
        ("^bad.yaml:3: defence.accountant prv", "laplace"),
    ),
    (
        "noise that single precision would lose",
        DIGITS + "strategy: fedsgd\ndefence: {example_dp: {noise_multiplier: 1, clipping_norm: 1e-23}}",
        None,
        ("example_dp", "clipping_norm 1e-23", "larger clipping_norm"),
    ),
    (
        "a δ that the accountant cannot resolve",
        DIGITS + "defence: {example_dp: {noise_multiplier: 1, delta: 1e-29}}",
        None,
        ("^bad.yaml:3: defence.example_dp.delta is 1e-29", "rdp"),
    ),
    (
        "an ε that no noise reaches",
        DIGITS + "defence: {client_dp: {target_epsilon: 1.0e-9, delta: 1.0e-9}}",
        None,
        ("^bad.yaml:3: defence.client_dp.target_epsilon 1e-09 is not reached",),
    ),
    (
        "a client to be kept who does not exist",
        DIGITS + "cohort: {population: 10}\nadversary: {keep_clients: [0, 999]}",
        None,
        ("^bad.yaml:4: adversary.keep_clients names client 999", "clients 0 to 9; name"),
    ),
    (
        "the client before the first",
        DIGITS + "adversary: {keep_clients: [-1]}",
        None,
        ("adversary.keep_clients", r"\[-1\]|-1", "at least 0"),
    ),
    ("an attack that does not exist", DIGITS + "attacks: [telepathy]", None, ("attacks", "telepathy")),
    ("an audit that does not exist", DIGITS + "audit: [horoscope]", None, ("audit", "horoscope")),
]


@pytest.mark.parametrize(("text", "make", "fragments"), [case[1:] for case in WORLD], ids=[case[0] for case in WORLD])
def test_an_impossible_scenario_is_one_sentence(
    text: str, make: Callable[[], object] | None, fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if make:
        make()
    sentence = refused_run(capsys, text)
    assert "\n" not in sentence
    assert_says(sentence, fragments)


# --- the command line itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["fly"], ("No such command 'fly'", "fedsim --help")),
        (["run"], ("SCENARIO", "fedsim run quickstart")),
        (["run", "quickstart", "--fast"], ("--fast", "fedsim run --help")),
        (["run", "quickstart", "extra"], ("extra",)),
        (["run", "quickstart", "--resume", "runs/x"], ("--resume", "leave")),
        (["run", "--resume", "runs/x", "--set", "rounds=3"], ("--resume", "leave")),
        (["run", "--resume", "nowhere"], ("nowhere", "not the folder of a run")),
        (["check"], ("SCENARIO",)),
        (["report", "nowhere"], ("nowhere", "not the folder of a run")),
        (["epsilon"], ("--sigma", "--target")),
        (["epsilon", "--sigma", "1", "--target", "1"], ("--sigma", "--target")),
        (["epsilon", "--sigma", "one"], ("--sigma", "one")),
        (["epsilon", "--sigma", "-1"], ("--sigma is -1", "at least 0")),
        (["epsilon", "--sigma", "nan"], ("--sigma is nan",)),
        (["epsilon", "--sigma", "1", "--rate", "2"], ("--rate is 2", "at most 1")),
        (["epsilon", "--sigma", "1", "--delta", "0"], ("--delta is 0", "above 0")),
        (["epsilon", "--sigma", "1", "--steps", "0"], ("--steps", "0")),
        (["epsilon", "--target", "0"], ("--target is 0", "from 0.0001")),
        (["epsilon", "--sigma", "1", "--accountant", "magic"], ("--accountant", "magic", "pld")),
        (["epsilon", "--sigma", "1", "--noise", "laplace", "--accountant", "prv"], ("prv", "gaussian")),
        (["epsilon", "--sigma", "inf"], ("--sigma is inf",)),
        (["epsilon", "--sigma", "1", "--delta", "1e-400"], ("--delta is 0",)),
        (["epsilon", "--target", "nan"], ("--target is nan",)),
        (["ledger", "nowhere"], ("no ledger nowhere",)),
        (["status", "nowhere"], ("nowhere", "not the folder of a run")),
        (["logs", "nowhere"], ("nowhere", "not the folder of a run")),
        (["attack", "nowhere"], ("nowhere", "not the folder of a run")),
        (["audit", "no_such_module:f"], ("no_such_module",)),
        (["deploy"], ("Missing command", "fedsim deploy --help")),
        (["deploy", "server", "nowhere"], ("nowhere", "server.toml")),
        (["run", "quickstart", "--out", "a" * 300], ("aaa", "too long", "name another")),
        (["run", "quickstart", "--out", f"{'a' * 300}/b"], ("aaa", "too long", "name another")),
        (["run", "--resume", "a" * 300], ("aaa", "too long", "name another")),
        (["report", "a" * 300], ("aaa", "too long", "name another")),
        (["status", "a" * 300], ("aaa", "too long", "name another")),
        (["ledger", "a" * 300], ("aaa", "too long", "name another")),
        (["new", "a" * 300], ("aaa", "too long", "name another")),
        (["new", "no/such/folder/a.yaml"], ("no/such/folder/a.yaml", "cannot be written")),
    ],
)
def test_a_wrong_command_is_one_sentence(
    arguments: list[str], fragments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, *arguments)
    assert "\n" not in sentence
    assert_says(sentence, fragments)


RUN = "data: digits\nmodel: logistic\nrounds: 1\ncohort: {population: 2}"
DAMAGED = [  # file of a run, what is written over it, the command that reads it
    ("transcript/layout.json", "{}", ["attack", "run", "--attack", "labels"]),
    ("transcript/messages.jsonl", "nonsense\n", ["attack", "run", "--attack", "labels"]),
    ("transcript/round-00001-received.safetensors", "short", ["attack", "run", "--attack", "labels"]),
    ("metrics.jsonl", "nonsense\n", ["report", "run"]),
    ("claims.json", '[{"epsilon": 1}]', ["report", "run"]),
    ("summary.json", "x", ["report", "run"]),
]


@pytest.mark.parametrize(("file", "content", "command"), DAMAGED, ids=[file for file, _, _ in DAMAGED])
def test_a_damaged_run_is_one_sentence(
    file: str, content: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("good.yaml").write_text(RUN)
    assert main(["run", "good.yaml", "--out", "run", "--no-report"]) == 0
    capsys.readouterr()
    Path("run", file).write_text(content)
    sentence = refused(capsys, *command)
    assert "\n" not in sentence
    assert_says(sentence, (re.escape(file), "damaged"))


def test_a_strange_file_in_a_transcript_does_not_stop_a_run() -> None:
    Path("good.yaml").write_text(RUN)
    assert main(["run", "good.yaml", "--out", "run", "--no-report"]) == 0
    Path("run/model.safetensors").unlink()
    Path("run/transcript/round-of-drinks.txt").touch()
    assert main(["run", "--resume", "run", "--no-report"]) == 0


def test_a_file_that_is_no_ledger_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").touch()
    assert "not a ledger" in refused(capsys, "ledger", "empty", before={"empty"})
    assert Path("empty").read_bytes() == b""


def test_there_are_at_least_forty_malformed_scenarios() -> None:
    assert len(FILES) + len(WORLD) >= 40
