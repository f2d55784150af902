"""Data that cannot be trained on is refused with the reason and the way out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_parts import byte_tokenizer, documents_of, json_config, make_config, make_data, texts, write_parquet

from ds_encdec.base.types import DataError
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.chunks import Chunker, documents_ratio
from ds_encdec.data.inspection import inspect_data


def test_the_look_at_a_huge_document_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 10 MB has millions of tokens: what is cut up for the ratio is bounded."""
    drawn, draw = [], Chunker.draw_chunk
    monkeypatch.setattr(Chunker, "draw_chunk", lambda *arguments: drawn.append(1) or draw(*arguments))
    chunker = Chunker.from_config(DataConfig(), 0, byte_tokenizer()[1])
    ratio = documents_ratio([6_000_000], chunker)
    assert len(drawn) < 40_000  # 2 times 6,000,000 tokens, not 32 times
    assert ratio == pytest.approx(documents_ratio([500_000], chunker), rel=0.03)


def test_parquet_files_without_rows_are_passed_over(tmp_path: Path) -> None:
    """A library writes none of the columns where there is no row."""
    pyarrow.parquet.write_table(pyarrow.table({}), tmp_path / "a.parquet")
    config = make_config(dataset_name="parquet", data_files=str(tmp_path / "*.parquet"))
    (found,) = unusable_rows(config.data, config.model)
    assert "a.parquet: none of the files has a row" in found.message
    write_parquet(tmp_path / "b.parquet", texts(120), row_group_size=20)
    assert list(unusable_rows(config.data, config.model)) == []
    data = make_data(config)
    assert {key.partition(":")[0] for key in documents_of(next(data.loader))} == {"b.parquet"}


def test_an_inspection_shows_data_that_is_too_short_for_a_run_and_counts_its_bad_rows(tmp_path: Path) -> None:
    config = json_config(tmp_path / "a.jsonl", [*texts(12), 5], on_bad_row="skip", eval_fraction=0.0)
    with pytest.raises(DataError, match=r"12 documents to train on: too few for 40 lanes") as refused:
        make_data(config, num_lanes=40)
    looked = make_data(config, num_lanes=40, may_be_short=True)
    show = partial(inspect_data, looked.pipeline, byte_tokenizer()[0], (1, 1, 1, 1, 4), too_short=looked.too_short)
    found = json.loads(show(num_examples=99, as_json=True))
    assert {one["document"] for one in found["examples"]} == {f"a.jsonl:{i}" for i in range(12)}
    assert found["statistics"]["too_short"] == str(refused.value)
    assert found["statistics"]["bad_rows"] >= 1
    lines = show(num_examples=2, as_json=False).splitlines()
    assert lines[-1] == f"A run refuses this data: {refused.value}"
