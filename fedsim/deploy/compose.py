# SPDX-License-Identifier: Apache-2.0
"""The same federation in containers: a compose file, whose commands are those that `fedsim deploy server` starts.

SuperLink, SuperExec and proxy share one network namespace, so that Flower listens on loopback here too, and only the
proxy's port is published. Each container is given what it needs: the proxy never sees the database, a client never
another's key.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

import fedsim
from fedsim.deploy.layout import Server, is_address
from fedsim.deploy.server import proxy_arguments, superexec_arguments, superlink_arguments
from fedsim.deploy.templates import FILES

NGINX = "nginx:1.28.0-alpine-slim"
INSIDE = PurePosixPath("/server")
_ASKS = """\
import ssl, urllib.request
context = ssl.create_default_context(cafile='/server/ca.crt')
urllib.request.urlopen('https://localhost:{port}/health', context=context, timeout=4)
"""
_HEAD = """\
# Written by `fedsim deploy init`; the images are built by docker/Dockerfile of fedsim's repository:
#   docker build -f docker/Dockerfile --target server -t fedsim-server:{version} .   (and --target client)
# Start with `docker compose up -d`, in a deployment folder or with FEDSIM_DEPLOYMENT naming one. FEDSIM_USER is the
# user and group that own the folder's files: `FEDSIM_USER=$(id -u):$(id -g)`. Client N's data is in client-N-data/.
"""
Service = dict[str, Any]


def compose_text(server: Server, clients: int) -> str:
    """The compose file of a federation."""
    inside = Server(INSIDE, server.host, server.port, server.superlink_port)  # type: ignore[arg-type] # paths in Linux
    services = {
        "superlink": _superlink(inside),
        "keys": _keys(),
        "superexec": _superexec(inside),
        "proxy": _proxy(inside),
        **{f"client-{number}": _client(number) for number in range(1, clients + 1)},
    }
    document = {"name": "fedsim", "services": services, "networks": {"fleet": {}}}
    return _HEAD.format(version=fedsim.__version__) + yaml.safe_dump(document, sort_keys=False, width=110)


def _hardened(image: str, **more: Any) -> Service:
    return {
        "image": image,
        **(
            {} if image == NGINX else {"pull_policy": "never"}
        ),  # built here: a registry's image of that name is not ours
        "restart": "unless-stopped",
        "read_only": True,
        "user": "${FEDSIM_USER:-10001:10001}",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp:mode=1777"],
        "pids_limit": 512,
        "mem_limit": "2g",
        **more,
    }


def _superlink(server: Server) -> Service:
    return _hardened(
        f"fedsim-server:{fedsim.__version__}",
        entrypoint=["python", "-I", "-m", "fedsim.deploy.superlink"],
        working_dir="/server",
        command=list(superlink_arguments(server)),
        volumes=[_mount("server", "/server")],
        ports=[f"{server.port}:{server.port}"],
        networks={"fleet": {"aliases": [server.host]} if not is_address(server.host) else {}},
        healthcheck=_healthy("python", "-c", _ASKS.format(port=server.superlink_port)),
    )


def _keys() -> Service:
    """Runs once, before the proxy opens its port."""
    return _beside(
        f"fedsim-server:{fedsim.__version__}",
        {"superlink": "service_healthy"},
        command=["deploy", "keys", "/server"],
        volumes=[_mount("server", "/server")],
        restart="no",
    )


def _superexec(server: Server) -> Service:
    return _beside(
        f"fedsim-server:{fedsim.__version__}",
        {"superlink": "service_healthy"},
        entrypoint=["python", "-I", "-m", "fedsim.deploy.superexec"],
        mem_limit="4g",  # the ServerApp: models, replies, attacks
        command=list(superexec_arguments(server)),
        volumes=[_mount("server", "/server")],
    )


def _proxy(server: Server) -> Service:
    files = ("nginx.conf", "server.crt", "server.key", "ca.crt")
    return _beside(
        NGINX,
        {"keys": "service_completed_successfully"},
        entrypoint=["nginx"],
        command=list(proxy_arguments(server)),
        volumes=[_mount(f"server/{file}", f"/server/{file}", "ro") for file in files],
        tmpfs=["/tmp:mode=1777", "/server/tmp:mode=1777"],
        ulimits={"nofile": FILES},
        healthcheck=_healthy("nc", "-z", "127.0.0.1", str(server.port)),
    )


def _beside(image: str, after: dict[str, str], **more: Any) -> Service:
    """A container in the network namespace of the SuperLink."""
    depends = {name: {"condition": condition} for name, condition in after.items()}
    return _hardened(image, network_mode="service:superlink", depends_on=depends, **more)


def _client(number: int) -> Service:
    name = f"client-{number}"
    return _hardened(
        f"fedsim-client:{fedsim.__version__}",
        command=["deploy", "client", "/client", "--data", "/data/data.npz", "--policy", "/client/policy.yaml"],
        volumes=[_mount(name, "/client"), _mount(f"{name}-data", "/data", "ro")],
        networks=["fleet"],
        depends_on={"proxy": {"condition": "service_healthy"}},
        mem_limit="8g",  # training takes several times model and data
        healthcheck=_healthy("python", "-I", "-m", "fedsim.deploy.contact", "/client"),
    )


def _mount(source: str, target: str, mode: str = "rw") -> str:
    return f"${{FEDSIM_DEPLOYMENT:-.}}/{source}:{target}:{mode}"


def _healthy(*command: str) -> Service:
    return {"test": ["CMD", *command], "interval": "10s", "timeout": "5s", "retries": 12, "start_period": "60s"}
