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
LARGEST_BODIES = {"push-object": "8m", "push-messages": "4m"}
"""Of a request: Flower sends arrays in pieces of 5 MB, and a message as the numbers of its pieces."""
LARGEST_OTHER = "64k"
FILES = 32768
"""Open files of the proxy's workers, if the machine allows it: a connection takes five."""
CONNECTIONS = 128
"""From one address, counted from the accept; a client has about four."""


def nginx(server: Server, files: int = FILES) -> str:
    """The proxy: connections counted, TLS, the fleet's paths only, bounded in rate and size.

    Paths of files are relative to the server's folder. A path of a request is passed on as it was matched, never as it
    was sent: no trick with dots, slashes or escapes reaches Flower.
    """
    return f"""\
# Written by `fedsim deploy init`. Started by `fedsim deploy server`.
daemon off;
worker_processes 2;
worker_rlimit_nofile {files};
pid tmp/nginx.pid;
error_log stderr warn;

events {{
    worker_connections {files // 2};
}}

# Connections are counted before a byte of them is read: the http half counts only those whose request it has read, so
# that one address could take all of them with requests that it never finishes.
stream {{
    limit_conn_zone $binary_remote_addr zone=accepted:10m;
    limit_conn_log_level notice;

    server {{
        listen {server.port};
        listen [::]:{server.port};
        limit_conn accepted {CONNECTIONS};
        proxy_pass 127.0.0.1:{server.tls_port};
        proxy_protocol on;
        proxy_connect_timeout 5s;
        proxy_timeout 310s;
    }}
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
        listen 127.0.0.1:{server.tls_port} ssl proxy_protocol;
        set_real_ip_from 127.0.0.1;
        real_ip_header proxy_protocol;

        ssl_certificate server.crt;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_prefer_server_ciphers off;
        ssl_session_tickets off;

        # The first is for the handshake, too.
        client_header_timeout 10s;
        client_body_timeout 20s;
        send_timeout 60s;
        reset_timedout_connection on;
        limit_req zone=requests burst=1000;
        limit_conn connections 64;

        location / {{
            return 404;
        }}
{"".join(_location(name, size) for name, size in LARGEST_BODIES.items())}\
{_location("|".join(name for name in FLEET if name not in LARGEST_BODIES), LARGEST_OTHER)}\
    }}
}}
"""


def _location(names: str, largest_body: str) -> str:
    """Some of the fleet's paths, and the size of a request to them."""
    return f"""
        location ~ ^/v1/fleet/({names})$ {{
            limit_except POST {{
                deny all;
            }}
            client_max_body_size {largest_body};
            proxy_pass https://superlink/v1/fleet/$1;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_ssl_trusted_certificate ca.crt;
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_session_reuse on;
            # Nothing is buffered: the SuperLink refuses a body before it is read, and an outsider could fill the disk
            # with files, which a worker that is not this folder's owner could not write anyway.
            proxy_request_buffering off;
            proxy_max_temp_file_size 0;
            proxy_connect_timeout 5s;
            proxy_read_timeout 300s;
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
    return _unit("server", folder, f"{program} deploy server {folder}", "4G")


def client_unit(client: Client, program: str) -> str:
    """The systemd unit of a client; the folder and the data are where they are put on the client's machine."""
    place = Path("/srv/fedsim") / client.name
    command = f"{program} deploy client {place} --data {place}/data.npz --policy {place}/policy.yaml"
    return _unit(client.name, place, command, "8G")


def _unit(name: str, place: Path, command: str, memory: str) -> str:
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
Type=notify
NotifyAccess=main
TimeoutStartSec=300
WatchdogSec=120
LimitNOFILE={FILES}
# Beyond that it is ended and started again, not the machine. Training takes several times model and data: raise it.
MemoryMax={memory}
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
One more: `fedsim deploy add-client {server.path.parent}`.
Another key for one: `fedsim deploy new-key {server.path.parent} client-N`.
"""
