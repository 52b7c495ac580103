# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of a scenario: what editors complete field names from, and what error sentences are written from.

A field is looked up in the schema by its path, so whatever is said about it (which values are allowed, which fields a
section has, what a field means) comes from `fedsim.scenario` and is never written a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from fedsim.scenario import Scenario

Node = dict[str, Any]

TAGS = ("source", "kind", "name")
"""A section with one of these fields can be written as that field alone: `data: mnist` for `data: {source: mnist}`."""

_TYPES = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false", "null": "null"}


@cache
def _schema() -> Node:
    return Scenario.model_json_schema()


def resolve(node: Node) -> Node:
    """The node that a `$ref` stands for, with what is said beside the reference."""
    if "$ref" not in node:
        return node
    target: Node = _schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def alternatives(node: Node) -> list[Node]:
    """The nodes of which one must hold, null apart; a node without alternatives is its own."""
    node = resolve(node)
    options: list[Node] = node.get("anyOf") or node.get("oneOf") or []
    if not options:
        return [node]
    return [leaf for option in options if option.get("type") != "null" for leaf in alternatives(option)]


def sections(node: Node) -> list[Node]:
    """The alternatives that are sections (objects with fields)."""
    return [leaf for leaf in alternatives(node) if "properties" in leaf]


def fields(node: Node) -> Node:
    """The fields of a section and their nodes; of several alternatives, all of them."""
    return {name: field for section in sections(node) for name, field in section["properties"].items()}


def tag_of(node: Node) -> str | None:
    """The field that chooses between the alternatives of a section, and that the section can be written as."""
    members = [section["properties"] for section in sections(node)]
    return next((tag for tag in TAGS if members and all(tag in member for member in members)), None)


def values_of(node: Node) -> list[Any]:
    """The values that a field is restricted to; empty if it is not restricted to some."""
    leaves = alternatives(node)
    values = [value for leaf in leaves for value in leaf.get("enum", [leaf["const"]] if "const" in leaf else [])]
    return values if all("enum" in leaf or "const" in leaf for leaf in leaves) else []


def tags(node: Node) -> list[str]:
    """What the tag of a section can be; a pattern (`import:module:function`) is given by its first words."""
    tag = tag_of(node)
    found: list[str] = []
    for section in sections(node) if tag else []:
        field = section["properties"][tag]
        found += values_of(field) or [field["description"].split("`")[1]]
    return found


def with_tag(node: Node, value: Any) -> Node:
    """The alternative of a section that has this tag."""
    tag = tag_of(node)
    for section in sections(node):
        values = values_of(section["properties"][tag]) if tag else []
        if not values or value in values:
            return section
    return {}


def root() -> Node:
    """The scenario itself."""
    return _schema()


def lookup(loc: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], Node]:
    """The path in the file and the schema's node of a location in a pydantic error.

    Pydantic's location also holds the tag of each union it went through (`data.csv.target`), which no file has. Inside
    a plain union (`all`, a number or a list) each alternative reports its own error: there the path ends at the field.
    """
    path: tuple[str | int, ...] = ()
    node = root()
    for element in loc:
        leaves = alternatives(node)
        objects = sections(node)
        if len(leaves) > 1 and not objects:
            return path, node
        if len(objects) > 1:
            node = with_tag(node, element)
        elif isinstance(element, int):
            path, node = (*path, element), resolve(leaves[0].get("items", {}))
        else:
            path, node = (*path, element), fields(node).get(element, {})
    return path, node


def expected(node: Node) -> str:
    """What a value must be, in words: "an integer of at least 1 or null", "one of sgd, adam"."""
    node = resolve(node)
    null = ", or null" if any(option.get("type") == "null" for option in node.get("anyOf", [])) else ""
    if values := values_of(node):
        return (f"one of {', '.join(map(str, values))}" if len(values) > 1 else f"{values[0]}") + null
    if choices := tags(node):
        return f"one of {', '.join(choices)}, or a section with {tag_of(node)} and its fields" + null
    if names := list(fields(node)):
        return f"a section with some of the fields {', '.join(names)}" + null
    return " or ".join(dict.fromkeys(_plain(leaf) for leaf in alternatives(node))) + null


def _plain(node: Node) -> str:
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        items = node.get("items", {})
        item = expected(items) if sections(items) else _plain(resolve(items))
        return f"a list like [a, b], each {item}"
    bounds = [
        f"{words} {node[key]:{',' if isinstance(node[key], int) else 'g'}}" if node[key] != 2**63 else "below 2**63"
        for key, words in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in node
    ]
    pattern = f" that matches {node['pattern']}" if "pattern" in node else ""
    pattern = f" like {node['examples'][0]}" if "examples" in node else pattern
    length = f" of at most {node['maxLength']} characters" if "maxLength" in node else ""
    return " ".join([_TYPES.get(node.get("type", ""), "a value"), *(" and ".join(bounds).split())]) + pattern + length


def json_schema() -> Node:
    """The schema of a scenario file (JSON Schema, draft 2020-12), in which a section can also be written as its tag."""
    schema = copy.deepcopy(_schema())
    for holder, name in list(_places(schema)):
        node = holder[name]
        if not (tag := tag_of(node)):
            continue
        for option in _unions(node):  # the tag decides, so that exactly one alternative can hold
            for member in option.get("oneOf", []):
                target = schema["$defs"][member["$ref"].rsplit("/", 1)[1]]
                target["required"] = sorted({tag, *target.get("required", [])})
        holder[name] = _or_tag(node, tag)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fedsim scenario", **schema}


def _places(schema: Node) -> Iterator[tuple[Node, str]]:
    """Where a node stands that may be a section: a field, or the items of a list."""
    for definition in (schema, *schema["$defs"].values()):
        for name, node in definition.get("properties", {}).items():
            yield (node, "items") if "items" in node else (definition["properties"], name)


def _unions(node: Node) -> list[Node]:
    return [node, *node.get("anyOf", [])]


def _or_tag(node: Node, tag: str) -> Node:
    """The node, or a string that is the tag of one of its alternatives and leaves nothing else to be said."""
    words: list[Node] = []
    for section in sections(node):
        if set(section.get("required", [])) <= {tag}:
            field = section["properties"][tag]
            words.append({key: field[key] for key in ("type", "const", "enum", "pattern") if key in field})
    kept: Node = {key: node[key] for key in ("title", "description", "default") if key in node}
    inner = {key: value for key, value in node.items() if key not in kept}
    return {**kept, "anyOf": [*words, *(inner.get("anyOf") or [inner])]}
