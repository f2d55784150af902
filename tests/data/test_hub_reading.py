"""Data sets on a hub, and folders like them: commits, broken connections, files that are not alike, odd values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet
from huggingface_hub import hf_file_system
from huggingface_hub.utils import http_backoff
from local_hub import LocalHub, local_hub

from ds_encdec.base.types import CheckpointError, DataError
from ds_encdec.config.schema import FullConfig, MixtureSource
from ds_encdec.data.sources import hub_errors
from ds_encdec.data.sources.sources import BadRow, Row, all_rows
from ds_encdec.data.sources.tables import ParquetFiles, open_hub_data, resolve_commits

NAME = "someone/texts"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(tmp_path, monkeypatch) as hub:
        yield hub


def parquet_files(folder: Path, documents: list[str]) -> dict[str, Path]:
    folder.mkdir()
    paths = [write_parquet(folder / f"train-{i}.parquet", documents[i::2], row_group_size=20) for i in range(2)]
    return {Path(path).name: Path(path) for path in paths}


def config_of(*, streaming: bool, **fields: Any) -> FullConfig:
    return make_config(dataset_name=NAME, streaming=streaming, **fields)


def first_step(config: FullConfig, **more: Any) -> tuple[dict[str, Any], list[Any]]:
    data = make_data(config, num_lanes=2, **more)
    return json.loads(json.dumps(data.saved())), [batch.labels.tolist() for batch in next(data.loader)]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_push_changes_nothing_for_a_run_that_has_begun(hub: LocalHub, tmp_path: Path, streaming: bool) -> None:
    config = config_of(streaming=streaming)
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
    pinned, again = first_step(config_of(streaming=streaming, dataset_revision="v1"))
    assert pinned["dataset_commits"] == {f"{NAME}@v1": first}
    assert again == batches
    with pytest.raises(CheckpointError, match=rf"commit {first}\) there, .*commit {second}\) now"):
        make_data(config, num_lanes=2, saved=saved, commits={f"{NAME}@main": second})
    with pytest.raises(DataError, match="v9"):
        make_data(config_of(streaming=streaming, dataset_revision="v9"))


@pytest.fixture
def streamed(hub: LocalHub, tmp_path: Path) -> ParquetFiles:
    hub.push(parquet_files(tmp_path / "one", texts(200)))
    source = open_hub_data(MixtureSource(weight=1.0, dataset_name=NAME), 1, streaming=True)
    assert isinstance(source, ParquetFiles)
    return source


def read(source: ParquetFiles) -> list[str]:
    return [document.text for unit in range(source.num_units) for document in source.documents(unit, 0)]


def shorten_patience(monkeypatch: pytest.MonkeyPatch, retries: int) -> None:
    """Our pauses in milliseconds, and huggingface_hub's own retries, of up to 23 s a request, switched off."""
    monkeypatch.setattr(hub_errors, "RETRY_DELAYS_SECONDS", (0.01,) * retries)
    monkeypatch.setattr(hf_file_system, "http_backoff", partial(http_backoff, max_retries=0))


@pytest.mark.parametrize("how", ["cut", "error"])
def test_broken_connections_are_outlived(
    hub: LocalHub, streamed: ParquetFiles, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_patience(monkeypatch, 4)
    expected = texts(200)[0::2] + texts(200)[1::2]
    assert read(streamed) == expected
    hub.breaking, hub.breaking_how = 3, how
    with caplog.at_level(logging.WARNING, logger=hub_errors.__name__):
        assert read(streamed) == expected
    assert hub.breaking == 0
    assert [number for number in range(1, 9) if f"parquet: attempt {number} failed" in caplog.text] == [1, 2, 3]


def test_patience_ends_with_a_data_error(
    hub: LocalHub, streamed: ParquetFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_patience(monkeypatch, 2)
    hub.breaking = 10**6
    before = hub.content_requests
    with pytest.raises(DataError, match=r"train-0.parquet: cannot be read after 3 attempts \(RemoteProtocolError"):
        read(streamed)
    assert hub.content_requests == before + 3


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
    monkeypatch.setattr(hub_errors, "RETRY_DELAYS_SECONDS", ())
    config = config_of(streaming=True)
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
