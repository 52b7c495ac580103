# SPDX-License-Identifier: Apache-2.0
"""The generated pages of the reference: fields, commands, public names and the policy, written from the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import fedsim
from fedsim import scenario_schema as schema
from fedsim.cli import command as program
from fedsim.federation.policy import Policy


def write(folder: Path) -> None:
    """Write the generated pages into a folder. A page that is already right is left alone: builds stay quick."""
    for name, content in pages().items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != content:
            page.write_text(content)


def pages() -> dict[str, str]:
    """The text of every generated page, by its name."""
    return {"scenario": scenario_page(), "commands": commands_page(), "python": python_page(), "policy": policy_page()}


def scenario_page() -> str:
    """Every field of a scenario: what it means, what it can be, and its default."""
    intro = "`fedsim new` writes a file with every field of a scenario; `fedsim schema` prints the JSON schema."
    lines = ["# Scenario fields", "", intro]
    for name, node in schema.fields(schema.root()).items():
        lines += ["", f"## {name}", "", *_field(name, node)]
    return "\n".join(lines) + "\n"


def _field(path: str, node: schema.Node) -> Iterator[str]:
    about = schema.resolve(node).get("description", "")
    yield about
    members = [*schema.sections(node), *schema.sections(schema.resolve(node).get("items", {}))]
    if not members:
        yield f"\nValue: {_words(node)}. Default: {_value(node)}."
    tag = schema.tag_of(node) or schema.tag_of(schema.resolve(node).get("items", {}))
    for member in members:
        names = ", ".join(f"`{choice}`" for choice in schema.tags(member))
        if len(members) > 1 or names:
            yield f"\n### {path}: {names or member.get('title', '')}\n\n{member.get('description', '')}"
        yield from _table({name: field for name, field in member["properties"].items() if name != tag})
        for name, inner in member["properties"].items():
            if schema.sections(inner):
                yield f"\n#### {path}.{name}\n"
                yield from _field(f"{path}.{name}", inner)


def _table(fields: dict[str, schema.Node]) -> Iterator[str]:
    if not fields:
        return
    yield "\n| field | meaning | value | default |\n|---|---|---|---|"
    for name, node in fields.items():
        value = "a section, below" if schema.sections(node) else _words(node)
        cells = (f"`{name}`", schema.resolve(node).get("description", ""), value, _value(node))
        yield "| " + " | ".join(_cell(text) for text in cells) + " |"


def _words(node: schema.Node) -> str:
    """What a value must be; a pattern is set as code, because Markdown would read its brackets as a link."""
    pattern = schema.resolve(node).get("pattern", "")
    return schema.expected(node).replace(pattern, f"`{pattern}`") if pattern else schema.expected(node)


def _value(node: schema.Node) -> str:
    default = schema.resolve(node).get("default", "required")
    return (
        "a section"
        if isinstance(default, dict)
        else "null"
        if default is None
        else f"`{default}`"
        if default != ""
        else "empty"
    )


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "Every command answers `--help`. A mistake is one sentence on standard error, and exit code 2.",
    ]
    return "\n".join([*lines, *_commands("fedsim", program())]) + "\n"


def _commands(path: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _commands(f"{path} {name}", child)
        return
    context = click.Context(command)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n## {path}\n\n{command.help or ''}\n\n```text\n{path} {usage}\n```"
    rows = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        yield "\n| | meaning | default |\n|---|---|---|"
    for parameter in rows:
        name = ", ".join(parameter.opts) if isinstance(parameter, click.Option) else parameter.make_metavar(context)
        default = "" if parameter.default in (None, False) or parameter.required else f"`{parameter.default}`"
        yield f"| `{_cell(name)}` | {_cell(getattr(parameter, 'help', '') or '')} | {_cell(default)} |"


def python_page() -> str:
    """The public names of the package, from their docstrings."""
    names = sorted(fedsim.__all__, key=lambda name: (name[0].isupper(), name))
    lines = ["# Python API", "", "What `import fedsim` offers. Everything else may change without notice.", ""]
    return "\n".join([*lines, "```{eval-rst}", *map(_autodoc, names), "```"]) + "\n"


def _autodoc(name: str) -> str:
    kind = "class" if name[0].isupper() else "function"
    return f".. auto{kind}:: fedsim.{name}\n" + ("   :members:\n" if kind == "class" else "")


def policy_page() -> str:
    """The fields of a client's policy file."""
    intro = "`policy.yaml` in a deployed client's folder holds what its owner allows; the client refuses the rest."
    return "\n".join(["# A client's policy", "", intro, *_table(Policy.model_json_schema()["properties"])]) + "\n"
