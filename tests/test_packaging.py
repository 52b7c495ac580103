# SPDX-License-Identifier: Apache-2.0
"""What gets installed is what is in the repository, under one name; and dependencies point inward.

`strategies/`, `attacks/` and `scenarios/` lie beside `fedsim/` and are imported as parts of it: see the comments in
pyproject.toml. Each of the guards below caught a mistake that an editable install hides.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
OUTSIDE = ("attacks", "scenarios", "strategies")


# --- guard 1: every package is listed -------------------------------------------------------------------------------


def packages_on_disk() -> set[str]:
    """Folders with an `__init__.py`, by the name they are imported under; links are not followed."""
    found = set()
    for top, name in [("fedsim", "fedsim"), *((folder, f"fedsim.{folder}") for folder in OUTSIDE)]:
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            if top != "fedsim" or not parts or parts[0] not in OUTSIDE:
                found.add(".".join((name, *parts)))
    return found


def test_the_listed_packages_are_those_on_disk() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()
    assert SETUPTOOLS["packages"] == sorted(SETUPTOOLS["packages"])


def test_the_folders_beside_fedsim_are_mapped_and_linked() -> None:
    expected = {"fedsim": "fedsim", **{f"fedsim.{folder}": folder for folder in OUTSIDE}}
    assert SETUPTOOLS["package-dir"] == expected
    for folder in OUTSIDE:
        link = ROOT / "fedsim" / folder
        # A checkout without links (Windows, an archive) has a small text file there: packaging does not rely on it.
        assert not link.is_symlink() or link.resolve() == ROOT / folder


# --- guard 2: one copy of everything --------------------------------------------------------------------------------


def test_the_folders_are_banned_under_their_own_names() -> None:
    lint = PROJECT["tool"]["ruff"]["lint"]
    assert "TID" in lint["select"] or "TID251" in lint["select"]
    assert "TID251" not in lint["ignore"]
    assert set(OUTSIDE) <= set(lint["flake8-tidy-imports"]["banned-api"])


@pytest.mark.parametrize("statement", ["import strategies", "from attacks import x", "import scenarios.y"])
def test_ruff_refuses_a_second_copy(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", "-"],
        input=f"{statement}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TID251" in done.stdout


# --- guard 3: the wheel that is built from the sdist, outside the checkout ------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist from a copy of the repository, wheel from the sdist, as a release is built."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(source)],
        capture_output=True,
        text=True,
        check=True,
    )
    (built,) = (work / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_everything_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedsim"}
    for package in packages_on_disk():
        assert f"{package.replace('.', '/')}/__init__.py" in names
    on_disk = {
        f"fedsim/scenarios/{path.name}" for path in (ROOT / "scenarios").iterdir() if path.suffix in {".yaml", ".json"}
    }
    assert on_disk <= names
    assert len(on_disk) >= 8
    for folder in ("fedsim", *OUTSIDE):
        for path in (ROOT / folder).rglob("*"):
            place = path.relative_to(ROOT).as_posix()
            inside = place if folder == "fedsim" else f"fedsim/{place}"
            if path.suffix in {".py", ".html", ".css"} and not path.is_symlink():
                assert inside in names, f"{place} is not in the wheel"


def test_the_installed_wheel_finds_its_scenarios_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, capture_output=True, text=True, check=True)
    code = (
        "import importlib.util, fedsim, fedsim.attacks, fedsim.strategies, fedsim.scenario_file as files\n"
        "print(fedsim.__file__)\n"
        "print(len(files.scenario_names()), files.load_scenario('quickstart').name)\n"
        "print([name for name in ('attacks', 'scenarios', 'strategies') if importlib.util.find_spec(name)])\n"
    )
    # -S leaves out site-packages and with it the editable install; the dependencies are then named by their path.
    dependencies = str(Path(pytest.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", code],
        cwd=elsewhere,
        env={"PYTHONPATH": f"{site}:{dependencies}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    home, scenarios, polluted = done.stdout.splitlines()
    assert home == str(site / "fedsim" / "__init__.py")
    assert int(scenarios.split()[0]) >= 7
    assert scenarios.split()[1] == "quickstart"
    assert polluted == "[]"


# --- dependencies point inward --------------------------------------------------------------------------------------

FOUNDATION = {"errors", "randomness", "scenario", "machine"}
FILES = {"scenario_errors", "scenario_file", "scenario_schema", "scenario_yaml"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "randomness": set(),
    "machine": set(),
    "scenario": {"errors"},
    **dict.fromkeys(FILES, {"errors", "scenario"} | FILES),
    "template": {"scenario"} | FILES,
    "training": FOUNDATION,
    "privacy": FOUNDATION,
    "data": FOUNDATION,
    "attacks": FOUNDATION | {"training", "privacy", "data", "models", "transformer", "federation"},
    "strategies": FOUNDATION | {"training", "privacy", "federation", "data", "attacks"},
    "scenarios": set(),
    "federation": FOUNDATION | FILES | {"training", "privacy", "data", "models", "strategies"},
}
"""What a room may import beside itself. A room that is not named here may import anything but the commands."""
COMMANDS = {
    "__main__",
    "cli",
    "screen",
    "attack_screen",
    "audit_command",
    "run_command",
    "audit_screen",
    "epsilon",
    "template",
}
AFTER_ATTACKS = {"attacks", "attacking", "audit", "auditing", "report"}
"""Rooms that come after the attacks on the way of the data, and may need them; of the strategies the malicious one."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of fedsim that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse(path.read_text())
    at_the_top = {id(node) for statement in tree.body for node in ast.walk(statement) if _runs_on_import(statement)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        yield from ((name, id(node) in at_the_top) for name in names if name.split(".")[0] == "fedsim")


def _runs_on_import(statement: ast.stmt) -> bool:
    typing_only = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
    return not typing_only and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def source_files() -> list[tuple[str, Path]]:
    """Every source file with the room that it is in."""
    found = []
    for top in ("fedsim", *OUTSIDE):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if parts[0] == "fedsim" and parts[1] in OUTSIDE:
                continue
            found.append((top if top != "fedsim" else parts[1].removesuffix(".py"), path))
    return found


@pytest.mark.parametrize(
    ("room", "path"), source_files(), ids=[str(path.relative_to(ROOT)) for _, path in source_files()]
)
def test_dependencies_point_inward(room: str, path: Path) -> None:
    for module, on_import in imports(path):
        target = room_of(module)
        if target in ("", room, "__version__"):
            continue
        assert target not in COMMANDS or room in COMMANDS | {"__init__"}, f"{path}: {module} belongs to the commands"
        if room in MAY_IMPORT:
            assert target in MAY_IMPORT[room], f"{path}: {room} must not import {module}"
        if target == "attacks" and room not in AFTER_ATTACKS and path.name != "malicious.py":
            assert not on_import, f"{path}: the core must not need {module}"


def test_scenarios_are_data() -> None:
    (only,) = (ROOT / "scenarios").rglob("*.py")
    assert not [
        node for node in ast.walk(ast.parse(only.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
