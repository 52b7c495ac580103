# SPDX-License-Identifier: Apache-2.0
"""Scenarios drawn from the schema: fields that are added to it are fuzzed without being asked.

A case is a small scenario that runs, changed in a few places. Each new value is drawn from the field's own node of the
schema: what it allows, its bounds and just beyond, numbers that break arithmetic, other types, strange texts. Some
cases are changed as text, too: in ways that YAML allows and a scenario does not.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from fedsim import scenario_schema as schema

BASE: dict[str, Any] = {
    "name": "fuzz",
    "data": {"source": "digits"},
    "model": {"name": "logistic"},
    "rounds": 1,
    "cohort": {"population": 4},
}
"""What every case is made from; warm_up() reads it as fuzz-base.yaml."""

BASES: tuple[dict[str, Any], ...] = (
    {},
    {"data": {"source": "mnist", "limit": 200}, "model": {"name": "mlp", "hidden": [16]}},
    {"data": {"source": "breast_cancer"}, "defence": {"example_dp": {"noise_multiplier": 1.0}}},
    {"defence": {"client_dp": {"noise_multiplier": 1.0}, "secure_aggregation": True}},
    {"strategy": {"name": "fedsgd"}, "attacks": ["labels"]},
    {"data": {"source": "descriptions", "length": 8}, "model": {"name": "transformer", "dim": 8, "layers": 1}},
    {"model": {"name": "mlp"}, "adversary": {"active": {"kind": "imprint"}}, "attacks": ["imprint"]},
    {"partition": {"kind": "dirichlet", "alpha": 0.5}, "cohort": {"population": 4, "size": 2}},
    {"audit": [{"kind": "game", "trials": 20}], "partition": {"examples_per_client": 5}},
)  # fmt: skip

TEXTS = (
    "", " ", "x", "mnist", "nan", "null", "yes", "012", "a\x00b", "a\x1b[2Jb", "\u202egnp.exe", "\u2066a\u2069", "ÄÖ ü",
    "日本語", "🙂", "x" * 300, "../../etc/passwd", "/dev/zero", "/dev/null", "~", "a\nb", "a\r\nb", "\ufeff", "\u0085",
    "%s%n{0}{x}",
    "[red]x[/red]", "<script>alert(1)</script>", "import:os:getcwd", "import:os.path:join", "import:builtins:exit",
    "$HOME", "`id`", "'; --", "\ud800",
)  # fmt: skip
INTEGERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 10, 16, 20, 64, 100, 999, 1000, 4096, 10**5, 10**6, 10**7, 10**9, 2**31 - 1, 2**31, 2**32,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400, -1, -(2**63), -(10**30),
)  # fmt: skip
NUMBERS = (
    0.0, -0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0, 1.5, 2.0, 10.0, 100.0, 1e3, 1e6, 1e12, 1e30, 1e38, 1e39, 1e154,
    1e300, 1e308, 1.7976931348623157e308, 1e-3, 1e-5, 1e-9, 1e-16, 1e-30, 1e-45, 1e-100, 1e-154, 1e-300,
    2.2250738585072014e-308, 5e-324,
    1 - 2**-53, 1 + 2**-52, -1.0, -1e308, -5e-324,
)  # fmt: skip
NOT_FINITE = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Case:
    """A scenario file, overrides, and what is known of them."""

    text: str
    overrides: tuple[str, ...]
    garbage: str | None
    """Why it must be refused; None where nothing is known."""


def case(rng: Random) -> Case:
    """One case."""
    document = copy.deepcopy(BASE) | copy.deepcopy(rng.choice(BASES))
    overrides: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        place = rng.choice(places())
        _at(document, place, rng)
        _put(document, overrides, place.path, drawn(place.node, rng), rng)
    garbage = None
    if rng.random() < 0.3:
        place = rng.choice(places())
        value, garbage = _garbage(place.node, rng)
        if garbage:
            _at(document, place, rng)
            _put(document, overrides, place.path, value, rng, by_override=bool(overrides))
            garbage = f"{'.'.join(place.path)}: {garbage}"
    text = _yaml(document)
    if rng.random() < 0.15:
        text, trick = rng.choice(TRICKS)(text, rng)
        garbage = garbage or trick
    return Case(text, tuple(overrides), garbage)


def _yaml(value: Any) -> str:
    """Flow style: JSON, with the numbers that only YAML has."""
    return (
        json.dumps(value, ensure_ascii=True)
        .replace("-Infinity", "-.inf")
        .replace("Infinity", ".inf")
        .replace("NaN", ".nan")
    )


def _put(
    document: dict[str, Any],
    overrides: list[str],
    path: tuple[str, ...],
    value: Any,
    rng: Random,
    by_override: bool = False,
) -> None:
    """Set a field, in the file or by --set, which is read after it."""
    if by_override or rng.random() < 0.5:
        overrides.append(f"{'.'.join(path)}={_yaml(value)}")
        return
    for name in path[:-1]:
        inner = document.setdefault(name, {})
        if isinstance(inner, str):
            inner = document[name] = {schema.tag_of(schema.lookup(path[:1])[1]) or "kind": inner}
        if not isinstance(inner, dict):
            inner = document[name] = {}
        document = inner
    document[path[-1]] = value


# --- values of a field ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A field of one kind of a section."""

    path: tuple[str, ...]
    node: schema.Node
    kinds: tuple[tuple[tuple[str, ...], str, Any], ...]
    """The sections around it that are one kind of several: their paths, the names of their tags, and the values."""


@cache
def places() -> tuple[Place, ...]:
    """Every field of every kind of every section."""
    return tuple(_walk(schema.root(), (), ()))


def _walk(
    node: schema.Node, path: tuple[str, ...], kinds: tuple[tuple[tuple[str, ...], str, Any], ...]
) -> Iterator[Place]:
    tag = schema.tag_of(node) if path else None
    for section in schema.sections(node):
        values = schema.values_of(section["properties"][tag]) if tag else []
        inside = (*kinds, (path, tag, values[0])) if tag and values else kinds
        for name, field in section["properties"].items():
            yield Place((*path, name), field, inside)
            yield from _walk(field, (*path, name), inside)


def _at(document: dict[str, Any], place: Place, rng: Random) -> None:
    """Mostly, make the sections around a field of the kind that has it."""
    for path, tag, value in place.kinds if rng.random() < 0.85 else ():
        for name in path[:-1]:
            document = document.setdefault(name, {}) if isinstance(document.get(name, {}), dict) else {}
        section = document.get(path[-1])
        if not isinstance(section, dict) or section.get(tag) != value:
            document[path[-1]] = {tag: value}


def drawn(node: schema.Node, rng: Random, depth: int = 0) -> Any:
    """A value that the schema may allow: mostly one that it does, sometimes one just beyond a bound."""
    node = schema.resolve(node)
    options = node.get("anyOf") or node.get("oneOf")
    if options:
        return drawn(rng.choice(options), rng, depth)
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return rng.choice(node["enum"])
    kind = node.get("type")
    if kind == "object":
        required = node.get("required", [])
        tag = [name for name in schema.TAGS if name in node["properties"]]
        names = [*dict.fromkeys([*required, *tag]), *(n for n in node["properties"] if rng.random() < 0.25)]
        return {name: drawn(node["properties"][name], rng, depth + 1) for name in dict.fromkeys(names)}
    if kind == "array":
        items = node.get("items", {})
        count = rng.choice((0, 1, 1, 2, 2, 3, 3, 40)) if depth < 3 else 1
        return [drawn(items, rng, depth + 1) for _ in range(count)]
    if kind in ("integer", "number"):
        return _number(node, kind == "integer", rng)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    return rng.choice((*node.get("examples", ()), rng.choice(TEXTS)))


def _number(node: schema.Node, whole: bool, rng: Random) -> Any:
    lowest = node.get("minimum", node.get("exclusiveMinimum"))
    highest = node.get("maximum", node.get("exclusiveMaximum"))
    edges = [edge for edge in (lowest, highest, node.get("default")) if edge is not None]
    if whole:
        edges = [int(edge) + step for edge in edges for step in (-1, 0, 1)]
        allowed = [n for n in INTEGERS if (lowest is None or n >= lowest) and (highest is None or n <= highest)]
        small = [n for n in allowed if abs(n) <= 100]
        return rng.choice(rng.choice([INTEGERS, edges or allowed, allowed or edges, small or allowed or edges]))
    edges = [
        beside
        for edge in edges
        for beside in (float(edge), math.nextafter(edge, -math.inf), math.nextafter(edge, math.inf))
    ]
    allowed_numbers = [n for n in NUMBERS if (lowest is None or n >= lowest) and (highest is None or n <= highest)]
    usual = [n for n in allowed_numbers if 1e-4 <= n <= 100]
    return rng.choice(rng.choice([NUMBERS, edges or NUMBERS, allowed_numbers or edges, usual or edges]))


def _garbage(node: schema.Node, rng: Random) -> tuple[Any, str | None]:
    """A value that no version of the field can mean, and why."""
    leaves = schema.alternatives(node)
    types = {leaf.get("type", "object" if "properties" in leaf else "") for leaf in leaves}
    offers: list[tuple[Any, str]] = []
    if types & {"integer", "number"} and "string" not in types:
        offers += [(value, "a number that is not finite") for value in NOT_FINITE]
        offers += [
            ("many", "a text in place of a number"),
            (True, "true in place of a number"),
            ({"a": 1}, "a mapping"),
        ]
        offers += [(10**400, "a number that nothing holds")]
    if types == {"integer"}:
        offers += [(2.5, "a fraction in place of an integer"), (10**30, "an integer beyond 64 bits")]
    if types == {"number"}:
        offers += [(value, "a number at the edge of what a float holds") for value in (1e308, 1e300)]
    if types == {"boolean"}:
        offers += [("yes", "a text in place of true"), (1, "a number in place of true")]
    if types == {"string"}:
        offers += [(3, "a number in place of a text"), (["a"], "a list in place of a text")]
    if schema.sections(node):
        offers += [({"no such field": 1}, "an unknown field"), (3.5, "a number in place of a section")]
    if all("type" in leaf or "properties" in leaf for leaf in leaves) and "array" not in types:
        offers += [([[[[]]]], "a list of lists")]
    return rng.choice(offers) if offers else (None, None)


# --- tricks of YAML -------------------------------------------------------------------------------------------------


def _anchor(text: str, rng: Random) -> tuple[str, str | None]:
    return text.replace('"rounds": 1', '"rounds": &a 1') + "\n", "an anchor" if '"rounds": 1' in text else None


def _alias(text: str, rng: Random) -> tuple[str, str | None]:
    return f"x: &a [1]\ny: *a\nz: {text}\n", "an alias, and unknown fields"


def _bomb(text: str, rng: Random) -> tuple[str, str | None]:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    return "\n".join(lines), "a bomb of aliases"


def _twice(text: str, rng: Random) -> tuple[str, str | None]:
    return text[:-1] + ', "seed": 1, "seed": 2}', "a field twice"


def _tag(text: str, rng: Random) -> tuple[str, str | None]:
    tag = rng.choice(
        ("!!python/object/apply:os.getcwd []", "!!binary aGk=", "!!set {a}", "!x 3", "!!timestamp 2001-01-01")
    )
    return text[:-1] + f', "question": {tag}}}', "a tag"


def _documents(text: str, rng: Random) -> tuple[str, str | None]:
    return f"{text}\n---\n{text}\n", "two documents"


def _merged(text: str, rng: Random) -> tuple[str, str | None]:
    return text[:-1] + ', "<<": {"seed": 3}}', "a merge key"


def _nested(text: str, rng: Random) -> tuple[str, str | None]:
    depth = rng.choice((50, 500, 5000, 100_000))
    return text[:-1] + f', "question": {"[" * depth}{"]" * depth}}}', "nested lists"


def _cut(text: str, rng: Random) -> tuple[str, str | None]:
    return text[: rng.randrange(1, len(text))], None


def _characters(text: str, rng: Random) -> tuple[str, str | None]:
    place = rng.randrange(len(text))
    return text[:place] + rng.choice(
        ("\t", "\x00", "\x1b", "\u202e", "\x85", "\ufffe", "#", "&", "*", "!", "%", "@", "`")
    ) + text[place:], None


def _swapped(text: str, rng: Random) -> tuple[str, str | None]:
    place = rng.randrange(len(text))
    return text[:place] + chr(rng.randrange(32, 127)) + text[place + 1 :], None


def _harmless(text: str, rng: Random) -> tuple[str, str | None]:
    return rng.choice(("\ufeff{}", "%YAML 1.2\n---\n{}", "---\n{}\n...", "# a comment\r\n{}\r\n", "\n\n{}")).replace(
        "{}", text
    ), None


def _long_number(text: str, rng: Random) -> tuple[str, str | None]:
    number = rng.choice(("9" * 5000, "0x" + "f" * 5000, "1" + "0" * 20_000, "1e999999999", "-1e400", "1_0_0__0e5"))
    return text[:-1] + f', "evaluate_every": {number}}}', "a number of thousands of digits"


TRICKS: tuple[Callable[[str, Random], tuple[str, str | None]], ...] = (
    _anchor, _alias, _bomb, _twice, _tag, _documents, _merged, _nested, _cut, _characters, _swapped, _harmless,
    _long_number,
)  # fmt: skip
