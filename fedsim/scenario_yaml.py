# SPDX-License-Identifier: Apache-2.0
"""The YAML of scenario files: read with the line of every field, written so that it reads back the same.

Scalars follow YAML 1.2 (`1e-5` is a number, `no` is text, dates are text), because PyYAML's own YAML 1.1 rules turn
fields into something else without a word. What a scenario has no use for (anchors, aliases, tags, several documents,
the same key twice) is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fedsim.errors import ScenarioError

FieldPath = tuple[str | int, ...]
"""Where a value is in a document: ("client", "epochs"), ("model", "hidden", 0)."""

LARGEST = 1_000_000
"""Bytes of the largest file that is read: a scenario has a few thousand."""

LONGEST_NUMBER = 1000
"""Digits of the longest integer that is read."""

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
)
_BREAKS = re.compile("[\x85\u2028\u2029]")
_KNOWN_TAGS = {tag for tag, _, _ in _SCALARS} | {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


class _NotInAScenarioError(yaml.MarkedYAMLError):
    """Good YAML that a scenario has no use for."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _NotInAScenarioError(
                problem="aliases (*name) are not supported; write the value out",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            raise _NotInAScenarioError(
                problem=f"anchors (&{event.anchor}) are not supported; leave it out, and write values out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unicode's own line breaks would be read back as spaces unless they are escaped.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if _BREAKS.search(data) else None)

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)
for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(_pattern), [character.strip("\0") for character in _first])


def read_text(path: Path) -> str:
    """The text of a scenario file, or one sentence about why it has none."""
    try:
        if path.is_dir():
            raise ScenarioError(f"{path} is a folder; name the scenario file in it")
        if not path.is_file():
            raise ScenarioError(f"{path} is not a regular file; give the path of a scenario file")
        if (size := path.stat().st_size) > LARGEST:
            raise ScenarioError(f"{path} has {size:,} bytes; a scenario file has at most {LARGEST:,}")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ScenarioError(f"{path} is not a text file in UTF-8; give the path of a scenario file") from None
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None


def parse(text: str, source: str, *, numbered: bool = True) -> tuple[Any, dict[FieldPath, int]]:
    """The value of a YAML document and the line of each of its fields; errors begin with `source:line`, or `source`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[FieldPath, int] = {}
        return _value(loader, node, (), lines), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark and numbered else source
        remedy = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        what = "" if isinstance(error, _NotInAScenarioError) else "cannot be read as YAML: "
        raise ScenarioError(f"{place}: {what}{error.problem or error.context}{remedy}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ScenarioError(f"{source}: cannot be read as YAML: {reason}; is it a text file?") from None
    except RecursionError:
        raise ScenarioError(f"{source}: cannot be read as YAML: it is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def _value(loader: _Loader, node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int]) -> Any:
    """The Python value of a node. Lists become tuples, which is what the frozen scenario holds."""
    lines.setdefault(path, node.start_mark.line + 1)
    if node.tag not in _KNOWN_TAGS:
        raise _NotInAScenarioError(
            problem=f"the tag {node.tag} is not supported; leave it out", problem_mark=node.start_mark
        )
    if isinstance(node, yaml.SequenceNode):
        return tuple(_value(loader, item, (*path, i), lines) for i, item in enumerate(node.value))
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key_node.tag != "tag:yaml.org,2002:str":
            problem = f"{key if key is not None else 'a list or mapping'} is no field name; a field name is text"
            raise _NotInAScenarioError(problem=problem, problem_mark=key_node.start_mark)
        if key in result:
            first = lines[(*path, key)]
            problem = f"{'.'.join(map(str, (*path, key)))} is there twice (first in line {first}); remove one"
            raise _NotInAScenarioError(problem=problem, problem_mark=key_node.start_mark)
        lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _value(loader, value_node, (*path, key), lines)
    return result


def _scalar(loader: _Loader, node: yaml.Node) -> Any:
    try:
        if node.tag == "tag:yaml.org,2002:str":
            # JSON writes what is beyond 16 bits as a pair of halves, which PyYAML leaves apart.
            return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
        if node.tag != "tag:yaml.org,2002:int":
            return loader.construct_object(node)
        if len(node.value) > LONGEST_NUMBER:
            raise ValueError  # Python converts longer ones to text and back in quadratic time, or not at all
        return int(node.value, 16 if node.value.startswith("0x") else 10)  # PyYAML would read 010 as 8
    except UnicodeDecodeError:
        raise _NotInAScenarioError(
            problem=f"{node.value[:30]!r} holds half a character (a lone surrogate); write the whole character",
            problem_mark=node.start_mark,
        ) from None
    except ValueError:
        problem = f"{node.value[:30]} cannot be read as a number"
        raise _NotInAScenarioError(problem=problem, problem_mark=node.start_mark) from None


def dump(value: Any) -> str:
    """YAML text in block style, in the order of the fields, that `parse` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118)
