# SPDX-License-Identifier: Apache-2.0
"""From a scenario file to a `Scenario` and back.

A file is named by its path, or by the name of a scenario that comes with fedsim. Fields can be overridden as
`client.epochs=5`. Whatever is wrong is told in one sentence that names the file and line (or the override), the field,
its value, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim import scenario_errors as errors
from fedsim import scenario_schema as schema
from fedsim import scenario_yaml
from fedsim.errors import FedsimError, ScenarioError
from fedsim.scenario import FedSgdStrategy, Scenario
from fedsim.scenario_schema import json_schema
from fedsim.scenario_yaml import FieldPath

__all__ = [
    "dump_scenario",
    "json_schema",
    "list_scenarios",
    "load_scenario",
    "located",
    "parse_scenario",
    "scenario_names",
]


def load_scenario(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of that name or path, with `field=value` overrides applied in their order.

    A name (`quickstart`) is looked for among the scenarios that come with fedsim, and only then as a file.
    """
    return parse_scenario(*_read(name_or_path), overrides)


def parse_scenario(text: str, source: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a YAML text; `source` names it in errors."""
    document, places = _overridden(text, source, overrides)
    try:
        return Scenario.model_validate(document, strict=True)
    except ValidationError as error:
        raise ScenarioError(errors.together(errors.sentences(error, places))) from None


def located(error: FedsimError, name_or_path: str | Path, overrides: Sequence[str] = ()) -> FedsimError:
    """The same error with the place of the field that its sentence names, where it names one.

    What is only found with the data at hand (more clients than rows) is told by rooms that know no file.
    """
    _, places = _overridden(*_read(name_or_path), overrides)
    place = errors.place_of_field(str(error), places)
    return type(error)(f"{place}: {error}") if place else error


def _read(name_or_path: str | Path) -> tuple[str, str]:
    """The text of a scenario, and what to call it in errors."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in scenario_names():
        return resources.files("fedsim.scenarios").joinpath(f"{name}.yaml").read_text("utf-8"), f"{name}.yaml"
    try:
        there = path.exists()
    except (OSError, ValueError):  # a name too long for the system, or with a zero byte
        there = False
    if not there:
        raise ScenarioError(
            f"there is no file {errors.shown(name)} and no scenario of that name"
            f"{errors.nearest(name, scenario_names())}; the scenarios are {', '.join(scenario_names())}"
        )
    return scenario_yaml.read_text(path), str(path)


def _overridden(text: str, source: str, overrides: Sequence[str]) -> tuple[Any, dict[FieldPath, str]]:
    """The document as it is meant, and the place of each of its fields."""
    document, lines = scenario_yaml.parse(text, source)
    if document is None:
        raise ScenarioError(f"{source} is empty; write a commented scenario to start from with `fedsim new`")
    places = {path: f"{source}:{line}" for path, line in lines.items()}
    if isinstance(document, dict):
        for override in overrides:
            _override(document, places, override)
    return document, places


def dump_scenario(scenario: Scenario) -> str:
    """YAML with every field of the scenario, defaults too; it loads back as an equal scenario.

    Fields that mean nothing beside others (epochs beside steps, local work beside fedsgd) are left out, because a
    scenario that names them is refused.
    """
    document = scenario.model_dump(mode="json")
    client = document["client"]
    if isinstance(scenario.strategy, FedSgdStrategy):
        document["client"] = {field: client[field] for field in ("batch_size", "shuffle")}
    elif scenario.client.steps is not None:
        del client["epochs"]
    return scenario_yaml.dump(document)


def scenario_names() -> list[str]:
    """The names of the scenarios that come with fedsim."""
    files = resources.files("fedsim.scenarios").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def list_scenarios() -> list[tuple[str, str]]:
    """The scenarios that come with fedsim: (name, the question that it answers)."""
    return [(name, load_scenario(name).question) for name in scenario_names()]


# --- overrides ------------------------------------------------------------------------------------------------------


def _override(document: dict[str, Any], places: dict[FieldPath, str], text: str) -> None:
    """Set one field of the document, `client.epochs=5`; sections on the way are made where they are missing."""
    place = f"{errors.SET}{text}"
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise ScenarioError(f"{place}: an override is FIELD=VALUE, for example client.epochs=5")
    if not value_text.strip():
        raise ScenarioError(f"{place}: {name} has no value; write null for none")
    value, _ = scenario_yaml.parse(value_text, place, numbered=False)
    section = document
    for depth in range(1, len(path)):
        section = _enter(section, path[:depth], places, place)
    section[path[-1]] = value
    for field in [field for field in places if field[: len(path)] == path]:
        del places[field]
    places[path] = place


def _enter(section: dict[str, Any], path: FieldPath, places: dict[FieldPath, str], place: str) -> dict[str, Any]:
    """The section at the end of the path: a missing one is made, one written as its tag (`data: mnist`) is opened."""
    key = str(path[-1])
    inner = section.get(key)
    node = schema.lookup(path)[1]
    tag = schema.tag_of(node)
    if inner is None:
        # A section that chooses between kinds starts as the kind that it has by default.
        default = node.get("default")
        inner = {tag: default[tag]} if tag and isinstance(default, Mapping) else {}
        places[path] = place
    elif isinstance(inner, str) and tag:
        inner = {tag: inner}
    if not isinstance(inner, dict):
        raise ScenarioError(f"{place}: {errors.dotted(path)} is {errors.shown(inner)} and has no fields of its own")
    section[key] = inner
    return inner
