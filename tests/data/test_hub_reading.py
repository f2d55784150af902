"""Data sets on a hub, and folders like them: commits, broken connections, files that are not alike, odd values."""

import json
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet
from huggingface_hub import HfFileSystem, hf_file_system
from huggingface_hub.utils import http_backoff

from ds_encdec.base.types import CheckpointError, DataError
from ds_encdec.config.schema import FullConfig, MixtureSource
from ds_encdec.data.sources import hub_errors
from ds_encdec.data.sources.sources import BadRow, Row, all_rows
from ds_encdec.data.sources.tables import ParquetFiles, open_hub_data, resolve_commits

NAME = "someone/texts"


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
        self.server.content_requests += self.command == "GET"
        if self.command == "HEAD" or not self.server.breaking:
            self._send(status, content, headers)
            return
        self.server.breaking -= 1
        if self.server.breaking_how == "error":
            self._send(500, b"", {})
        else:
            self._send(206, content, {}, sent=len(content) // 2)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _send(self, status: int, content: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A running hub that this process takes for the real one."""
    hub = LocalHub()
    Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    url = f"http://127.0.0.1:{hub.server_port}"
    constants = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    HfFileSystem.clear_instance_cache()
    try:
        yield hub
    finally:
        HfFileSystem.clear_instance_cache()
        hub.shutdown()
        hub.server_close()


def parquet_files(folder: Path, documents: list[str]) -> dict[str, Path]:
    folder.mkdir()
    paths = [write_parquet(folder / f"train-{i}.parquet", documents[i::2], row_group_size=20) for i in range(2)]
    return {Path(path).name: Path(path) for path in paths}


def first_step(config: FullConfig, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    data = make_data(config, num_lanes=2, **more)
    return json.loads(json.dumps(data.saved())), [batch.labels.tolist() for batch in next(data.loader)]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_push_changes_nothing_for_a_run_that_has_begun(hub: LocalHub, tmp_path: Path, streaming: bool) -> None:
    config = make_config(dataset_name=NAME, streaming=streaming)
    first = hub.push(parquet_files(tmp_path / "one", texts(200)), "v1")
    saved, batches = first_step(config)
    assert saved["dataset_commits"] == {f"{NAME}@main": first}
    assert saved["fingerprint"]["sources"][0]["commit"] == first

    second = hub.push(parquet_files(tmp_path / "two", texts(200, seed=5)))
    assert first_step(config, saved=saved) == (saved, batches)
    assert first_step(config, commits=saved["dataset_commits"]) == (saved, batches)  # as another rank has found it
    new, other = first_step(config)
    assert new["dataset_commits"] == {f"{NAME}@main": second}
    assert other != batches
    pinned, again = first_step(make_config(dataset_name=NAME, streaming=streaming, dataset_revision="v1"))
    assert pinned["dataset_commits"] == {f"{NAME}@v1": first}
    assert again == batches
    with pytest.raises(CheckpointError, match=rf"commit {first}\) there, .*commit {second}\) now"):
        make_data(config, num_lanes=2, saved=saved, commits={f"{NAME}@main": second})
    with pytest.raises(DataError, match="v9"):
        make_data(make_config(dataset_name=NAME, streaming=streaming, dataset_revision="v9"))


@pytest.fixture
def streamed(hub: LocalHub, tmp_path: Path) -> ParquetFiles:
    hub.push(parquet_files(tmp_path / "one", texts(200)))
    source = open_hub_data(MixtureSource(weight=1.0, dataset_name=NAME), 1, streaming=True)
    assert isinstance(source, ParquetFiles)
    return source


def read(source: ParquetFiles) -> list[str]:
    return [document.text for unit in range(source.num_units) for document in source.documents(unit, 0)]


@pytest.mark.parametrize("how", ["cut", "error"])
def test_broken_connections_are_outlived(
    hub: LocalHub, streamed: ParquetFiles, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_errors, "RETRY_DELAYS_SECONDS", (0.01,) * 4)
    monkeypatch.setattr(hf_file_system, "http_backoff", partial(http_backoff, max_retries=0))
    expected = texts(200)[0::2] + texts(200)[1::2]
    assert read(streamed) == expected
    hub.breaking, hub.breaking_how = 3, how
    with caplog.at_level(logging.WARNING, logger=hub_errors.__name__):
        assert read(streamed) == expected
    assert hub.breaking == 0
    assert [number for number in range(1, 9) if f"parquet: attempt {number} failed" in caplog.text] == [1, 2, 3]


def test_what_will_never_work_is_not_tried_again(hub: LocalHub, streamed: ParquetFiles) -> None:
    hub.commits = {sha: {} for sha in hub.commits}  # the files are gone
    before = hub.content_requests
    with pytest.raises(DataError, match="cannot be read after 1 attempt "):
        read(streamed)
    assert hub.content_requests == before


def test_rows_go_on_behind_the_last_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_errors, "RETRY_DELAYS_SECONDS", (0.0,))
    starts: list[int] = []

    def rows(first: int) -> Iterator[int]:
        starts.append(first)
        for row in range(first, 10):
            if row in (3, 7) and row != first:
                raise ConnectionResetError("gone")
            yield row

    assert list(hub_errors.retry_rows(rows, 1, "numbers")) == list(range(1, 10))
    assert starts == [1, 3, 7]  # patience is restored by every row that arrives
    gone = mock.Mock(side_effect=ConnectionResetError("gone"))
    with pytest.raises(DataError, match=r"numbers: cannot be read after 2 attempts \(ConnectionResetError: gone\)"):
        list(hub_errors.retry_rows(gone, 1, "numbers"))
    assert gone.call_count == 2


def test_what_is_wrong_with_the_data_is_not_tried_again() -> None:
    attempts: list[int] = []

    def rows(first: int, error: Exception) -> Iterator[int]:
        attempts.append(first)
        yield first
        raise error

    for is_local, error in ((False, KeyError("column")), (False, ValueError("no JSON")), (True, OSError("bad page"))):
        attempts.clear()
        with pytest.raises(DataError, match="a set, from row 6 on: cannot be read"):
            list(hub_errors.retry_rows(partial(rows, error=error), 5, "a set", is_local=is_local))
        assert attempts == [5]


def test_a_hub_that_does_not_answer_is_named(
    hub: LocalHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.shutdown()
    hub.server_close()  # connections are refused from now on
    monkeypatch.setattr("time.sleep", lambda _: None)
    config = make_config(dataset_name=NAME, streaming=True)
    with caplog.at_level(logging.WARNING):
        assert resolve_commits(config.data) == {}
    assert f"{NAME}: its commit is not known" in caplog.text
    with pytest.raises(DataError, match=f"data.dataset_name={NAME}.*The hub cannot be reached"):
        make_data(config)


TEXTS = texts(20)
OTHER = '{"text": "x", "label": 1}'


def json_lines(folder: Path, last: str) -> None:
    for name, more in (("a", ""), ("b", last)):
        path = Path(write_json_lines(folder / f"train_{name}.jsonl", TEXTS))
        path.write_text(path.read_text() + more)


def two_columns(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "train_a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1] * 20}), folder / "train_b.parquet")


def rows_of(folder: Path, *, streaming: bool, whole: bool = False) -> list[Row]:
    entry = MixtureSource(weight=1, dataset_name=str(folder))
    columns = (lambda existing: existing) if whole else None
    return list(all_rows(open_hub_data(entry, 1, streaming=streaming, columns=columns), "test"))


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("write", "streamed", "downloaded"),
    [
        (partial(json_lines, last=OTHER), "b.jsonl, from row 0 on: .*names don't match.*data.streaming=false", [41, 0]),
        (partial(json_lines, last='{"text": "x'), "b.jsonl, from row 0 on: .*on_bad_row=skip", [41, 1]),
        (two_columns, [40, 0], "cannot be read .*same columns and types.*data.streaming=true"),
    ],
)
def test_files_that_are_not_alike_are_read_row_by_row_or_named(
    folder: Path, write: Callable[[Path], None], streamed: str | list[int], downloaded: str | list[int]
) -> None:
    write(folder)
    for streaming, expected in ((True, streamed), (False, downloaded)):
        if isinstance(expected, str):
            with pytest.raises(DataError, match=expected):
                rows_of(folder, streaming=streaming)
        else:
            rows = rows_of(folder, streaming=streaming)
            assert [len(rows), sum(isinstance(row, BadRow) for row in rows)] == expected


@pytest.mark.parametrize("streaming", [True, False])
def test_no_fields_of_a_csv_file_are_shifted_nor_guessed(folder: Path, streaming: bool) -> None:
    (folder / "train.csv").write_text("text,n\nhello, you,1\nNA,01\n")
    first, second = sorted(rows_of(folder, streaming=streaming, whole=True), key=lambda row: row.key)
    assert isinstance(first, BadRow)
    assert "3 fields, and the first line names 2 columns" in first.problem
    assert second.record == {"text": "NA", "n": "01"}

    (folder / "train.csv").write_text("text,n\nhello, you,1\nand, me,2\n")  # pandas makes row numbers of `hello`
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  sep: ','\n  quotechar: '|'\n---\n"
    )
    with pytest.raises(DataError, match="more fields than its first line names"):
        rows_of(folder, streaming=streaming, whole=True)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_value_that_python_cannot_hold_makes_its_row_a_bad_one(folder: Path, streaming: bool) -> None:
    when = pyarrow.array([0, 2**62, 0], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "when": when}), folder / "train.parquet")
    rows = rows_of(folder, streaming=streaming, whole=True)
    assert [row.problem for row in rows if isinstance(row, BadRow)] == [
        f"{'train.parquet, row group 0, row 1' if streaming else f'{folder}/train:1'}: a value of it cannot be read "
        "(OverflowError: date value out of range)"
    ]
