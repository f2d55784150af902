"""`ds-encdec push-to-hub`: the real client against a server that answers as the hub does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from ds_encdec.checkpoint.hub import push_to_hub
from ds_encdec.types import CheckpointError, ConfigError

TOKEN = "hf_a_secret_of_someone"
FILES = {"README.md": "---\nlicense: mit\n---\na card", "config.json": "{}", "model.safetensors": "weights"}


class Hub(ThreadingHTTPServer):
    """Records requests; `private`, `refuses`: how it answers."""

    calls: list[tuple[str, str | None, bytes]]
    private = True
    refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.calls.append((self.path, self.headers["Authorization"], body))
        answers: dict[str, Any] = {
            "create": {"url": f"{self.server.url}/someone/model", "name": "someone/model"},
            "validate-yaml": {"errors": [], "warnings": []},
            "preupload": {},
            "commit": {"commitUrl": f"{self.server.url}/someone/model/commit/abc", "commitOid": "abc"},
            "branch": {},
        }
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            answers["preupload"] = {"files": [one | {"shouldIgnore": False, "oid": None} for one in files]}
        kind = next(name for name in answers if name in self.path.split("/"))
        self.answer(403 if self.server.refuses else 200, answers[kind])

    def do_GET(self) -> None:
        self.server.calls.append((self.path, self.headers["Authorization"], b""))
        self.answer(200, {"id": "someone/model", "private": self.server.private, "siblings": []})

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), Answers) as server:
        server.calls = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    for name, content in FILES.items():
        (tmp_path / "out" / name).write_text(content)
    return tmp_path / "out"


def push(folder: Path, *arguments: str, hub: Hub | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    env = {"HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9", "HF_HOME": str(folder.parent), "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "ds_encdec.cli", "push-to-hub", str(folder), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=kept | env)
    assert TOKEN not in run.stdout + run.stderr
    return run


def test_an_export_is_uploaded_in_one_commit(folder: Path, hub: Hub) -> None:
    run = push(folder, "someone/model", "--private", "--revision", "v1", "--message", "first", hub=hub)
    assert (run.returncode, run.stdout) == (0, f"uploaded: {hub.url}/someone/model/commit/abc\n"), run.stderr
    assert {token for path, token, _ in hub.calls if "/model" in path or "/repos/" in path} == {f"Bearer {TOKEN}"}
    bodies = {path.split("?")[0]: body for path, _, body in hub.calls}
    created = json.loads(bodies["/api/repos/create"])
    assert created.get("visibility") == "private" or created.get("private") is True  # by huggingface_hub 2 or 1
    assert "/api/models/someone/model/branch/v1" in bodies
    (head, *files) = map(json.loads, bodies["/api/models/someone/model/commit/v1"].splitlines())
    assert head["value"]["summary"] == "first"
    sent = {one["value"]["path"]: base64.b64decode(one["value"]["content"]).decode() for one in files}
    assert sent == FILES


def test_what_cannot_be_uploaded_is_said(folder: Path, hub: Hub) -> None:
    hub.private = False
    run = push(folder, "someone/model", "--private", hub=hub)
    assert (run.returncode, "is public" in run.stderr) == (2, True)
    assert not any("/commit/" in path for path, *_ in hub.calls)
    hub.refuses = True
    run = push(folder, "someone/model", hub=hub)
    assert (run.returncode, "403" in run.stderr, "Traceback" in run.stderr) == (1, True, False), run.stderr
    run = push(folder, "someone/model")  # nobody listens
    assert (run.returncode, "could not be uploaded to someone/model at http://127.0.0.1:9" in run.stderr) == (1, True)


def test_bad_requests_never_reach_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", " ")
    for repo, message in (("a/b/c", "REPO_ID"), ("model", "write OWNER/model"), ("a/b", "HF_TOKEN is not set")):
        with pytest.raises(ConfigError, match=message):
            push_to_hub(folder, repo)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        push_to_hub(folder, "a/b")
    (folder / "README.md").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors, no README\.md"):
        push_to_hub(folder, "a/b")
    (folder / "manifest.json").touch()
    with pytest.raises(CheckpointError, match="ds-encdec export"):
        push_to_hub(folder, "a/b")
