"""Folders laid out like a data set of the hub: files that are not alike, and values that no row or text can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_parts import make_config, texts, write_json_lines
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.base.types import DataError
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import MixtureSource
from ds_encdec.data.sources.sources import BadRow, Row, all_rows, shortened
from ds_encdec.data.sources.tables import ParquetFiles, open_hub_data

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
