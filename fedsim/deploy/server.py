# SPDX-License-Identifier: Apache-2.0
"""The server's processes: SuperLink, SuperExec, and the proxy, which opens its port last.

Everything of Flower listens on loopback. Flower 1.41 lets whoever reaches its control and runtime paths start and stop
runs and register keys, with or without node authentication; so only the fleet's paths pass the proxy.
"""

from __future__ import annotations

import logging

from fedsim.deploy import nodes
from fedsim.deploy.layout import Server
from fedsim.deploy.processes import Program, environment, find, listens, superexec, together
from fedsim.deploy.templates import flower_config, nginx
from fedsim.errors import DeployError

log = logging.getLogger("fedsim")
SECONDS = 120.0  # until a process is ready; imports are slow on a busy machine


def serve(server: Server) -> None:
    """Run the server until one of its processes ends, or it is told to stop."""
    for port, what in ((server.superlink_port, "superlink_port"), (server.port, "port")):
        if listens("127.0.0.1", port):
            raise DeployError(f"{what} {port} is already in use; is the server running? Else change it in server.toml")
    prepare(server)
    with together(environment(server.flower)) as processes:
        processes.start(Program("SuperLink", superlink_command(server), server.path))
        processes.wait_for(lambda: listens("127.0.0.1", server.superlink_port), SECONDS, "SuperLink")
        nodes.follow_keys(server)
        processes.start(Program("SuperExec", superexec_command(server), server.path))
        processes.start(Program("proxy", proxy_command(server), server.path))
        processes.wait_for(lambda: listens("127.0.0.1", server.port), SECONDS, "proxy")
        allowed = [name for name, may in nodes.clients_of(server).items() if may]
        log.info("ready: %s:%d, clients that may take part: %s", server.host, server.port, ", ".join(allowed) or "none")
        name, how = processes.watch()
    raise DeployError(f"{name} {how}, so the server stopped; what it printed says why")


def prepare(server: Server) -> None:
    """Write what follows from the configuration and from where the folder is."""
    server.flower.mkdir(mode=0o700, exist_ok=True)
    (server.path / "tmp").mkdir(mode=0o700, exist_ok=True)
    (server.flower / "config.toml").write_text(flower_config(server))
    (server.path / "nginx.conf").write_text(nginx(server))


def superlink_command(server: Server) -> tuple[str, ...]:
    """The SuperLink, as it is started here."""
    return (find("flower-superlink", "install fedsim in this environment"), *superlink_arguments(server))


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
    return (find("flower-superexec", "install fedsim in this environment"), *superexec_arguments(server))


def superexec_arguments(server: Server) -> tuple[str, ...]:
    """It trusts the server's authority, and proves itself by the secret."""
    return superexec(server.superlink, server.path, f"--root-certificates={server.path / 'ca.crt'}")


def proxy_command(server: Server) -> tuple[str, ...]:
    """The proxy, as it is started here."""
    return (find("nginx", "install it (Debian: `apt-get install nginx`)"), *proxy_arguments(server))


def proxy_arguments(server: Server) -> tuple[str, ...]:
    """Nginx in the server's folder."""
    return "-e", "stderr", "-p", f"{server.path}/", "-c", str(server.path / "nginx.conf")
