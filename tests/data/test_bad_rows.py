"""Rows that cannot be read: named and refused, or passed over, alike for every rank, worker and resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from data_parts import (
    damage_row_group,
    documents_of,
    json_config,
    make_config,
    make_data,
    read_until,
    texts,
    write_json_lines,
    write_parquet,
)

from ds_encdec.base.types import DataError
from ds_encdec.config.schema import FullConfig
from ds_encdec.data import lane
from ds_encdec.data.eval_set import held_out_examples
from ds_encdec.data.loader import count_rows

COUNT = 80
BAD = 31  # the row that is spoiled


class Case(NamedTuple):
    kind: str
    write: Callable[[Path], None]  # writes `COUNT` documents with bad ones
    where: str  # the place that the error names
    bad: set[str]  # the keys of the bad rows


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
    damage_row_group(path, 1)


def text_with_a_latin_file(path: Path) -> None:
    path.mkdir()
    for i, text in enumerate(texts(COUNT)):
        (path / f"{i:02}").write_bytes("déjà vu".encode("latin-1") if i == BAD else text.encode())


NESTED = b'{"text": "x", "more": ' + b"[" * 200 + b"]" * 200 + b"}"
CASES = {
    "UTF-8": Case("json", spoiled_line(b'{"text": "d\xe9j\xe0"}'), f"data, line {BAD + 1}", {f"data:{BAD}"}),
    "nested": Case("json", spoiled_line(NESTED), f"data, line {BAD + 1}", {f"data:{BAD}"}),
    "parquet UTF-8": Case("parquet", parquet_with_a_latin_text, "data, row group 1, row 11", {"data:1:11"}),
    "row group": Case("parquet", parquet_with_a_damaged_group, "data, row group 1", {f"data:1:{i}" for i in range(20)}),
    "text": Case("text", text_with_a_latin_file, f"{BAD}: not UTF-8", {f"{BAD}:0"}),
}


pytestmark = pytest.mark.usefixtures("cache")


def config_of(case: Case, folder: Path, **fields: Any) -> FullConfig:
    path = folder / "data"
    if not path.exists():
        case.write(path)
    return make_config(dataset_name=case.kind, data_files=str(path / "*" if path.is_dir() else path), **fields)


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_cannot_be_read_is_named_or_passed_over_and_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    with pytest.raises(DataError) as caught:
        read_until(make_data(config_of(case, tmp_path)), 1)
    assert case.where in str(caught.value)
    assert "data.on_bad_row=skip" in str(caught.value)

    data = make_data(config_of(case, tmp_path, on_bad_row="skip", eval_fraction=0.1))
    with caplog.at_level(logging.WARNING):
        seen = read_until(data, 1)
    assert count_rows(data.loader.state()).bad[0] == len(case.bad)
    told = [record.getMessage() for record in caplog.records if case.where in record.getMessage()]
    assert len(told) == (1 if len(case.bad) == 1 else len({*told})) > 0
    seen |= read_until(data, 2) | documents_of(held_out_examples(data.pipeline))
    assert not seen & case.bad
    assert len(seen) == COUNT - len(case.bad)
    assert max(count_rows(data.loader.state()).bad) == len(case.bad)  # a row counts once, however often it is read


def test_skipping_goes_on_where_stopping_ended(tmp_path: Path) -> None:
    case = CASES["UTF-8"]
    stopped, skipped = (config_of(case, tmp_path, on_bad_row=word) for word in ("stop", "skip"))
    saved = make_data(skipped).saved()
    assert make_data(stopped, saved=saved).saved() == saved


def test_more_than_allowed_names_the_last_row_and_the_limit(tmp_path: Path) -> None:
    case = CASES["row group"]
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3)
    saved = make_data(config_of(case, tmp_path, on_bad_row="skip")).saved()
    told = r"more than data\.max_bad_rows=3 rows .* the last one data, row group 1: "
    with pytest.raises(DataError, match=told):
        make_data(config)  # the look at the data before the first step
    data = make_data(config, saved=saved)
    with pytest.raises(DataError, match=told):
        read_until(data, 1)
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3, eval_fraction=0.9)
    data = make_data(config, saved=saved, accept_other_data=True)
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=3 rows"):
        list(held_out_examples(data.pipeline))


def spoil(path: Path, count: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"#" + line[1:] if i < count else line for i, line in enumerate(lines)))


@pytest.mark.parametrize("limit", [5, 40])
def test_damage_that_appears_after_the_first_pass_is_counted_told_and_limited(
    tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    data = make_data(json_config(path, texts(COUNT), on_bad_row="skip", max_bad_rows=limit))
    read_until(data, 1)
    records = data.loader.state()
    assert not count_rows(data.loader.state()).bad
    data.loader.load_state([{**record, "bad_rows": [1]} for record in records])
    next(data.loader)
    spoil(path, 40)
    if limit == 5:
        with pytest.raises(DataError, match=r"more than data\.max_bad_rows=5 rows"):
            read_until(data, 3)
        return
    read_until(data, 3)
    first, second, third = count_rows(data.loader.state()).bad[:3]
    assert (first, third) == (4, 40)
    assert 20 <= second < 40  # some were read in this pass when they were whole
    assert 40 <= sum("not a JSON line" in record.getMessage() for record in caplog.records) < 60


def test_bad_rows_in_a_row_have_their_own_limit_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_EMPTY_DOCUMENTS", 10)
    more = {"on_bad_row": "skip", "eval_fraction": 0.0, "shuffle_buffer_size": 1}
    data = make_data(config_of(CASES["row group"], tmp_path, **more), num_lanes=1)
    read_until(data, 2)
    assert count_rows(data.loader.state()).bad == [20, 20]
    path = tmp_path / "lines"
    data = make_data(json_config(path, texts(COUNT), **more))
    spoil(path, COUNT)
    with pytest.raises(DataError, match="documents in a row without finding text"):  # no pass reaches the limit
        next(data.loader)
