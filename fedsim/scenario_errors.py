# SPDX-License-Identifier: Apache-2.0
"""What pydantic found wrong in a scenario, as sentences: the place, the field, the value, and what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedsim import scenario_schema as schema
from fedsim.scenario_yaml import FieldPath

SET = "--set "
"""A place that begins with this is an override, else it is `file:line`."""


def sentences(error: ValidationError, places: Mapping[FieldPath, str]) -> list[str]:
    """One sentence for each thing that is wrong, each beginning with its place."""
    found: dict[FieldPath, str] = {}
    for detail in error.errors(include_url=False):
        path, node = schema.lookup(detail["loc"])
        if path not in found:  # the alternatives of a union each report an error of the same field
            found[path] = _sentence(detail, path, node, places)
    return list(found.values())


def together(found: list[str]) -> str:
    """The first sentence, how many more there are, and those one to a line."""
    if len(found) == 1:
        return found[0]
    return "\n  ".join([f"{found[0]} (and {len(found) - 1} more):", *found[1:]])


def dotted(path: Iterable[str | int]) -> str:
    """`client.epochs`, `model.hidden[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")


def shown(value: Any) -> str:
    """A value as it could stand in the file, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return cut(text, 60)


def cut(text: str, length: int) -> str:
    """The text, or its beginning and dots where it is longer."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def nearest(word: str, words: Iterable[str]) -> str:
    """A question, in brackets, that offers the most similar word, where there is one."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def place_of(path: FieldPath, places: Mapping[FieldPath, str]) -> str:
    """Where the field is, or else the section around it."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, "scenario")


def _sentence(detail: ErrorDetails, path: FieldPath, node: schema.Node, places: Mapping[FieldPath, str]) -> str:
    kind, value = detail["type"], detail["input"]
    place, field = place_of(path, places), dotted(path)
    if kind == "extra_forbidden":
        return f"{place}: {_unknown(detail['loc'], path, value)}"
    if kind == "missing":
        return f"{place}: {field} is missing; it is {_meaning(node)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"{place}: {_wrong_tag(path, node, value)}"
    if kind in ("value_error", "assertion_error"):
        message = str(detail["ctx"]["error"])
        prefix = f"{field}: " if field else ""
        return f"{_place_of_message(message, path, places)}: {prefix}{message}"
    if not path:
        return f"{place}: a scenario is a mapping of fields to values, not {shown(value)}"
    if value is None and schema.sections(node):
        return f"{place}: {field} is empty; leave it out, or give it as {schema.expected(node)}"
    hint = nearest(value, map(str, schema.values_of(node))) if isinstance(value, str) else ""
    finite = "finite: " if kind == "finite_number" else ""
    return f"{place}: {field} is {shown(value)}{hint}; it must be {finite}{schema.expected(node)}"


def _meaning(node: schema.Node) -> str:
    meaning = str(node.get("description", "")).rstrip(".")
    return f"{meaning[:1].lower()}{meaning[1:]} ({schema.expected(node)})" if meaning else schema.expected(node)


def _unknown(loc: tuple[int | str, ...], path: FieldPath, value: Any) -> str:
    """An unknown field: the most similar one, and those that exist."""
    _, section = schema.lookup(loc[:-1])
    names = list(schema.fields(section))
    kind = f" ({loc[-2]})" if len(loc) > 1 and loc[-2] != (path[-2] if len(path) > 1 else None) else ""
    owner = f"{dotted(path[:-1])}{kind}" if len(path) > 1 else "a scenario"
    return (
        f"{owner} has no field {path[-1]}{nearest(str(path[-1]), names)}, here {shown(value)}; "
        f"its fields are {', '.join(names)}"
    )


def _wrong_tag(path: FieldPath, node: schema.Node, value: Any) -> str:
    """A section that is none of its kinds, or does not say which."""
    tag, choices = str(schema.tag_of(node)), schema.tags(node)
    allowed = f"one of {', '.join(choices)}"
    if isinstance(value, dict) and tag not in value:
        return f"{dotted((*path, tag))} is missing; it must be {allowed}"
    given = value[tag] if isinstance(value, dict) else value
    return f"{dotted((*path, tag))} is {shown(given)}{nearest(str(given), choices)}; it must be {allowed}"


def _place_of_message(message: str, path: FieldPath, places: Mapping[FieldPath, str]) -> str:
    """A rule about several fields names them in its message: the place of an override among them, or of the first."""
    found = [places[field] for field in _named(message, path) if field in places]
    return next((place for place in found if place.startswith(SET)), found[0] if found else place_of(path, places))


def place_of_field(message: str, places: Mapping[FieldPath, str]) -> str | None:
    """The place of the first `section.field` that a message names, or of the section that it begins with."""
    for field in _named(message, ()):
        if len(field) > 1 and field in places:
            return places[field]
        if len(field) == 2 and field[:1] in places and schema.tag_of(schema.lookup(field[:1])[1]) == field[1]:
            return places[field[:1]]  # `model: cnn` is short for model.name
    first = _named(message.split(" ", 1)[0].rstrip(":"), ())
    return places.get(first[0]) if len(first) == 1 else None


def default_field(message: str) -> str | None:
    """The first `section.field` of a scenario that a message names."""
    known = (field for field in _named(message, ()) if len(field) > 1 and schema.lookup(field)[1])
    return next((dotted(field) for field in known), None)


def _named(message: str, path: FieldPath) -> list[FieldPath]:
    """Whatever in a message could be a field of the section at the path."""
    return [(*path, *word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message)]
