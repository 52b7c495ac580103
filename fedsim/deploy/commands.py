# SPDX-License-Identifier: Apache-2.0
"""`fedsim deploy ...`: a federation on real machines. (`submit`, which runs a scenario, is with `run` in `fedsim.cli`.)

Whatever takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.deploy.processes import log_to_screen

app = typer.Typer(help="Run a federation on real machines.")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The deployment folder, or its server folder.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    host: Annotated[
        list[str], typer.Option(metavar="NAME", help="The server's name or address, as clients reach it; repeatable.")
    ],
    clients: Annotated[int, typer.Option(min=1, max=10_000, help="How many clients there are.")] = 3,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that clients connect to.")] = 8443,
    superlink_port: Annotated[int, typer.Option(min=1, max=65535, help="Flower's own port, on loopback.")] = 8000,
) -> None:
    """Make a folder with certificates, keys and configuration for a server and its clients."""
    from fedsim.deploy.init import create

    server = create(folder, clients, host, port, superlink_port)
    print(
        f"wrote {folder} for {server.host}:{server.port} and {clients} clients; {folder / 'README.txt'} says what next"
    )


@app.command()
def server(folder: FolderArgument) -> None:
    """Run the server: SuperLink, SuperExec and the proxy."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.server import serve

    log_to_screen()
    serve(open_server(folder))


@app.command()
def client(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="This client's folder.")],
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="The file that holds this client's data.")] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What this client allows; by default its policy.yaml.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the columns of a table are; it is encoded by that.")
    ] = None,
) -> None:
    """Take part as a client, until stopped."""
    from fedsim.deploy.client import join
    from fedsim.deploy.layout import open_client

    log_to_screen()
    join(open_client(folder), data, policy, schema)


@app.command()
def encode(
    schema: Annotated[Path, typer.Argument(metavar="SCHEMA", help="What the columns of the table are.")],
    data: Annotated[Path, typer.Argument(metavar="FILE", help="The table, a .csv or .csv.gz file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .npz file to write.")],
) -> None:
    """Encode a table by a schema, as `client --schema` does: for the rows that a server evaluates with."""
    from fedsim.deploy.encoding import write_encoded

    log_to_screen()
    found = write_encoded(schema, data, out, held_out=True)
    print(f"wrote {out}: {found.x.shape[0]} rows of {found.x.shape[1]} numbers, {found.clipped} beyond their ranges")


@app.command()
def revoke(
    folder: FolderArgument, name: Annotated[str, typer.Argument(metavar="CLIENT", help="Its name: client-2.")]
) -> None:
    """Shut a client out, at once and for good."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.nodes import revoke as shut_out

    now = shut_out(open_server(folder), name)
    print(f"{name} is shut out" + ("" if now else " (the server does not run here; it is when it starts)"))


@app.command("add-client")
def add_client(folder: FolderArgument) -> None:
    """Add one more client: its folder, its number, and its key, which the server accepts at once."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.members import add_client as add

    opened = open_server(folder)
    place, now = add(opened.path.parent, opened)
    print(f"wrote {place}; carry it to its machine, and delete it here{_when(now)}")


@app.command("new-key")
def new_key(
    folder: FolderArgument, name: Annotated[str, typer.Argument(metavar="CLIENT", help="Its name: client-2.")]
) -> None:
    """Give a client a new key; the old one is shut out at once. A client that was revoked may take part again."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.members import new_key as issue

    opened = open_server(folder)
    place, now = issue(opened.path.parent, opened, name)
    print(f"wrote {place / 'key'}; carry it to {name}'s folder, delete it here, and restart {name}{_when(now)}")


def _when(now: bool) -> str:
    return "" if now else " (the server does not run here; it knows of it when it starts)"


@app.command()
def keys(folder: FolderArgument) -> None:
    """Make a running SuperLink know the keys in server/clients and no others (`server` does it by itself)."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.nodes import follow_keys, statuses

    opened = open_server(folder)
    follow_keys(opened)
    for name, status in statuses(opened).items():
        print(f"{name}: {status}")


@app.command()
def renew(
    folder: FolderArgument,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of the server; repeatable.")
    ] = None,
) -> None:
    """Give the server a new certificate by the same authority (needs ca/ca.key); clients need nothing."""
    from fedsim.deploy.init import renew as new_certificate
    from fedsim.deploy.layout import open_server

    names = new_certificate(folder, host or (), open_server(folder))
    print(f"a new certificate for {', '.join(names)}; restart the server")


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A deployment, server or client folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")] = False,
) -> None:
    """Say what is wrong with a folder and its machine, and what to do about it."""
    from fedsim.deploy.doctor import examine, show

    findings = examine(folder)
    show(findings, as_json)
    if any(finding.status == "wrong" for finding in findings):
        raise typer.Exit(1)
