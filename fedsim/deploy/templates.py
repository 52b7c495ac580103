# SPDX-License-Identifier: Apache-2.0
"""The files of a deployment folder, as text."""

from __future__ import annotations

from pathlib import Path

import fedsim
from fedsim.deploy.layout import Client, Server

FLEET = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
"""What an authenticated SuperNode calls; registering itself is not among it, and nothing else passes the proxy."""
LARGEST_BODY = "16m"
"""Of a request: Flower sends arrays in pieces of 5 MB."""


def nginx(server: Server) -> str:
    """The proxy: TLS, the fleet's paths only, bounded in rate and size. Paths are relative to the server's folder.

    A path is passed on as it was matched, never as it was sent: no trick with dots, slashes or escapes reaches Flower.
    """
    return f"""\
# Written by `fedsim deploy init`. Started by `fedsim deploy server`.
daemon off;
worker_processes 2;
pid tmp/nginx.pid;
error_log stderr warn;

events {{
    worker_connections 1024;
}}

http {{
    access_log off;
    server_tokens off;
    default_type application/octet-stream;
    client_body_temp_path tmp/body;
    proxy_temp_path tmp/proxy;
    fastcgi_temp_path tmp/fastcgi;
    uwsgi_temp_path tmp/uwsgi;
    scgi_temp_path tmp/scgi;

    # For each address: a SuperNode asks every 3 seconds, and sends a model in many small requests.
    limit_req_zone $binary_remote_addr zone=requests:10m rate=100r/s;
    limit_conn_zone $binary_remote_addr zone=connections:10m;

    upstream superlink {{
        server {server.superlink};
        keepalive 32;
    }}

    server {{
        listen {server.port} ssl;
        listen [::]:{server.port} ssl;

        ssl_certificate server.crt;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_prefer_server_ciphers off;
        ssl_session_tickets off;

        client_header_timeout 10s;
        client_body_timeout 60s;
        send_timeout 60s;
        client_max_body_size {LARGEST_BODY};
        limit_req zone=requests burst=1000;
        limit_conn connections 64;

        location / {{
            return 404;
        }}

        location ~ ^/v1/fleet/({"|".join(FLEET)})$ {{
            limit_except POST {{
                deny all;
            }}
            proxy_pass https://superlink/v1/fleet/$1;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_ssl_trusted_certificate ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_session_reuse on;
            # Nothing is buffered in files: a worker that is not this folder's owner may not write them, and an outsider
            # could fill the disk with them.
            proxy_request_buffering off;
            proxy_max_temp_file_size 0;
            proxy_connect_timeout 5s;
            proxy_read_timeout 300s;
        }}
    }}
}}
"""


def server_toml(host: str, port: int, superlink_port: int) -> str:
    """The server's configuration."""
    return f"""\
host = "{host}"
# What clients connect to; open this port, and no other.
port = {port}
# Flower's SuperLink, on 127.0.0.1 only: whoever reaches it can start and stop runs.
superlink_port = {superlink_port}
"""


def client_toml(client: Client) -> str:
    """A client's configuration."""
    return f"""\
name = "{client.name}"
# The server, as it is named in its certificate.
host = "{client.host}"
port = {client.port}
# Which client of the federation this is, and of how many.
partition_id = {client.partition}
num_partitions = {client.partitions}
# On 127.0.0.1, between the SuperNode and its SuperExec; give each client of one machine its own.
runtime_port = {client.runtime_port}
"""


def flower_config(server: Server) -> str:
    """`config.toml` of the flwr command: the operator's connection to the SuperLink."""
    return f"""\
[superlink]
default = "fedsim"

[superlink.fedsim]
address = "{server.superlink}"
root-certificates = "{server.path / "ca.crt"}"
"""


def server_unit(folder: Path, program: str) -> str:
    """The systemd unit of a server."""
    return _unit("server", folder, f"{program} deploy server {folder}")


def client_unit(client: Client, program: str) -> str:
    """The systemd unit of a client; the folder and the data are where they are put on the client's machine."""
    place = Path("/srv/fedsim") / client.name
    command = f"{program} deploy client {place} --data {place}/data.npz --policy {place}/policy.yaml"
    return _unit(client.name, place, command)


def _unit(name: str, place: Path, command: str) -> str:
    return f"""\
# Written by `fedsim deploy init`. Copy to /etc/systemd/system/fedsim-{name}.service, correct the paths and the user
# (`useradd --system fedsim`, `chown -R fedsim: {place}`), then `systemctl enable --now fedsim-{name}`.
[Unit]
Description=fedsim {name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
User=fedsim
ExecStart={command}
Restart=always
RestartSec=15
KillMode=mixed
TimeoutStopSec=30
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={place}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
"""


def readme(server: Server, clients: int) -> str:
    """What to do next."""
    return f"""\
A federation of one server and {clients} clients, made by fedsim {fedsim.__version__}.

1. On the server ({server.host}): `fedsim deploy server {server.path.parent}`.
   Open port {server.port} to the clients, and no other.
2. Carry each client-N folder to its machine (it holds that client's private key: by a safe way, and delete it here).
   There: edit policy.yaml, then `fedsim deploy client client-N --data FILE --policy client-N/policy.yaml`.
3. On either side, `fedsim deploy doctor FOLDER` says what is missing.
4. On the server: `fedsim deploy submit {server.path.parent} scenario.yaml`.

ca/ca.key signs server certificates. Nothing running needs it: keep it offline, for `fedsim deploy renew`.
A client that is lost or leaves: `fedsim deploy revoke {server.path.parent} client-N`.
"""
