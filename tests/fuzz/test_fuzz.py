# SPDX-License-Identifier: Apache-2.0
"""A few cases of each fuzzer, always the same; `make fuzz` plays thousands, with seeds of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import fuzzed_scenarios as fuzzed
import pytest
from sandbox import complaint
from scenario_fuzzer import refused_at_once

from fedsim import scenario_schema as schema
from fedsim.scenario_file import json_schema


@pytest.mark.parametrize(("what", "cases"), [("scenarios", 40), ("folders", 5)])
def test_a_few_cases(what: str, cases: int, tmp_path: Path) -> None:
    """In a process of its own: what is forked must not have pytest's threads and files."""
    command = [sys.executable, str(Path(__file__).parent), what, "--cases", str(cases), "--seed", "16"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert f"cases={cases}" in done.stdout


def test_many_scenarios_are_read(tmp_path: Path) -> None:
    """What can be seen in a file alone costs milliseconds: thousands of cases, without a process for each."""
    file, refused = tmp_path / "s.yaml", 0
    for number in range(600):
        one = fuzzed.case(Random(f"16/{number}"))
        file.write_bytes(one.text.encode("utf-8", "surrogatepass"))
        outcome = refused_at_once(file, one.overrides)
        refused += outcome is not None
        assert (complaint(outcome) if outcome else one.garbage) is None, (number, one, outcome)
    assert 200 < refused < 550


def test_every_number_of_a_scenario_has_bounds_on_both_sides() -> None:
    """A number without them is a size that no machine holds, or one that single precision takes for infinity."""
    unbounded = []
    places = [("scenario", json_schema()), *json_schema()["$defs"].items()]
    while places:
        name, node = places.pop()
        if not isinstance(node, dict):
            continue
        if node.get("type") in ("integer", "number") and not (
            {"minimum", "exclusiveMinimum"} & set(node) and {"maximum", "exclusiveMaximum"} & set(node)
        ):
            unbounded.append(name)
        for key, inner in node.items():
            several = inner if isinstance(inner, list) else [inner]
            places += [(f"{name}.{key}", each) for each in several if key != "default"]
    assert not unbounded


def test_every_field_is_reached() -> None:
    """So that a field that is added is fuzzed without being asked."""
    reached = {".".join(place.path) for place in fuzzed.places()}
    wanted = set()

    def walk(node: schema.Node, path: str) -> None:
        for name, field in schema.fields(node).items():
            wanted.add(f"{path}{name}")
            walk(field, f"{path}{name}.")

    walk(schema.root(), "")
    assert wanted <= reached, sorted(wanted - reached)


def test_what_is_called_garbage_is_of_many_kinds() -> None:
    cases = [fuzzed.case(Random(number)) for number in range(2000)]
    kinds = {case.garbage.split(": ")[-1] for case in cases if case.garbage}
    assert len(kinds) >= 15
    assert sum(case.garbage is None for case in cases) > len(cases) / 2
    assert any(json.loads(case.text) for case in cases if case.garbage is None and case.text.startswith('{"name"'))
