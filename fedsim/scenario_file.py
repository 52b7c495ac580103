# SPDX-License-Identifier: Apache-2.0
"""From a scenario file to a `Scenario` and back.

A file is named by its path, or by the name of a scenario that comes with fedsim. Fields can be overridden as
`client.epochs=5`. Whatever is wrong is told in one sentence that names the file and line (or the override), the field,
its value, and what is allowed.
"""

from __future__ import annotations

import logging
import re
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
    document, places, notes = _overridden(text, source, overrides)
    for note in notes:
        logging.getLogger("fedsim").warning(note)
    try:
        return Scenario.model_validate(document, strict=True)
    except ValidationError as error:
        raise ScenarioError(errors.together(errors.sentences(error, places))) from None


def located(error: FedsimError, name_or_path: str | Path, overrides: Sequence[str] = ()) -> FedsimError:
    """The same error with the place of the field that its sentence names, where it names one.

    What is only found with the data at hand (more clients than rows) is told by rooms that know no file.
    """
    text, source = _read(name_or_path)
    _, places, _ = _overridden(text, source, overrides)
    place = errors.place_of_field(str(error), places)
    if place is None and (field := errors.default_field(str(error))):
        place = f"{source} ({field} is not in it, this is its default)"
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


def _overridden(text: str, source: str, overrides: Sequence[str]) -> tuple[Any, dict[FieldPath, str], list[str]]:
    """The document as it is meant, the place of each of its fields, and what the user should know of the overrides."""
    document, lines = scenario_yaml.parse(text, source)
    if document is None:
        raise ScenarioError(f"{source} is empty; write a commented scenario to start from with `fedsim new`")
    places = {path: f"{source}:{line}" for path, line in lines.items()}
    notes: list[str] = []
    if isinstance(document, dict):
        for override in overrides:
            notes += _override(document, places, override)
        document.setdefault("name", name_from(source))
    return document, places, notes


def name_from(file: str | Path) -> str:
    """The name of a scenario that names none: that of its file, as far as it can be one."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).strip("-._")[:80] or "scenario"


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


def _override(document: dict[str, Any], places: dict[FieldPath, str], text: str) -> list[str]:
    """Set one field of the document, `client.epochs=5`; sections on the way are made where they are missing.

    Where this makes a section one of another kind, the fields that this kind does not have are left out, and named.
    """
    place = f"{errors.SET}{errors.cut(text, 120) if text.strip() else repr(text)}"
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise ScenarioError(f"{place}: an override is FIELD=VALUE, for example client.epochs=5")
    if not value_text.strip():
        raise ScenarioError(f"{place}: {name} has no value; write null for none")
    value, inner = scenario_yaml.parse(value_text, place, numbered=False)
    section = document
    for depth in range(1, len(path)):
        section = _enter(section, path[:depth], places, place)
    changed = section.get(path[-1]) != value
    section[path[-1]] = value
    dropped = _drop_strangers(section, path, value) if changed else []
    for field in [field for field in places if field and field[:-1] == path[:-1] and field[-1] in dropped]:
        del places[field]
    for field in [field for field in places if field[: len(path)] == path]:
        del places[field]
    places |= {(*path, *field): place for field in inner} | {path: place}
    return [
        f"{place}: {errors.dotted((*path[:-1], field))} is left out, {value} has no such field" for field in dropped
    ]


def _drop_strangers(section: dict[str, Any], path: tuple[str, ...], kind: Any) -> list[str]:
    """Leave out the fields that a section, now of another kind, does not have; their names."""
    node = schema.lookup(path[:-1])[1] if len(path) > 1 else {}
    if schema.tag_of(node) != path[-1] or len(schema.sections(node)) < 2:
        return []
    known = schema.with_tag(node, kind).get("properties", section)
    strangers = [field for field in section if field not in known]
    for field in strangers:
        del section[field]
    return strangers


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
        whole = f"; give the whole list, '{key}=[...]'" if isinstance(inner, (list, tuple)) else ""
        raise ScenarioError(
            f"{place}: {errors.dotted(path)} is {errors.shown(inner)} and has no fields of its own{whole}"
        )
    section[key] = inner
    return inner
