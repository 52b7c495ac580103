# SPDX-License-Identifier: Apache-2.0
"""No container is started here (there is no engine in CI): files are held against their schemas and parsers."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.cli import app
from fedsim.deploy import client
from fedsim.deploy.compose import compose_text
from fedsim.deploy.layout import Client, Server

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
FILES = [DOCKER / "compose.yaml", DOCKER / "compose.ray.yaml"]


def parser_of(program: str) -> argparse.ArgumentParser:
    module, function = {
        "flower-superlink": ("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink"),
        "flower-supernode": ("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode"),
        "flower-superexec": ("flwr.supercore.cli.flower_superexec", "_parse_args"),
    }[program]
    parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
    return parser


def services(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["services"]
    return found


def test_the_compose_file_is_the_one_that_init_writes() -> None:
    server = Server(Path("/anywhere"), "server.example", 8443, 8000)
    assert (DOCKER / "compose.yaml").read_text() == compose_text(server, 3)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_compose_files_fit_the_schema(file: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed (extra dev)")
    import check_jsonschema
    import jsonschema

    schema = Path(check_jsonschema.__file__).with_name("builtin_schemas") / "vendor" / "compose-spec.json"
    jsonschema.Draft7Validator(json.loads(schema.read_text())).validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_container_is_confined(file: Path) -> None:
    for name, service in services(file).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"] not in ("", "0", "root"), name
        assert ":latest" not in service["image"], name
        assert ":" in service["image"], name
        assert "mem_limit" in service or file.name == "compose.ray.yaml", name
        assert service.get("pull_policy") == "never" or service["image"].startswith("nginx:"), name


def test_flowers_own_parsers_accept_every_command() -> None:
    programs = set()
    for service in services(DOCKER / "compose.yaml").values():
        program = service.get("entrypoint", ["fedsim"])[-1].replace("fedsim.deploy.", "flower-")
        if program.startswith("flower-"):
            parsed = parser_of(program).parse_args(service["command"])
            programs.add(program)
            assert not getattr(parsed, "insecure", False)
    assert programs == {"flower-superlink", "flower-superexec"}
    one = Client(Path("/client"), "client-1", "server.example", 8443, 0, 3, 9094)
    node = parser_of("flower-supernode").parse_args(client.supernode_arguments(one))
    assert (node.superlink, node.isolation, node.host) == ("server.example:8443", "process", "127.0.0.1")
    assert (
        parser_of("flower-superexec").parse_args(client.superexec_arguments(one)).runtime_api_address
        == "127.0.0.1:9094"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_fedsims_own_parser_accepts_every_command(file: Path) -> None:
    import click
    import typer

    group = typer.main.get_command(app)
    for service in services(file).values():
        if "entrypoint" in service:
            continue
        words, command = list(service["command"]), group
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context("fedsim", words, resilient_parsing=False)


def test_only_the_proxys_port_is_published() -> None:
    found = services(DOCKER / "compose.yaml")
    assert {name: service["ports"] for name, service in found.items() if "ports" in service} == {
        "superlink": ["8443:8443"]
    }
    assert "--host=127.0.0.1" in found["superlink"]["command"]
    for name in ("keys", "superexec", "proxy"):
        assert found[name]["network_mode"] == "service:superlink"
    assert not any("state.db" in volume or volume.endswith("/server:rw") for volume in found["proxy"]["volumes"])
    for number in (1, 2, 3):
        volumes = " ".join(found[f"client-{number}"]["volumes"])
        assert f"/client-{number}:" in volumes
        assert "/server" not in volumes
    ray = yaml.safe_load((DOCKER / "compose.ray.yaml").read_text())
    assert ray["networks"] == {"ray": {"internal": True}}
    assert not any("ports" in service for service in ray["services"].values())


def test_hadolint_is_content() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed (extra dev)")
    done = subprocess.run([str(program), str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


def test_images_are_pinned_and_run_without_rights() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert all(base in ("run", "build") or base.count(".") == 2 for base in bases)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users[-1] == "10001:10001"
    assert sum(line.startswith("HEALTHCHECK") for line in lines) == 3
    assert "FLWR_TELEMETRY_ENABLED=0" in "\n".join(lines)


def test_torch_comes_without_cuda_and_before_everything_else() -> None:
    """Read, not built: there is no container engine here."""
    text = (DOCKER / "Dockerfile").read_text()
    assert 'ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"' in text
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert "torch==" in installs[0]
    assert '--index-url "$TORCH_INDEX"' in installs[0]
    assert "-c constraints.txt" in installs[1]
    assert "torch.version.cuda is None" in text
