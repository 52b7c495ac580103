# SPDX-License-Identifier: Apache-2.0
"""Numbers out of their range: one sentence that names the field, the value and the range, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.cli import main
from fedsim.deploy import init
from fedsim.deploy.layout import open_client, open_server
from fedsim.errors import DeployError
from fedsim.privacy.ledger import Ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init.create(tmp_path / "fed", 3, ["localhost"])
    return tmp_path / "fed"


def put(file: Path, key: str, value: str) -> None:
    lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n")


CLIENT = [
    ("runtime_port", "70000", "from 1 to 65535"),
    ("runtime_port", "0", "from 1 to 65535"),
    ("port", "-1", "from 1 to 65535"),
    ("partition_id", "99", "from 0 to 2"),
    ("partition_id", "3", "from 0 to 2"),
    ("partition_id", "-1", "from 0 to 2"),
    ("partition_id", "true", "from 0 to 2"),
    ("num_partitions", "0", "from 1 to 10000"),
    ("num_partitions", "-3", "from 1 to 10000"),
    ("num_partitions", "1e9", "of type int"),
]


@pytest.mark.parametrize(("key", "value", "words"), CLIENT)
def test_a_clients_numbers(key: str, value: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder / "client-1" / "client.toml", key, value)
    with pytest.raises(DeployError, match=rf"{key} is .*{words}"):
        open_client(folder / "client-1")
    assert main(["deploy", "client", str(folder / "client-1")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    assert not (folder / "client-1" / "node.toml").exists()


@pytest.mark.parametrize("key", ["port", "superlink_port"])
@pytest.mark.parametrize("value", ["65536", "0", "-8443", "true"])
def test_a_servers_ports(key: str, value: str, folder: Path) -> None:
    put(folder / "server" / "server.toml", key, value)
    with pytest.raises(DeployError, match=rf"{key} is .* from 1 to 65535"):
        open_server(folder)
    assert main(["deploy", "server", str(folder)]) == 2


@pytest.mark.parametrize(
    "options", [("--clients", "0"), ("--clients", "-1"), ("--port", "70000"), ("--superlink-port", "0")]
)
def test_a_folder_is_not_made_with_them(options: tuple[str, str], tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), "--host", "localhost", *options]) == 2
    with pytest.raises(DeployError, match="it must be a number from 1 to"):
        init.create(tmp_path / "fed", 1, ["localhost"], port=0)
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("delta", ["2", "0", "1", "-1e-5", "nan", "inf"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_delta_of_an_empty_ledger(
    delta: str, form: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(tmp_path / "ledger.sqlite")
    assert main(["ledger", str(tmp_path), f"--delta={delta}", *form]) == 2
    assert "it must be above 0 and below 1" in capsys.readouterr().err
