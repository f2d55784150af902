"""A small hub on 127.0.0.1: data set repositories with commits, and connections that break on demand."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class LocalHub(ThreadingHTTPServer):
    """As much of the hub's protocol as public data sets need. `breaking`: how many of the next requests for a file's
    content break, by `breaking_how`: `cut` (the connection is closed within the content) or `error` (status 500)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, dict[str, Path]] = {}
        self.references: dict[str, str] = {}
        self.breaking = 0
        self.breaking_how = "cut"
        self.content_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def push(self, files: dict[str, Path], *names: str) -> str:
        """Return the sha of a new commit of these files (name: local path) on `main` and `names`."""
        sha = f"{len(self.commits) + 1:040x}"
        self.commits[sha] = files
        self.references |= dict.fromkeys(["main", *names], sha)
        return sha

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            action, *rest = parts[4:] or ["revision", "main"]
            self._api(action, rest, body)
        else:  # datasets/OWNER/NAME/resolve/REVISION/FILE
            self._content(self._sha(parts[4]), "/".join(parts[5:]))

    do_HEAD = do_POST = do_GET

    def _sha(self, revision: str) -> str | None:
        return self.server.references.get(revision, revision if revision in self.server.commits else None)

    def _api(self, action: str, rest: list[str], body: bytes) -> None:
        sha = self._sha(rest[0]) if rest else None
        if sha is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        if action == "revision":
            facts = {"id": "someone/texts", "sha": sha, "siblings": [], "private": False, "tags": []}
            self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})
            return
        files = [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{sha[-8:]}{name}"}
            for name, path in self.server.commits[sha].items()
        ]
        if action == "paths-info":
            wanted = json.loads(body)["paths"]
            files = [file for file in files if file["path"] in wanted]
        self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def _content(self, sha: str | None, name: str) -> None:
        path = self.server.commits[sha].get(name) if sha else None
        if path is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": sha or "", "ETag": f'"{sha}-{name}"', "Accept-Ranges": "bytes"}
        status = 200
        if (requested := self.headers.get("Range")) and self.command == "GET":
            first, last = (int(part) if part else None for part in requested.removeprefix("bytes=").split("-"))
            whole, content = len(content), content[first : last + 1 if last is not None else None]
            headers["Content-Range"] = f"bytes {first}-{(first or 0) + len(content) - 1}/{whole}"
            status = 206
        if self.command == "GET":
            self.server.content_requests += 1
            if self.server.breaking:
                self.server.breaking -= 1
                self._break(content)
                return
        self._send(status, content, headers)

    def _break(self, content: bytes) -> None:
        if self.server.breaking_how == "error":
            self._send(500, b"", {})
            return
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A running hub that this process takes for the real one, with caches of its own."""
    import datasets
    import huggingface_hub.constants
    from huggingface_hub import HfFileSystem

    hub = LocalHub()
    Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    constants = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    HfFileSystem.clear_instance_cache()
    try:
        yield hub
    finally:
        HfFileSystem.clear_instance_cache()
        hub.shutdown()
        hub.server_close()
