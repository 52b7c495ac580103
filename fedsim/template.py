# SPDX-License-Identifier: Apache-2.0
"""A commented scenario to start from, written from the schema: every field, its meaning, and its default."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from fedsim import scenario_schema as schema
from fedsim import scenario_yaml
from fedsim.scenario import Scenario

_WIDTH = 116
_HEAD = """\
# A scenario for fedsim, with every field at its default: change what you need, delete what you do not.
#   fedsim check {file}     what would run, how long it may take, which privacy it will have spent
#   fedsim run {file}       run it
# A section that has a source, kind or name can be written as that alone: `data: digits`.
# For completion in an editor: `fedsim schema > scenario.schema.json`, and this as the first line of the file:
#   # yaml-language-server: $schema=scenario.schema.json
"""


def template(name: str, file: str) -> str:
    """A scenario file called `name` that shows all fields, and loads as the default scenario."""
    defaults = {**Scenario().model_dump(mode="json"), "name": name}
    lines = [line for field, node in schema.fields(schema.root()).items() for line in _field(field, node, defaults, 0)]
    return _HEAD.format(file=file) + "\n".join(lines) + "\n"


def _field(name: str, node: schema.Node, values: dict[str, Any], depth: int) -> Iterator[str]:
    """A field: what it means, what it can be, and its value; a section with its own fields below it."""
    value, pad = values[name], "  " * depth
    if depth == 0:
        yield ""
    yield from _comment(_about(node), pad)
    members = schema.sections(node)
    if not members:
        yield f"{pad}{name}: {_flow(value)}"
        items, said = schema.resolve(node).get("items", {}), set[str]()
        for member in schema.sections(items):
            yield from _other(member, schema.tag_of(items), pad, "- ", said)
        return
    if value is None:
        yield f"{pad}{name}: null"
        said = set()
        for member in members:
            yield from _other(member, schema.tag_of(node), pad, f"{name}: ", said)
        return
    tag = schema.tag_of(node)
    chosen = schema.with_tag(node, value[tag]) if tag else members[0]
    yield f"{pad}{name}:"
    for inner in _tag_first(chosen["properties"], tag):
        yield from _field(inner, chosen["properties"][inner], value, depth + 1)
    said = {_meaning(*field) for field in chosen["properties"].items()}
    for member in members:
        if member is not chosen and member.get("title") != chosen.get("title"):
            yield from _other(member, tag, pad + "  ", "or: ", said)


def _tag_first(names: dict[str, Any], tag: str | None) -> list[str]:
    return sorted(names, key=lambda name: name != tag)


def _about(node: schema.Node) -> str:
    """The description of a field, and what its value can be where the description cannot be expected to say so."""
    about = str(schema.resolve(node).get("description", ""))
    if schema.sections(node):
        return about
    return f"{about} [{schema.expected(node)}]"


def _meaning(name: str, node: schema.Node) -> str:
    return f"{name}: {_about(node)}"


def _other(member: schema.Node, tag: str | None, pad: str, label: str, said: set[str]) -> Iterator[str]:
    """An alternative that is not chosen: its fields in one line, what it is, and what was not yet said of them."""
    parts = []
    for name in _tag_first(member["properties"], tag):
        field = member["properties"][name]
        value = schema.tags(member)[0] if name == tag else field.get("default", "...")
        parts.append(f"{name}: {_flow(value)}")
    kind = member["properties"].get(tag, {}) if len(schema.tags(member)) < 2 else {}
    about = f"{member.get('description', '')} {kind.get('description', '')}"
    yield from _comment(f"{label}{{{', '.join(parts)}}} {about}", pad, "    ")
    for name, field in member["properties"].items():
        meaning = _meaning(name, field)
        if meaning not in said and (name != tag or len(schema.tags(member)) > 1):
            said.add(meaning)
            yield from _comment(meaning, pad, " " * 12, " " * 8)
        for inner in schema.sections(field):
            yield from _other(inner, schema.tag_of(field), pad, f"{name}: ", said)


def _comment(text: str, pad: str, hang: str = "", first: str = "") -> Iterator[str]:
    words, width = " ".join(text.split()), _WIDTH - len(pad)
    for line in textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False
    ):
        yield f"{pad}# {line}"


def _flow(value: Any) -> str:
    """A plain value or list as it stands in a file."""
    return scenario_yaml.dump([value]).strip()[1:-1]
