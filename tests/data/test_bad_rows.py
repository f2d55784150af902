"""Rows that cannot be read: named and refused, or passed over, alike for every rank, worker and resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet

from ds_encdec.base.types import DataError, Document
from ds_encdec.config.schema import FullConfig
from ds_encdec.data import lane
from ds_encdec.data.build import TrainingData
from ds_encdec.data.eval_set import held_out_examples
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources.local_files import JsonLines

COUNT = 80
BAD = 31
"""The row that is spoiled; the files' second, where several are."""

RATHER_NESTED = b'{"text": "x", "more": ' + b"[" * 200 + b"]" * 200 + b"}"

LINE = f"data, line {BAD + 1}"


class Case(NamedTuple):
    """How to write `COUNT` documents with bad ones, where the first one found is said to be, and the bad rows."""

    kind: str
    write: Callable[[Path], None]
    where: str
    bad: set[str]


def spoiled_line(line: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_json_lines(path, texts(COUNT))
        lines = path.read_bytes().split(b"\n")
        lines[BAD] = line
        path.write_bytes(b"\n".join(lines))

    return write


def parquet_with_a_latin_text(path: Path) -> None:
    documents = [text.encode() for text in texts(COUNT)]
    documents[BAD] = "déjà vu".encode("latin-1")
    offsets = [0]
    for document in documents:
        offsets.append(offsets[-1] + len(document))
    buffers = [None, pyarrow.array(offsets, pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"".join(documents))]
    column = pyarrow.StringArray.from_buffers(COUNT, buffers[1], buffers[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=20)


def parquet_with_a_damaged_group(path: Path) -> None:
    write_parquet(path, texts(COUNT), row_group_size=20)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)


def csv_with_a_latin_row(path: Path) -> None:
    rows = [f'{i},"{text}"'.encode() for i, text in enumerate(texts(COUNT))]
    rows[BAD] = f"{BAD},déjà".encode("latin-1")
    path.write_bytes(b"id,text\n" + b"\n".join(rows))


def text_with_a_latin_file(path: Path) -> None:
    path.mkdir()
    for i, text in enumerate(texts(COUNT)):
        (path / f"{i:02}").write_bytes("déjà vu".encode("latin-1") if i == BAD else text.encode())


CASES = {
    "UTF-8": Case("json", spoiled_line(b'{"text": "d\xe9j\xe0"}'), LINE, {f"data:{BAD}"}),
    "type": Case("json", spoiled_line(b'{"text": 5}'), LINE, {f"data:{BAD}"}),
    "column": Case("json", spoiled_line(b'{"body": "x"}'), LINE, {f"data:{BAD}"}),
    "cut": Case("json", spoiled_line(b'{"text": "x'), LINE, {f"data:{BAD}"}),
    "nested": Case("json", spoiled_line(b'{"text": ' + b"[" * 100_000), LINE, {f"data:{BAD}"}),
    "rather nested": Case(
        "json", spoiled_line(b'{"text": "x", "more": ' + b"[" * 200 + b"]" * 200 + b"}"), LINE, {f"data:{BAD}"}
    ),
    "parquet UTF-8": Case("parquet", parquet_with_a_latin_text, "data, row group 1, row 11", {"data:1:11"}),
    "row group": Case("parquet", parquet_with_a_damaged_group, "data, row group 1", {f"data:1:{i}" for i in range(20)}),
    "csv": Case("csv", csv_with_a_latin_row, f"data, row {BAD + 1}", {f"data:{BAD}"}),
    "text": Case("text", text_with_a_latin_file, f"{BAD}: not UTF-8", {f"{BAD}:0"}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(case: Case, folder: Path, **fields: Any) -> FullConfig:
    path = folder / "data"
    if not path.exists():
        case.write(path)
    return make_config(dataset_name=case.kind, data_files=str(path / "*" if path.is_dir() else path), **fields)


def first_pass(data: TrainingData) -> tuple[set[str], list[dict[str, Any]]]:
    """The documents of the steps until every lane has gone over the data once, and the records then."""
    seen: set[str] = set()
    while data.loader.epoch < 1:
        seen |= {key for batch in next(data.loader) for key in batch.documents}
    return seen, data.loader.state()


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with pytest.raises(DataError) as caught:
        first_pass(make_data(config_of(case, tmp_path)))
    assert case.where in str(caught.value)
    assert "data.on_bad_row=skip" in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("name", CASES)
def test_or_passed_over_and_counted(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    config = config_of(case, tmp_path, on_bad_row="skip", eval_fraction=0.1)
    data = make_data(config)
    with caplog.at_level(logging.WARNING):
        seen, records = first_pass(data)
    assert [count_rows(records).bad[0], count_rows(data.loader.state()).bad[0]] == [len(case.bad)] * 2
    told = [record.getMessage() for record in caplog.records if case.where in record.getMessage()]
    assert len(told) == (1 if len(case.bad) == 1 else len({*told})) > 0
    held_out = {example.document for example in held_out_examples(data.pipeline)}
    while data.loader.epoch < 2:
        seen |= {key for batch in next(data.loader) for key in batch.documents}
    assert not (seen | held_out) & case.bad
    assert len(seen | held_out) == COUNT - len(case.bad)
    assert max(count_rows(data.loader.state()).bad) == len(
        case.bad
    )  # a row counts once, however often its source is read


def test_many_brackets_are_not_deep(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"more": "[" * 199 + "]" * 199, "text": "[{" * 999, "list": [[]] * 999})
    )
    assert JsonLines([str(tmp_path / "a.jsonl")], "text").document(0) == Document("a.jsonl:0", "[{" * 999)


def plain(batches: list[Any]) -> list[Any]:
    return [(batch.documents, batch.labels.tolist()) for batch in batches]


def steps(config: FullConfig, world_size: int = 1, records: Any = None, count: int = 12) -> tuple[list[Any], list[Any]]:
    """Micro-batches of `count` steps in lane order, and the records behind each step."""
    ranks = [make_data(config, rank=rank, world_size=world_size) for rank in range(world_size)]
    made, states = [], []
    for data in ranks:
        data.loader.load_state(records or [])
    for _ in range(count):
        by_rank = [plain(next(data.loader)) for data in ranks]
        made.append([batch for turn in zip(*by_rank, strict=True) for batch in turn])
        states.append(sorted((one for data in ranks for one in data.loader.state()), key=lambda one: one["lane"]))
    for data in ranks:
        data.loader.close()
    return made, json.loads(json.dumps(states))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_passing_over_is_the_same_for_every_rank_worker_and_resume(tmp_path: Path, kind: str) -> None:
    case = CASES["cut" if kind == "json" else "row group"]
    config = config_of(case, tmp_path, on_bad_row="skip")
    made, states = steps(config)
    assert states[-1] != states[0]
    assert sum(sum(one["bad_rows"]) for one in states[-1]) >= len(case.bad) / 2
    assert steps(config, world_size=2) == (made, states)
    workers = config_of(case, tmp_path, on_bad_row="skip", preprocessing_num_workers=2)
    assert steps(workers) == (made, states)
    for behind in (1, 4, 7):
        assert steps(config, 4, states[behind - 1], 12 - behind) == (made[behind:], states[behind:])


def test_skipping_goes_on_where_stopping_ended(tmp_path: Path) -> None:
    """The order of clean data, and what a checkpoint is held against, does not depend on what is done with bad rows."""
    case = CASES["cut"]
    stopped, skipped = (config_of(case, tmp_path, on_bad_row=word) for word in ("stop", "skip"))
    saved = make_data(skipped).saved()
    assert make_data(stopped, saved=saved).saved() == saved


def test_more_than_allowed_names_the_last_row_and_the_limit(tmp_path: Path) -> None:
    case = CASES["row group"]
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3)
    saved = make_data(config_of(case, tmp_path, on_bad_row="skip")).saved()
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=3 rows .* the last one data, row group 1: "):
        make_data(config)  # the look at the data before the first step
    data = make_data(config, saved=saved)
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=3 rows .* the last one data, row group 1: "):
        first_pass(data)
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3, eval_fraction=0.9)
    data = make_data(config, saved=saved, accept_other_data=True)
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=3 rows"):
        list(held_out_examples(data.pipeline))


def spoil(path: Path, count: int) -> None:
    """The first `count` lines are no JSON from now on; all lines stay where they are."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"#" + line[1:] if i < count else line for i, line in enumerate(lines)))


@pytest.mark.parametrize("limit", [5, 40])
def test_damage_that_appears_after_the_first_pass_is_counted_told_and_limited(
    tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json_lines(tmp_path / "data", texts(COUNT))
    data = make_data(make_config(dataset_name="json", data_files=path, on_bad_row="skip", max_bad_rows=limit))
    _, records = first_pass(data)
    assert not count_rows(data.loader.state()).bad
    data.loader.load_state([{**record, "bad_rows": [1]} for record in records])
    next(data.loader)
    spoil(Path(path), 40)
    if limit == 5:
        with pytest.raises(DataError, match=r"more than data\.max_bad_rows=5 rows"):
            read_until(data, 3)
        return
    read_until(data, 3)
    first, second, third = count_rows(data.loader.state()).bad[:3]
    assert (first, third) == (4, 40)
    assert 20 <= second < 40  # some were read in this pass when they were whole
    assert 40 <= sum("not a JSON line" in record.getMessage() for record in caplog.records) < 60


def read_until(data: TrainingData, epoch: int) -> None:
    """Read on until every lane is in that pass."""
    while data.loader.epoch < epoch:
        next(data.loader)


def test_bad_rows_in_a_row_have_their_own_limit_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_EMPTY_DOCUMENTS", 10)
    more = {"on_bad_row": "skip", "eval_fraction": 0.0, "shuffle_buffer_size": 1}
    data = make_data(config_of(CASES["row group"], tmp_path, **more), num_lanes=1)
    read_until(data, 2)
    assert count_rows(data.loader.state()).bad == [20, 20]
    path = write_json_lines(tmp_path / "lines", texts(COUNT))
    data = make_data(make_config(dataset_name="json", data_files=path, **more))
    spoil(Path(path), COUNT)
    with pytest.raises(DataError, match="documents in a row without finding text"):  # no pass reaches the limit
        next(data.loader)
