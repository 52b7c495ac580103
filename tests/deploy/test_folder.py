# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from own_clients import npz

from fedsim.cli import main
from fedsim.deploy import certificates, client, doctor, init, nodes, server
from fedsim.deploy.layout import open_client, open_server
from fedsim.deploy.processes import environment
from fedsim.deploy.templates import FLEET, nginx
from fedsim.errors import DeployError, PolicyError, PrivacyError
from fedsim.federation.policy import Policy, load_policy
from fedsim.privacy import Mechanism
from fedsim.privacy.ledger import Ledger


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "fed"
    init.create(folder, 3, ["fl.example.org", "127.0.0.1"])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "fed"))


def test_private_files_are_private_and_nothing_else_is_there(made: Path) -> None:
    private = {"ca/ca.key", "server/server.key", "server/superexec.secret", "server/signing.key"}
    private |= {f"client-{n}/{name}" for n in (1, 2, 3) for name in ("key", "superexec.secret", "ledger.sqlite")}
    for path in made.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        else:
            assert mode == (0o600 if str(path.relative_to(made)) in private else 0o644), path
    assert {path.name for path in made.parent.iterdir()} == {"fed"}


def test_a_clients_folder_holds_only_what_it_needs(made: Path) -> None:
    keys = {
        path: path.read_bytes() for path in made.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    }
    assert len(keys) == 6
    for number in (1, 2, 3):
        inside = [path for path in keys if path.is_relative_to(made / f"client-{number}")]
        assert [path.name for path in inside] == ["key"]
        assert str(made) not in "".join(p.read_text() for p in (made / f"client-{number}").glob("*.toml"))
        opened = open_client(made / f"client-{number}")
        assert (opened.partition, opened.partitions, opened.address) == (number - 1, 3, "fl.example.org:8443")
        assert load_policy(opened.path / "policy.yaml") == Policy()
    assert len({path.read_bytes() for path in made.rglob("server.pub")}) == 1  # by which all know the server
    secrets = {path.read_bytes() for path in made.rglob("superexec.secret")}
    assert len(secrets) == 4
    assert all(len(secret) == 32 for secret in secrets)


def test_certificates_are_what_they_should_be(made: Path) -> None:
    certificate, authority = (made / "server/server.crt").read_bytes(), (made / "ca/ca.crt").read_bytes()
    assert certificates.signed_by(certificate, authority)
    assert not certificates.signed_by(certificate, certificates.make_authority().public)
    assert set(certificates.names_of(certificate)) == {"fl.example.org", "127.0.0.1", "localhost", "::1"}
    assert 800 < certificates.days_left(certificate) < 826
    loaded, signer = x509.load_pem_x509_certificate(certificate), x509.load_pem_x509_certificate(authority)
    assert not loaded.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert signer.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    key = load_ssh_private_key((made / "client-1/key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    public = load_ssh_public_key((made / "server/clients/client-1.pub").read_bytes())
    assert public == key.public_key()


def test_nothing_is_overwritten_and_nothing_is_left_half_made(made: Path, tmp_path: Path) -> None:
    before = (made / "ca/ca.key").read_bytes()
    with pytest.raises(DeployError, match="is already there and is not overwritten"):
        init.create(made, 3, ["other"])
    assert (made / "ca/ca.key").read_bytes() == before
    for clients, hosts, words in (
        (0, ["a"], "from 1 to 10000"),
        (1, [], "--host is missing"),
        (1, ["a b"], "neither a host"),
    ):
        with pytest.raises(DeployError, match=words):
            init.create(tmp_path / "bad", clients, hosts)
    with pytest.raises(DeployError, match="neither a host"):
        init.create(tmp_path / "bad", 1, ['x"; include /etc/passwd'])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "make_client", lambda name: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(DeployError, match="No space left"):
            init.create(tmp_path / "bad", 1, ["a"])
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_makes_a_folder_and_tells_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "fed"
    assert main(["deploy", "init", str(where), "--clients", "1", "--host", "localhost"]) == 0
    assert "README.txt says what next" in capsys.readouterr().out
    assert main(["deploy", "init", str(where), "--clients", "1", "--host", "localhost"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["deploy", "revoke", str(where), "client-7"]) == 2
    assert "there is no client 'client-7'; the clients are client-1" in capsys.readouterr().err
    assert main(["deploy", "server", str(tmp_path)]) == 2
    assert "is not a server's folder" in capsys.readouterr().err
    assert main(["ledger", str(where / "client-1")]) == 0
    assert "nothing" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path)]) == 2


def test_the_environment_of_flower_is_quiet_and_stays_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    found = {key: value for key, value in environment(tmp_path).items() if key.startswith("FLWR_")}
    assert found == {
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def test_only_the_fleet_passes_the_proxy(made: Path) -> None:
    text = nginx(open_server(made))
    patterns = re.findall(r"location ~ (\S+)", text)
    assert text.count("proxy_pass https://") == len(patterns) == 3
    for setting in ("proxy_request_buffering off;", "proxy_max_temp_file_size 0;", "client_max_body_size"):
        assert text.count(setting) == len(patterns)  # nothing is written to a disk, which an outsider could fill
    for name in FLEET:
        assert sum(bool(re.match(pattern, f"/v1/fleet/{name}")) for pattern in patterns) == 1
    for path in (
        "/v1/control/list-runs",
        "/v1/fleet/register-node",
        "/v1/fleet/pull-messages/x",
        "/v1/runtime/a",
        "/health",
    ):
        assert not any(re.match(pattern, path) for pattern in patterns)
    stream, _, http = text.partition("http {")
    assert "limit_conn accepted" in stream  # from the accept
    assert "listen 8443;" in stream  # and nothing else is open
    assert re.findall(r"listen (\S+)", http) == ["127.0.0.1:8001"]
    if program := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin"):
        try:
            arguments = ["-t", *server.proxy_arguments(open_server(made)), *server.stream_module()]
        except DeployError as error:
            pytest.skip(str(error))
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_fleets_paths_are_those_of_flower() -> None:
    """A new Flower with another path would be shut out by the proxy: better to see it here."""
    import inspect

    from flwr.supernode.fleet_http_client import FleetHttpClient

    called = set(re.findall(r'path="/v1/fleet/([a-z-]+)"', inspect.getsource(FleetHttpClient)))
    assert called - {"register-node", "unregister-node"} == set(FLEET)


def test_flower_listens_on_loopback_only(made: Path) -> None:
    link = server.superlink_arguments(open_server(made))
    node = client.supernode_arguments(open_client(made / "client-1"))
    assert "--host=127.0.0.1" in link
    assert "--host=127.0.0.1" in node
    for arguments in (link, node):
        assert "--isolation=process" in arguments
        assert any(word.startswith("--superexec-auth-secret-file=") for word in arguments)
    assert "--enable-supernode-auth" in link
    assert "--insecure" not in (*link, *node)


def test_revoking_offline_moves_the_key_for_good(folder: Path) -> None:
    opened = open_server(folder)
    assert nodes.revoke(opened, "client-2") is False
    assert nodes.clients_of(opened) == {"client-1": True, "client-2": False, "client-3": True}
    assert nodes.revoke(opened, "client-2") is False  # again is no error
    with pytest.raises(DeployError, match="there is no client"):
        nodes.revoke(opened, "../../ca/ca")


def test_a_client_does_not_start_without_policy_ledger_or_data(folder: Path) -> None:
    opened = open_client(folder / "client-1")
    assert 'policy = "' in client.node_configuration(opened, None, None)
    with pytest.raises(DeployError, match=r"--data .* is not a file"):
        client.node_configuration(opened, folder / "nothing.csv", None)
    with pytest.raises(PolicyError, match="policy file"):
        client.node_configuration(opened, None, folder / "no-policy.yaml")
    (folder / "client-1/ledger.sqlite").unlink()
    with pytest.raises(PrivacyError, match="restore it from a backup"):
        client.node_configuration(opened, None, None)


def test_the_node_configuration_is_read_back_by_flower(folder: Path) -> None:
    from flwr.common.config import parse_config_args

    odd = folder / 'da"ta \\ x.csv'
    odd.write_text("a,b\n")
    file = folder / "client-2" / "node.toml"
    file.write_text(client.node_configuration(open_client(folder / "client-2"), odd, None))
    found = parse_config_args([str(file)])
    assert found["data-path"] == str(odd)
    assert (found["partition-id"], found["num-partitions"]) == (1, 3)


def test_renewing_keeps_the_authority_and_adds_names(folder: Path) -> None:
    opened = open_server(folder)
    before = (opened.path / "server.crt").read_bytes()
    names = init.renew(folder, ["10.1.2.3"], opened)
    after = (opened.path / "server.crt").read_bytes()
    assert after != before
    assert {"fl.example.org", "10.1.2.3", "127.0.0.1"} <= set(names)
    assert certificates.signed_by(after, (opened.path / "ca.crt").read_bytes())
    assert stat.S_IMODE((opened.path / "server.key").stat().st_mode) == 0o600
    shutil.rmtree(folder / "ca")
    with pytest.raises(DeployError, match="bring the authority back"):
        init.renew(folder, [], opened)


def test_the_doctor_says_what_is_wrong_and_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "server/server.key").chmod(0o644)
    monkeypatch.setattr(certificates, "SERVER_DAYS", 20)
    init.renew(folder, [], open_server(folder))
    (folder / "server/server.key").chmod(0o640)
    found = {finding.what: finding for finding in doctor.examine(folder)}
    key = found[str(folder / "server/server.key")]
    assert (key.status, key.remedy.split(";")[0]) == ("wrong", f"`chmod 600 {folder / 'server/server.key'}`")
    assert found[str(folder / "server/server.crt")].status == "doubtful"
    assert found["SuperLink"].status == "wrong"
    assert found["fleet.toml"].status == "good"
    (folder / "server/clients/stranger.pub").write_bytes(certificates.make_client("stranger").public)
    assert "stranger has no number" in {finding.what: finding for finding in doctor.examine(folder)}["fleet.toml"].said
    (folder / "server/fleet.toml").unlink()
    assert {finding.what: finding for finding in doctor.examine(folder)}["fleet.toml"].status == "wrong"
    assert "fedsim deploy server" in found["SuperLink"].remedy
    with socket.socket() as wide:
        wide.bind(("0.0.0.0", 0))
        wide.listen()
        assert doctor._open_addresses(wide.getsockname()[1]) == ["0.0.0.0"]


def test_the_doctor_of_a_client_sees_that_the_server_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    init.create(tmp_path / "fed", 1, ["127.0.0.1"], port)
    (tmp_path / "fed/client-1/ca.key").write_text("a key that should not be here")
    found = {finding.what: finding for finding in doctor.examine(tmp_path / "fed/client-1")}
    assert found[f"127.0.0.1:{port}"].said.startswith("cannot be reached")
    assert found["ca.key"].status == "wrong"
    assert found["ledger"].status == "good"
    assert all(finding.remedy for finding in found.values() if finding.status != "good")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(made: Path) -> None:
    for unit in made.rglob("*.service"):
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
        assert "Unknown" not in done.stderr, done.stderr


def test_units_restart_and_are_confined(made: Path) -> None:
    for unit in made.rglob("*.service"):
        text = unit.read_text()
        for line in ("Restart=always", "NoNewPrivileges=yes", "ProtectSystem=strict", "User=fedsim"):
            assert line in text
        for line in ("Type=notify", "WatchdogSec=120", "MemoryMax=", "LimitNOFILE=32768"):
            assert line in text


def test_the_ledger_is_shown_with_everything_that_an_epsilon_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(folder / "client-1/ledger.sqlite")
    for round_ in (1, 2):
        ledger.charge("data", "example", Mechanism("gaussian", 2.0, "add/remove", "poisson", 0.1), 5, "run-1", round_)
    assert main(["ledger", str(folder / "client-1"), "--delta", "1e-6"]) == 0
    shown = capsys.readouterr().out
    assert "at δ = 1e-06 (add/remove one example" in " ".join(shown.split())
    assert "releases: 2, in 1 run, from" in " ".join(shown.split())
    assert main(["ledger", str(folder / "client-1/ledger.sqlite"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["datasets"]["data"]
    assert data["spent"]["example"]["epsilon"] == pytest.approx(ledger.epsilon("data", "example", 1e-5))
    assert data["spent"]["client"]["epsilon"] == "inf"
    assert [charge["round"] for charge in data["charges"]] == [1, 2]


def test_a_folder_of_an_earlier_fedsim_is_told_how_to_know_its_server(folder: Path) -> None:
    opened, own = open_server(folder), open_client(folder / "client-1")
    for file in (opened.path / "signing.key", opened.path / "server.pub", own.path / "server.pub"):
        file.unlink()
    with pytest.raises(DeployError, match=r"by which this client knows its server's messages; copy server\.pub"):
        client.node_configuration(own, None, None)
    server.prepare(opened)
    key = (opened.path / "signing.key").read_bytes()
    assert stat.S_IMODE((opened.path / "signing.key").stat().st_mode) == 0o600
    shutil.copy(opened.path / "server.pub", own.path)
    assert f'server-key = "{own.path / "server.pub"}"' in client.node_configuration(own, None, None)
    server.prepare(opened)
    assert (opened.path / "signing.key").read_bytes() == key


@pytest.mark.parametrize(
    ("policy", "level", "words"),
    [
        ("", "INFO", "has 60 rows; the policy vouches for 50 to any number of them; set largest_examples, too"),
        ("smallest_examples: 60\nlargest_examples: 70", "INFO", "vouches for 60 to 70 of them"),
        ("smallest_examples: 61", "WARNING", "vouches for 61 to any number of them, so this client will not train"),
        ("largest_examples: 59", "WARNING", "vouches for 50 to 59 of them, so this client will not train"),
    ],
)
def test_a_client_that_starts_is_told_what_it_vouches_for(
    policy: str, level: str, words: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = open_client(folder / "client-1")
    (own.path / "policy.yaml").write_text(policy)
    with caplog.at_level("INFO", logger="fedsim"):
        client.node_configuration(own, npz(folder / "own.npz", 60), None)
    assert [(r.levelname, words in r.getMessage()) for r in caplog.records] == [(level, True)]
