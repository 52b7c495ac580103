# SPDX-License-Identifier: Apache-2.0
"""The generated pages of the reference name everything that the program offers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import fedsim
from fedsim import scenario_schema as schema
from fedsim.cli import command as program
from fedsim.federation.policy import Policy

DOCS = Path(__file__).parents[2] / "docs"


def _reference_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return _reference_pages().pages()


def test_every_field_of_a_scenario_has_its_line(pages: dict[str, str]) -> None:
    for name, node in schema.fields(schema.root()).items():
        assert f"## {name}\n" in pages["scenario"]
        tag = schema.tag_of(node)
        for field in schema.fields(node):
            assert field == tag or f"| `{field}` |" in pages["scenario"], f"{name}.{field} is not documented"


def test_every_command_and_option_has_its_line(pages: dict[str, str]) -> None:
    root = program()
    for name, command in root.commands.items():
        assert f"## fedsim {name}" in pages["commands"]
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"fedsim {name}: {parameter.name} has no help"
            assert parameter.param_type_name == "argument" or parameter.opts[0] in pages["commands"]


def test_every_public_name_and_policy_field_is_there(pages: dict[str, str]) -> None:
    assert all(f".{name}\n" in pages["python"] for name in fedsim.__all__)
    assert all(f"| `{field}` |" in pages["policy"] for field in Policy.model_fields)


def test_pages_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    reference = _reference_pages()
    reference.write(tmp_path)
    before = {page: page.stat().st_mtime_ns for page in tmp_path.iterdir()}
    reference.write(tmp_path)
    assert len(before) == 4
    assert before == {page: page.stat().st_mtime_ns for page in tmp_path.iterdir()}
