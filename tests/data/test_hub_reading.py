"""Data sets on a hub, and folders like them: commits, broken connections, files that are not alike, odd values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet
from huggingface_hub import hf_file_system
from huggingface_hub.utils import http_backoff
from hypothesis import given
from hypothesis import strategies as st
from local_hub import LocalHub, local_hub

from ds_encdec.base.types import CheckpointError, DataError
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import FullConfig, MixtureSource
from ds_encdec.data.sources import hub_errors
from ds_encdec.data.sources.sources import BadRow, Row, all_rows, shortened
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


def test_a_revision_that_does_not_exist(hub: LocalHub, tmp_path: Path) -> None:
    hub.push(parquet_files(tmp_path / "one", texts(50)))
    with pytest.raises(DataError, match="v9"):
        make_data(config_of(streaming=True, dataset_revision="v9"))


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


@pytest.mark.parametrize("how", ["drop", "cut", "error"])
def test_broken_connections_are_outlived(
    hub: LocalHub, streamed: ParquetFiles, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_patience(monkeypatch, 4)
    expected = texts(200)[0::2] + texts(200)[1::2]
    assert read(streamed) == expected
    for broken in (1, 3):
        hub.breaking, hub.breaking_how = broken, how
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=hub_errors.__name__):
            assert read(streamed) == expected
        assert hub.breaking == 0
        warnings = [record.message for record in caplog.records if record.name == hub_errors.__name__]
        assert [message.partition(" failed")[0].partition("parquet: ")[2] for message in warnings] == [
            f"attempt {attempt} of 5" for attempt in range(1, broken + 1)
        ]


def test_patience_ends_with_a_data_error(
    hub: LocalHub, streamed: ParquetFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_patience(monkeypatch, 2)
    hub.breaking = 10**6
    before = hub.content_requests
    with pytest.raises(
        DataError, match=r"train-0.parquet: cannot be read after 3 attempts \(RemoteProtocolError"
    ) as caught:
        read(streamed)
    assert caught.value.exit_code == 4
    assert hub.content_requests == before + 3


def test_what_will_never_work_is_not_tried_again(hub: LocalHub, streamed: ParquetFiles) -> None:
    hub.commits = {sha: {} for sha in hub.commits}  # the files are gone
    before = hub.content_requests
    with pytest.raises(DataError, match="cannot be read"):
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

    wrong = [TypeError("no cast"), KeyError("column"), RuntimeError("odd"), ValueError("no JSON")]
    for is_local, error in [*((False, one) for one in wrong), (True, OSError("bad page"))]:
        attempts.clear()
        with pytest.raises(DataError, match="a set, from row 6 on: cannot be read"):
            list(hub_errors.retry_rows(partial(rows, error=error), 5, "a set", is_local=is_local))
        assert attempts == [5]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_that_does_not_answer_is_named(
    hub: LocalHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """No network, by a server that is gone. Its library's own error is of whatever HTTP client that has."""
    hub.shutdown()
    hub.server_close()  # connections are refused from now on
    monkeypatch.setattr(hub_errors, "RETRY_DELAYS_SECONDS", ())
    config = config_of(streaming=streaming)
    with caplog.at_level(logging.WARNING):
        assert resolve_commits(config.data) == {}
    assert f"{NAME}: its commit is not known" in caplog.text
    with pytest.raises(DataError, match=f"data.dataset_name={NAME}.*The hub cannot be reached"):
        make_data(config)


TEXTS = texts(20)
OTHER = '{"text": "x", "label": 1}'


def json_lines(folder: Path, last: str) -> None:
    """Two files, of which the second ends with the line `last`."""
    for name, more in (("a", ""), ("b", last)):
        path = Path(write_json_lines(folder / f"train_{name}.jsonl", TEXTS))
        path.write_text(path.read_text() + more)


def two_columns(folder: Path) -> None:
    """Two files, of which the second has another column."""
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "train_a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1] * 20}), folder / "train_b.parquet")


def repeated_column(folder: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(TEXTS)] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, folder / "train_b.parquet")


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
        (repeated_column, "b.parquet: the column text is there more than once", "cannot be read"),
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


def test_validate_sees_a_repeated_column(tmp_path: Path) -> None:
    repeated_column(tmp_path)
    config = make_config(dataset_name="parquet", data_files=str(tmp_path / "train_b.parquet"))
    (found,) = unusable_rows(config.data, config.model)
    assert "the column text more than once" in found.message


def test_an_empty_folder_is_no_matter_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="loose files are read by") as caught:
        rows_of(tmp_path, streaming=True)
    assert "hub" not in str(caught.value).replace("huggingface", "")


def test_texts_of_json_that_become_timestamps_are_not_read_as_others(folder: Path) -> None:
    """Row by row they stay as they are; where `datasets` reads them they are refused, unless nothing reads them."""
    rows = [{"text": "a", "when": {"day": day}} for day in ("2024-01-01", "2024-01-02")]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert all(row.record in rows for row in rows_of(folder, streaming=False, whole=True))  # type: ignore[union-attr]
    with pytest.raises(DataError, match="timestamps of the texts of when"):
        rows_of(folder, streaming=True, whole=True)
    assert len(rows_of(folder, streaming=True)) == 2


TABLE = pyarrow.table(
    {
        "single": pyarrow.array([0.1, None, 1e20], pyarrow.float32()),
        "double": pyarrow.array([0.1, 1 / 3, 1e20], pyarrow.float64()),
        "flag": [True, False, None],
        "list": pyarrow.array([[0.3], None, []], pyarrow.list_(pyarrow.float32())),
        "object": pyarrow.array(
            [{"x": 2.7, "y": "a"}] * 3, pyarrow.struct({"x": pyarrow.float32(), "y": pyarrow.string()})
        ),
    }
)
ROWS = [
    {"single": 0.1, "double": 0.1, "flag": True, "list": [0.3], "object": {"x": 2.7, "y": "a"}},
    {"single": None, "double": 1 / 3, "flag": False, "list": None, "object": {"x": 2.7, "y": "a"}},
    {"single": 1e20, "double": 1e20, "flag": None, "list": [], "object": {"x": 2.7, "y": "a"}},
]


@pytest.mark.parametrize("reader", ["parquet", "table", "stream"])
def test_narrow_floats_are_the_shortest_numbers(tmp_path: Path, reader: str) -> None:
    pyarrow.parquet.write_table(TABLE, tmp_path / "train.parquet")

    source: Any
    if reader == "parquet":
        source = ParquetFiles([str(tmp_path / "train.parquet")], None, num_lanes=1, columns=lambda existing: existing)
    else:
        if reader == "stream":
            (tmp_path / "train.parquet").unlink()
            with (
                pyarrow.OSFile(str(tmp_path / "train.arrow"), "wb") as file,
                pyarrow.ipc.new_stream(file, TABLE.schema) as out,
            ):
                out.write_table(TABLE)
        entry = MixtureSource(weight=1, dataset_name=str(tmp_path))
        source = open_hub_data(entry, 1, streaming=reader == "stream", columns=lambda existing: existing)
    rows = [source.document(i) for i in range(3)] if reader == "table" else [*source.documents(0, 0)]
    assert [row.record for row in rows] == ROWS


@given(st.floats(width=32, allow_nan=False) | st.none())
def test_a_shortened_float_has_the_same_bits(value: float | None) -> None:
    found = shortened(value, pyarrow.float32())
    assert found == value if value is None else np.float32(found) == np.float32(value)
