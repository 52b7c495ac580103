# SPDX-License-Identifier: Apache-2.0
"""A hub on loopback: as much of the Hugging Face hub's protocol as its own client needs to load a data set.

It is the client's proxy too: whatever the client asks of anybody else is written down, and refused.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class Hub:
    """Data sets by name, each a repository of files with one commit."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    """The path of everything that was asked of this hub."""
    strangers: list[str] = field(default_factory=list)
    """Host and port of whomever else the client wanted to speak with."""

    def environment(self, home: Path) -> dict[str, str]:
        """Points the real client at this hub, and at this proxy for everything else; `home` is its cache."""
        proxy = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), self.endpoint) | {"no_proxy": "127.0.0.1"}
        shouted = {name.upper(): value for name, value in proxy.items()}
        return {**proxy, **shouted, "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}

    def commit(self, name: str) -> str:
        """The hash of the only commit, a function of the content."""
        files = sorted(self.repositories[name].items())
        return hashlib.sha1(b"".join(path.encode() + data for path, data in files)).hexdigest()

    def info(self, name: str) -> dict[str, Any]:
        """What the API says of a data set."""
        siblings = [{"rfilename": path} for path in sorted(self.repositories[name])]
        gated = "auto" if name in self.gated else False
        return {
            "_id": "0" * 24, "id": name, "author": name.split("/")[0], "sha": self.commit(name), "private": False,
            "gated": gated, "disabled": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings,
            "lastModified": DATE, "createdAt": DATE,
        }  # fmt: skip

    def tree(self, name: str) -> list[dict[str, Any]]:
        """Every folder and file of a data set."""
        files = sorted(self.repositories[name].items())
        folders = sorted({str(parent) for path, _ in files for parent in Path(path).parents} - {"."})
        return [
            *({"type": "directory", "path": path, "oid": _oid(path.encode()), "size": 0} for path in folders),
            *({"type": "file", "path": path, "oid": _oid(data), "size": len(data)} for path, data in files),
        ]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of 127.0.0.1, for as long as the context lasts."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def do_CONNECT(self) -> None:
        self.hub.strangers.append(urlsplit(self.path).netloc or self.path)
        self._refuse(HTTPStatus.FORBIDDEN, "Forbidden", "this proxy leads nowhere")

    def do_GET(self) -> None:
        if not self.path.startswith("/"):
            return self.do_CONNECT()
        self.hub.requests.append(self.path)
        path = unquote(urlsplit(self.path).path)
        words = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        name, (what, revision), where = "/".join(words[:2]), (words[2:4] or ["revision", "main"]), "/".join(words[4:])
        if name not in self.hub.repositories:  # the hub does not say whether it is missing or private
            return self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password.")
        if revision not in ("main", self.hub.commit(name)):
            return self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        match path.startswith("/api/"), what:
            case True, "revision":
                return self._json(self.hub.info(name))
            case True, "tree":
                return self._tree(name, where)
            case False, "resolve":
                return self._file(name, where)
        return self._refuse(HTTPStatus.NOT_FOUND, "", f"nothing is known of {path}")

    do_HEAD = do_GET  # noqa: N815

    def _tree(self, name: str, folder: str) -> None:
        start = f"{folder}/" if folder else ""
        found = [entry for entry in self.hub.tree(name) if entry["path"].startswith(start)]
        if parse_qs(urlsplit(self.path).query).get("recursive") != ["true"]:
            found = [entry for entry in found if "/" not in entry["path"].removeprefix(start)]
        if folder and not found:
            return self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound", f"{folder} does not exist")
        return self._json(found)

    def _file(self, name: str, path: str) -> None:
        data = self.hub.repositories[name].get(path)
        if name in self.hub.gated:
            return self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo", f"Access to dataset {name} is restricted.")
        if data is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        return self._send(HTTPStatus.OK, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": self.hub.commit(name)})

    def _json(self, document: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
