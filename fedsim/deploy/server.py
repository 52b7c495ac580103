# SPDX-License-Identifier: Apache-2.0
"""The server's processes: SuperLink, SuperExec, and the proxy, which opens its port last.

Everything of Flower listens on loopback. Flower 1.41 lets whoever reaches its control and runtime paths start and stop
runs and register keys, with or without node authentication; so only the fleet's paths pass the proxy.
"""

from __future__ import annotations

import logging
import resource
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from fedsim.deploy import certificates, nodes
from fedsim.deploy.layout import Server, replace_file
from fedsim.deploy.notify import notify
from fedsim.deploy.processes import SUPEREXEC, Program, environment, find, listens, superexec, together
from fedsim.deploy.superlink import TIDY
from fedsim.deploy.templates import FILES, flower_config, nginx
from fedsim.errors import DeployError

log = logging.getLogger("fedsim")
BEAT = 30.0  # seconds between two questions whether the SuperLink is well
SECONDS = 120.0  # until a process is ready; imports are slow on a busy machine


def serve(server: Server) -> None:
    """Run the server until one of its processes ends, or it is told to stop."""
    stream = stream_module()  # what is missing is said before anything is started
    superlink_port = "superlink_port"
    for port, what in (
        (server.superlink_port, superlink_port),
        (server.tls_port, f"the port beside {superlink_port},"),
        (server.port, "port"),
    ):
        if listens("127.0.0.1", port):
            raise DeployError(f"{what} {port} is already in use; is the server running? Else change it in server.toml")
    prepare(server)
    with together(environment(server.flower)) as processes:
        processes.start(Program("SuperLink", superlink_command(server), server.path))
        processes.wait_for(lambda: listens("127.0.0.1", server.superlink_port), SECONDS, "SuperLink")
        nodes.follow_keys(server)
        processes.start(Program("SuperExec", superexec_command(server), server.path))
        processes.start(Program("proxy", (*proxy_command(server), *stream), server.path))
        processes.wait_for(lambda: listens("127.0.0.1", server.port), SECONDS, "proxy")
        allowed = [name for name, may in nodes.clients_of(server).items() if may]
        notify("READY=1")
        log.info("ready: %s:%d, clients that may take part: %s", server.host, server.port, ", ".join(allowed) or "none")
        name, how = processes.watch(Pulse(server).stuck)
    raise DeployError(f"{name} {how}, so the server stopped; what it printed says why")


def prepare(server: Server) -> None:
    """Write what follows from the configuration and from where the folder is."""
    server.flower.mkdir(mode=0o700, exist_ok=True)
    (server.path / "tmp").mkdir(mode=0o700, exist_ok=True)
    (server.flower / "config.toml").write_text(flower_config(server))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = FILES if allowed == resource.RLIM_INFINITY else min(FILES, allowed)
    (server.path / "nginx.conf").write_text(nginx(server, files))
    tidy(server.path / "state.db")
    _sign_from_now_on(server)


def tidy(database: Path) -> None:
    """Let Flower's database give back what it no longer holds, also one that was made without that."""
    if not database.is_file():
        return
    with closing(sqlite3.connect(database)) as connection:
        for name, value in TIDY:
            connection.execute(f"PRAGMA {name} = {value}")
        connection.execute("VACUUM")


class Pulse:
    """Whether the SuperLink still answers, asked from time to time."""

    def __init__(self, server: Server) -> None:
        self._ask = partial(_answers, server)
        self._next, self._missed = time.monotonic() + BEAT, 0

    def stuck(self) -> str | None:
        """The SuperLink's name, if it has not answered three times."""
        if time.monotonic() >= self._next:
            self._missed = 0 if self._ask() else self._missed + 1
            self._next = time.monotonic() + BEAT
        return "SuperLink" if self._missed >= 3 else None


def _answers(server: Server) -> bool:
    """Whether the SuperLink answers a question that its database is asked for."""
    try:
        nodes.registered(server)
    except DeployError:
        return False
    return True


def _sign_from_now_on(server: Server) -> None:
    """Make the key of a folder that an earlier fedsim has made; its clients are told what to do when they start."""
    from fedsim.federation.link import SERVER_KEY, SIGNING_KEY

    if (server.path / SIGNING_KEY).is_file():
        return
    pair = certificates.make_signer()
    replace_file(server.path / SERVER_KEY, pair.public.decode(), 0o644)
    replace_file(server.path / SIGNING_KEY, pair.private.decode())
    log.warning("made %s; copy %s to each client's folder", server.path / SIGNING_KEY, server.path / SERVER_KEY)


def superlink_command(server: Server) -> tuple[str, ...]:
    """The SuperLink, as it is started here: Flower's, guarded (`superlink`)."""
    return (sys.executable, "-I", "-m", "fedsim.deploy.superlink", *superlink_arguments(server))


def superlink_arguments(server: Server) -> tuple[str, ...]:
    """Fleet, control and runtime on loopback, with TLS, node authentication and a database; it executes nothing."""
    return (
        "--host=127.0.0.1",
        f"--port={server.superlink_port}",
        f"--ssl-ca-certfile={server.path / 'ca.crt'}",
        f"--ssl-certfile={server.path / 'server.crt'}",
        f"--ssl-keyfile={server.path / 'server.key'}",
        "--enable-supernode-auth",
        f"--database={server.path / 'state.db'}",
        "--disable-runtime-dependency-installation",
        "--isolation=process",
        f"--superexec-auth-secret-file={server.path / 'superexec.secret'}",
    )


def superexec_command(server: Server) -> tuple[str, ...]:
    """The SuperExec, which starts the ServerApp of a run."""
    return (*SUPEREXEC, *superexec_arguments(server))


def superexec_arguments(server: Server) -> tuple[str, ...]:
    """It trusts the server's authority, and proves itself by the secret."""
    return superexec(server.superlink, server.path, f"--root-certificates={server.path / 'ca.crt'}")


def proxy_command(server: Server) -> tuple[str, ...]:
    """The proxy, as it is started here."""
    return (find("nginx", "install it (Debian: `apt-get install nginx`)"), *proxy_arguments(server))


def proxy_arguments(server: Server) -> tuple[str, ...]:
    """Nginx in the server's folder."""
    return "-e", "stderr", "-p", f"{server.path}/", "-c", str(server.path / "nginx.conf")


def stream_module() -> tuple[str, ...]:
    """The arguments that give nginx its stream module, which counts connections; DeployError where it has none."""
    program = find("nginx", "install it (Debian: `apt-get install nginx libnginx-mod-stream`)")
    built = subprocess.run([program, "-V"], capture_output=True, text=True, check=False).stderr.split()
    if "--with-stream" in built:
        return ()
    folder = next((word.partition("=")[2] for word in built if word.startswith("--modules-path=")), "")
    module = Path(folder or "/usr/lib/nginx/modules") / "ngx_stream_module.so"
    if not module.is_file():
        raise DeployError(
            "nginx has no stream module, which counts an address's connections before it can take all of them; install"
            " it (Debian: `apt-get install libnginx-mod-stream`)"
        )
    return "-g", f"load_module {module};"
