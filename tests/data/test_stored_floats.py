"""Floats of tables as text: the shortest number that the stored width tells apart, from every reader of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.config.schema import MixtureSource
from ds_encdec.data.sources.sources import shortened
from ds_encdec.data.sources.tables import ParquetFiles, open_hub_data

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
