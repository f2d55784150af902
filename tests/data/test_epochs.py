"""Passes over the data in optimizer steps: exactly those after which every example of the passes was handed out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from data_parts import json_config, make_config, make_data, texts, write_json_lines, write_parquet

from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.data import survey
from ds_encdec.data.eval_set import keyed_examples
from ds_encdec.data.survey import steps_of_epochs, with_steps_of_epochs


@pytest.mark.parametrize("passes", [1, 3])
def test_after_the_steps_every_row_was_seen_so_often_and_one_step_before_not(tmp_path: Path, passes: int) -> None:
    fields = {"objective": "sft", "input_template": "{id}", "output_template": "{text}", "on_long_row": "truncate"}
    data = make_data(json_config(tmp_path / "a.jsonl", texts(120), **fields))
    steps = steps_of_epochs(data.pipeline, passes)
    trained = {key for i in range(120) if not data.pipeline.sources[0].holds_out(key := f"a.jsonl:{i}")}
    assert 90 < len(trained) < 120

    def least_seen(count: int) -> int:
        loader = make_data(json_config(tmp_path / "a.jsonl", texts(120), **fields)).loader
        seen = Counter(key for _ in range(count) for batch in next(loader) for key in batch.documents)
        assert seen.keys() <= trained
        return min(seen[key] for key in trained)

    assert least_seen(steps) == passes
    assert least_seen(steps - 1) == passes - 1
    assert steps_of_epochs(data.pipeline, passes - 0.5) == pytest.approx(steps * (1 - 0.5 / passes), abs=2)


def short_and_long(folder: Path) -> list[dict[str, Any]]:
    """A mixture of documents of some 30 and some 300 characters."""
    mixture = []
    for number, length in enumerate([30, 300]):
        (folder / str(number)).mkdir()
        file = write_json_lines(folder / f"{number}/a.jsonl", texts(60, length))
        mixture.append({"weight": 1, "dataset_name": "json", "data_files": file})
    return mixture


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_document_whose_tokens_are_weighed_is_read_once(tmp_path: Path, split: Any) -> None:
    config = make_config(mixture=short_and_long(tmp_path), mixture_weights_count="tokens", eval_fraction=0.3)
    pipeline = make_data(config).pipeline
    maker = mock.Mock(wraps=pipeline.maker)
    assert list(keyed_examples(pipeline.sources, split, maker, 0))
    assert 20 < maker.examples.call_count == maker.read.call_count


@pytest.mark.parametrize("unit", [None, "documents", "tokens"])
def test_a_large_data_set_is_estimated(unit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if unit is None:
        data = make_data(json_config(tmp_path / "a.jsonl", texts(120)))
    else:
        data = make_data(make_config(mixture=short_and_long(tmp_path), mixture_weights_count=unit))
    exact = steps_of_epochs(data.pipeline, 4)
    monkeypatch.setattr(survey, "COUNTED_READINGS", 10)
    assert steps_of_epochs(data.pipeline, 4) == pytest.approx(exact, rel=0.15)


def test_a_few_of_many_passes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(json_config(tmp_path / "a.jsonl", texts(120)))
    monkeypatch.setattr(survey, "COUNTED_READINGS", 300)
    assert steps_of_epochs(data.pipeline, 3000) == 1500 * steps_of_epochs(data.pipeline, 2)


def test_a_stream_whose_length_nobody_knows_is_refused_and_local_parquet_is_none(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", texts(120), row_group_size=20)
    parquet = make_data(make_config(dataset_name="parquet", data_files=path, eval_fraction=0.0))
    assert parquet.pipeline.sources[0].source.num_rows == 120  # type: ignore[union-attr]
    assert steps_of_epochs(parquet.pipeline, 2) > steps_of_epochs(parquet.pipeline, 1) > 5
    (tmp_path / "folder").mkdir()
    write_json_lines(tmp_path / "folder/a.jsonl", texts(120))
    stream = make_data(make_config(dataset_name=str(tmp_path / "folder"), eval_fraction=0.0))
    with pytest.raises(DataError, match=r"length of streamed data is not known.*data\.streaming=false"):
        steps_of_epochs(stream.pipeline, 2)


def test_the_warm_up_must_end_before_the_steps_that_epochs_turn_out_to_be(tmp_path: Path) -> None:
    config = json_config(tmp_path / "a.jsonl", training={"num_train_epochs": 2, "warmup_steps": 10})
    assert with_steps_of_epochs(config, 11).training.num_train_steps == 11
    with pytest.raises(ConfigError, match=r"num_train_epochs=2.0 are 10 optimizer steps:\n.*warm-up must end"):
        with_steps_of_epochs(config, 10)
    with pytest.raises(ValueError, match="the length of the run twice"):
        json_config(tmp_path / "a.jsonl", training={"num_train_epochs": 2, "num_train_steps": 200, "warmup_steps": 1})
