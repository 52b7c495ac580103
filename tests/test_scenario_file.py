# SPDX-License-Identifier: Apache-2.0
"""Loading, overriding, writing and describing scenarios. What is wrong with a file is the subject of test_bad_input."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim import scenario_schema, scenario_yaml
from fedsim.errors import DataError, ScenarioError
from fedsim.scenario import EmbeddedData, FedSgdStrategy, IidPartition, MlpModel, Scenario
from fedsim.scenario_file import (
    dump_scenario,
    json_schema,
    list_scenarios,
    load_scenario,
    located,
    parse_scenario,
    scenario_names,
)
from fedsim.template import template

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = {
    "quickstart",
    "fedsgd",
    "fedavg-dirichlet",
    "dp-fedavg-clients",
    "dp-sgd-examples",
    "tabular",
    "million-clients",
}


# --- the scenarios that come with fedsim ----------------------------------------------------------------------------


def test_the_promised_scenarios_are_there() -> None:
    assert set(scenario_names()) >= REQUIRED
    assert [name for name, _ in list_scenarios()] == sorted(scenario_names())


@pytest.mark.parametrize("name", scenario_names())
def test_a_packaged_scenario_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # a folder that happens to have the same name is not in the way
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.question.endswith("?")


@pytest.mark.parametrize("name", scenario_names())
def test_a_packaged_scenario_opens_with_what_it_is_for(name: str) -> None:
    text = (ROOT / "scenarios" / f"{name}.yaml").read_text()
    head = text[: text.index("\nname:")]
    assert head.startswith("# yaml-language-server: $schema=scenario.schema.json\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "?\n" in head
    assert "# Look at:" in head
    assert "# Try next:" in head


def _suggestions() -> list[str]:
    found = []
    for name in scenario_names():
        text = (ROOT / "scenarios" / f"{name}.yaml").read_text()
        found += re.findall(
            r"^#   (fedsim (?:run|check|audit) .*?)(?:  .*)?$", text.replace("\n#       --set", " --set"), re.M
        )
    return found


@pytest.mark.parametrize("command", _suggestions())
def test_what_a_scenario_suggests_to_try_is_a_scenario(command: str) -> None:
    _, _, name, *rest = shlex.split(command)
    overrides = [
        f"audit=[{value}]" if option == "--audit" else value
        for option, value in zip(rest[::2], rest[1::2], strict=True)
    ]
    assert set(rest[::2]) <= {"--set", "--audit"}
    assert load_scenario(name, overrides) != load_scenario(name)


def test_each_scenario_suggests_something() -> None:
    named = [shlex.split(command)[2] for command in _suggestions()]
    assert all(named.count(name) >= 2 for name in scenario_names())


# --- overrides ------------------------------------------------------------------------------------------------------

BASE = "name: base\ndata: mnist\nclient:\n  epochs: 2\n"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("client.epochs=5", "client.epochs", 5),
        ("client.learning_rate=1e-3", "client.learning_rate", 1e-3),
        ("client.batch_size=null", "client.batch_size", None),
        ("client.shuffle=false", "client.shuffle", False),
        ("data=digits", "data.source", "digits"),
        ("data.limit=100", "data.limit", 100),
        ("data.limit=100", "data.source", "mnist"),
        ("partition.examples_per_client=7", "partition.kind", "iid"),
        ("partition.kind=dirichlet", "partition.alpha", 0.5),
        ("model.hidden=[64, 32]", "model.hidden", (64, 32)),
        ("model=cnn", "model.variant", "small"),
        ("model=import:package.module:build", "model.name", "import:package.module:build"),
        ("defence.client_dp.noise_multiplier=1.5", "defence.client_dp.noise_multiplier", 1.5),
        ("defence.client_dp={target_epsilon: 2}", "defence.client_dp.target_epsilon", 2.0),
        ("defence.compression=sign", "defence.compression.kind", "sign"),
        ("cohort.population=1_000_000", "cohort.population", 1_000_000),
        ("question=a = b?", "question", "a = b?"),
        ("adversary.keep_rounds=[1, 5]", "adversary.keep_rounds", (1, 5)),
        ("engine=inline", "engine.kind", "inline"),
        (" rounds = 3 ", "rounds", 3),
    ],
)
def test_an_override_sets_one_field(override: str, path: str, value: object) -> None:
    found: object = parse_scenario(BASE, "base.yaml", [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_overrides_apply_in_their_order_and_leave_the_rest() -> None:
    scenario = parse_scenario(BASE, "base.yaml", ["data=csv", "data=digits", "data.limit=10", "client.momentum=0.9"])
    assert scenario.data == EmbeddedData(source="digits", limit=10)
    assert (scenario.client.epochs, scenario.client.momentum) == (2, 0.9)


def test_an_override_can_take_a_defence_away() -> None:
    scenario = load_scenario("dp-fedavg-clients", ["defence.client_dp=null"])
    assert scenario.defence.client_dp is None


# --- YAML -----------------------------------------------------------------------------------------------------------


def test_scalars_are_what_they_look_like() -> None:
    text = "a: 1e-5\nb: no\nc: 2020-01-01\nd: 010\ne: 1:30\nf: 0x10\ng: ~\nh: true\ni: 1_000\nj: -.5\n"
    value, lines = scenario_yaml.parse(text, "f")
    expected = {
        "a": 1e-5,
        "b": "no",
        "c": "2020-01-01",
        "d": 10,
        "e": "1:30",
        "f": 16,
        "g": None,
        "h": True,
        "i": 1000,
        "j": -0.5,
    }
    assert value == expected
    assert [type(value[key]) for key in expected] == [type(item) for item in expected.values()]
    assert [lines[(key,)] for key in expected] == list(range(1, 11))


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@settings(deadline=None)
@given(
    st.dictionaries(st.text(), st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
)
def test_what_is_dumped_parses_as_the_same_value(value: dict[str, object]) -> None:
    parsed, _ = scenario_yaml.parse(scenario_yaml.dump(value), "dumped") if value else ({}, {})
    assert json.dumps(parsed) == json.dumps(value)  # JSON: a list and a tuple are the same


def _load_or_sentence(text: str) -> Scenario | str:
    try:
        return parse_scenario(text, "any.yaml")
    except ScenarioError as error:
        return str(error)


@settings(deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_a_scenario_or_one_sentence(text: str) -> None:
    found = _load_or_sentence(text)
    assert isinstance(found, Scenario) or found.startswith("any.yaml")


@settings(deadline=None)
@given(st.sampled_from(sorted(scenario_schema.root()["properties"])), st.recursive(_LEAVES, st.lists), st.booleans())
def test_any_value_of_a_field_is_accepted_or_told_with_its_line(field: str, value: object, nested: bool) -> None:
    inner = list(scenario_schema.fields(scenario_schema.root()["properties"][field]))
    document = {field: {inner[0]: value}} if nested and inner else {field: value}
    found = _load_or_sentence(scenario_yaml.dump(document))
    if isinstance(found, Scenario):
        assert parse_scenario(dump_scenario(found), "dumped.yaml") == found
    else:
        assert re.match(rf"any\.yaml:\d+: .*{field}", found, re.S)


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenario_names())
@pytest.mark.parametrize(
    "override", [None, "client.batch_size=null", "seed=123", "name='1e-5'", "question='no: \"x\" #'"]
)
def test_a_scenario_is_dumped_whole_and_loads_back_equal(name: str, override: str | None) -> None:
    scenario = load_scenario(name, [override] if override else [])
    text = dump_scenario(scenario)
    assert parse_scenario(text, "dumped.yaml") == scenario
    assert set(yaml.safe_load(text)) == set(Scenario.model_fields)


def test_fields_that_exclude_each_other_are_not_dumped_together() -> None:
    for text in ("client: {steps: 3}", "strategy: fedsgd\nclient: {batch_size: 5}"):
        scenario = parse_scenario(text, "f")
        assert parse_scenario(dump_scenario(scenario), "dumped.yaml") == scenario
    assert isinstance(scenario.strategy, FedSgdStrategy)


def test_the_template_shows_every_field_and_loads_as_the_defaults() -> None:
    text = template("mine", "mine.yaml")
    assert parse_scenario(text, "mine.yaml") == Scenario(name="mine")
    words = " ".join(line.strip(" #") for line in text.splitlines())
    definitions = scenario_schema.root()["$defs"]
    for definition in definitions.values():
        for name, field in definition.get("properties", {}).items():
            assert re.search(rf"\b{name}: ", words), name
            assert " ".join(field.get("description", "").split()) in words, name
    assert "one of poisson, shuffle" in words
    assert "resnet18" in words
    for field in scenario_schema.root()["properties"].values():
        assert " ".join(field["description"].split()) in words
    assert max(map(len, text.splitlines())) <= 120


# --- the JSON schema ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    return jsonschema.Draft202012Validator(schema)


def _as_json(text: str) -> object:
    return json.loads(json.dumps(scenario_yaml.parse(text, "f")[0]))


@pytest.mark.parametrize("name", scenario_names())
def test_packaged_scenarios_follow_the_schema(name: str, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(_as_json((ROOT / "scenarios" / f"{name}.yaml").read_text()))
    validator.validate(_as_json(dump_scenario(load_scenario(name))))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("data: mnist", True),
        ("data: {source: mnist, limit: 10}", True),
        ("data: csv", False),  # path and target are missing
        ("data: nothing", False),
        ("data: {source: digits, path: x}", False),
        ("partition: dirichlet", True),
        ("partition: {kind: dirichlet, alpha: 0}", False),
        ("partition: {examples_per_client: 5}", False),
        ("model: resnet18", True),
        ("model: {name: resnet8, norm: batch}", True),
        ("model: import:a.b:c", True),
        ("model: import:a", False),
        ("strategy: fedsgd", True),
        ("engine: inline", True),
        ("engine: {threads: 2}", True),
        ("defence: {compression: sign}", True),
        ("defence: {compression: {kind: prune, keep: 0.5}}", True),
        ("defence: {compression: {keep: 0.5}}", False),
        ("defence: {compression: null}", True),
        ("adversary: {keep_rounds: [1, 2]}", True),
        ("adversary: {keep_rounds: some}", False),
        ("rounds: 0", False),
        ("epochs: 3", False),
    ],
)
def test_schema_and_scenario_agree(text: str, good: bool, validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid(_as_json(text)) is good
    if good:
        parse_scenario(text, "f")
    else:
        with pytest.raises(ScenarioError):
            parse_scenario(text, "f")


def test_every_field_of_the_schema_is_described() -> None:
    schema = json_schema()
    for owner in (schema, *schema["$defs"].values()):
        for name, field in owner.get("properties", {}).items():
            assert field.get("description"), f"{owner.get('title')}.{name}"


def test_the_committed_schema_is_the_current_one() -> None:
    committed = json.loads((ROOT / "scenarios" / "scenario.schema.json").read_text())
    assert committed == json_schema(), "run: fedsim schema > scenarios/scenario.schema.json"


def test_the_default_scenario_is_what_the_readme_of_the_schema_says() -> None:
    scenario = parse_scenario("name: empty", "f")
    assert scenario == Scenario(name="empty")
    assert (scenario.data, scenario.partition, scenario.model) == (
        EmbeddedData(source="mnist"),
        IidPartition(),
        MlpModel(name="mlp"),
    )


def test_a_file_without_a_name_has_that_of_its_file(tmp_path):
    file = tmp_path / "my first try.yaml"
    file.write_text("data: digits\n")
    assert load_scenario(file).name == "my-first-try"
    assert load_scenario(file, ["name=other"]).name == "other"


def test_an_override_that_changes_the_kind_leaves_out_the_fields_of_the_old_one(caplog):
    text = "data: digits\npartition:\n  kind: shards\n  shards_per_client: 3\nmodel: {name: mlp, hidden: [9]}\n"
    scenario = parse_scenario(text, "x.yaml", ["partition.kind=dirichlet", "partition.alpha=0.2", "model.name=cnn"])
    assert (scenario.partition.kind, scenario.partition.alpha, scenario.model.name) == ("dirichlet", 0.2, "cnn")
    assert [record.message for record in caplog.records] == [
        "--set partition.kind=dirichlet: partition.shards_per_client is left out, dirichlet has no such field",
        "--set model.name=cnn: model.hidden is left out, cnn has no such field",
    ]
    with pytest.raises(ScenarioError, match=r"partition\.kind is \"dirichle\""):
        parse_scenario(text, "x.yaml", ["partition.kind=dirichle"])


def test_an_error_about_a_default_says_that_it_is_one(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("data: digits\n")
    error = located(DataError("cohort.population 20 is more than the 3 clients"), file)
    assert str(error).startswith(f"{file} (cohort.population is not in it, this is its default): cohort.population 20")


def test_a_section_written_as_its_name_alone_is_the_place_of_that_name() -> None:
    error = DataError("model.name import:nowhere:net: there is no module nowhere")
    override = "model=import:nowhere:net"
    assert str(located(error, "quickstart", [override])).startswith(f"--set {override}: model.name")


def test_a_field_of_a_list_is_answered_with_the_way_to_give_the_list() -> None:
    with pytest.raises(ScenarioError, match=r"give the whole list, 'attacks=\["):
        load_scenario("invert-images", ["attacks.0.observations=1"])


def test_a_field_of_a_section_that_an_override_gives_whole_is_found_in_the_override():
    override = "cohort={population: 100000}"
    error = DataError("cohort.population 100,000 is more than the rows")
    assert str(located(error, "quickstart", [override])).startswith(f"--set {override}: cohort.population")
