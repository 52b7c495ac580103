# SPDX-License-Identifier: Apache-2.0
"""Adding clients and issuing keys, without a server that runs; with one, see `test_federation`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedsim.cli import main
from fedsim.deploy import init, members, nodes
from fedsim.deploy.layout import Server, open_client, open_server
from fedsim.errors import DeployError
from fedsim.federation.link import FLEET, read_fleet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init.create(tmp_path / "fed", 2, ["localhost"])
    return tmp_path / "fed"


def numbers(server: Server) -> dict[str, int]:
    """The number of each client that may take part, by its key."""
    fleet = read_fleet(server.path / FLEET)
    return {path.stem: fleet[nodes.public_key(path)] for path in sorted(server.keys.glob("*.pub"))}


def files(place: Path) -> dict[str, int]:
    return {str(path.relative_to(place)): stat.S_IMODE(path.stat().st_mode) for path in place.rglob("*")}


def test_an_added_client_is_like_those_of_the_beginning(folder: Path) -> None:
    server = open_server(folder)
    nodes.revoke(server, "client-1")  # its number is not given away
    before = {path: path.read_bytes() for path in (folder / "client-2").rglob("*") if path.is_file()}
    for number in (3, 4):
        place, now = members.add_client(folder, server)
        assert (place, now) == (folder / f"client-{number}", False)
        added = open_client(place)
        assert (added.name, added.partition, added.partitions) == (f"client-{number}", number - 1, number)
        assert added.runtime_port == open_client(folder / "client-2").runtime_port + number - 2
        told = {name.replace(f"client-{number}", "client-2"): mode for name, mode in files(place).items()}
        assert told == files(folder / "client-2")
        assert (place / "ca.crt").read_bytes() == (folder / "client-2" / "ca.crt").read_bytes()
    assert numbers(server) == {"client-2": 1, "client-3": 2, "client-4": 3}
    assert {path: path.read_bytes() for path in before} == before
    assert "client-4" in yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert {path.name for path in folder.iterdir()} == {
        "ca", "client-1", "client-2", "client-3", "client-4", "compose.yaml", "README.txt", "server"
    }  # fmt: skip


def test_nothing_of_the_operators_is_overwritten(folder: Path) -> None:
    (folder / "compose.yaml").write_text("mine: true\n")
    members.add_client(folder, open_server(folder))
    assert (folder / "compose.yaml").read_text() == "mine: true\n"
    (folder / "client-4").mkdir()
    before = (folder / "server" / FLEET).read_text()
    with pytest.raises(DeployError, match="is already there and is not overwritten"):
        members.add_client(folder, open_server(folder))
    assert (folder / "server" / FLEET).read_text() == before


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("revoked", [False, True])
def test_a_new_key_takes_the_place_and_the_number_of_the_old_one(folder: Path, carried: bool, revoked: bool) -> None:
    server = open_server(folder)
    old = nodes.public_key(server.keys / "client-2.pub")
    if revoked:
        nodes.revoke(server, "client-2")
    if carried:
        (folder / "client-2").rename(folder.parent / "elsewhere")
    place, _ = members.new_key(folder, server, "client-2")
    assert place == folder / ("client-2-key" if carried else "client-2")
    assert stat.S_IMODE((place / "key").stat().st_mode) == 0o600
    private = load_ssh_private_key((place / "key").read_bytes(), None)
    assert load_ssh_public_key((place / "key.pub").read_bytes()) == private.public_key()
    assert nodes.public_key(place / "key.pub") == nodes.public_key(server.keys / "client-2.pub") != old
    assert numbers(server) == {"client-1": 0, "client-2": 1}
    assert old not in read_fleet(server.path / FLEET)
    assert nodes.clients_of(server) == {"client-1": True, "client-2": True}


def test_the_command_line_adds_and_issues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "add-client", str(folder)]) == 0
    assert f"wrote {folder / 'client-3'}; carry it to its machine" in capsys.readouterr().out
    assert main(["deploy", "new-key", str(folder / "server"), "client-3"]) == 0
    assert "restart client-3" in capsys.readouterr().out
    assert main(["deploy", "new-key", str(folder), "../../ca/ca"]) == 2
    assert "there is no client '../../ca/ca'; the clients are client-1" in capsys.readouterr().err
    (folder / "server" / FLEET).write_text("[x]\nkey = 1\n")
    assert main(["deploy", "add-client", str(folder)]) == 2
    assert "restore it" in capsys.readouterr().err
