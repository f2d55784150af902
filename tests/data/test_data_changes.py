"""Continuing with other data: each source that is the same keeps its places, whatever happened to the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet

from ds_encdec.base.types import CheckpointError
from ds_encdec.data.build import TrainingData
from ds_encdec.data.fingerprint import changes, usable_records
from ds_encdec.data.lane import Lane

STEPS = 6


class Change:
    """A run on three sources, stopped after `STEPS` steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in "ad":
            write_json_lines(folder / f"{name}.jsonl", texts(150, seed=ord(name)))
        write_parquet(folder / "b.parquet", texts(150, seed=2), row_group_size=20)
        self.sources = [
            {"weight": 3, "dataset_name": "json", "data_files": str(folder / "a.jsonl")},
            {"weight": 1, "dataset_name": "parquet", "data_files": str(folder / "b.parquet")},
            {"weight": 1, "dataset_name": "builtin"},
        ]
        self.fourth = {"weight": 1, "dataset_name": "json", "data_files": str(folder / "d.jsonl")}
        self.before = self.data()
        for _ in range(STEPS):
            next(self.before.loader)
        self.saved = json.loads(json.dumps(self.before.saved()))
        self.records = json.loads(json.dumps(self.before.loader.state()))
        self.next = {number: documents_behind(self.before, self.records[0], number) for number in range(3)}

    def data(self, saved: dict[str, Any] | None = None, **fields: Any) -> TrainingData:
        config = make_config(**{"mixture": self.sources, **fields})
        return make_data(config, num_lanes=2, saved=saved, accept_other_data=saved is not None)

    def after(self, **fields: Any) -> tuple[TrainingData, list[dict[str, Any]], str]:
        """The data now, what is kept of the records, and what is said of it."""
        saved = self.saved["fingerprint"]
        with pytest.raises(CheckpointError, match="insist with --allow-data-change") as refused:
            make_data(make_config(**{"mixture": self.sources, **fields}), num_lanes=2, saved=self.saved)
        data = self.data(self.saved, **fields)
        records = usable_records(self.records, saved, data.fingerprint)
        words = changes(saved, data.fingerprint)
        assert words in str(refused.value)
        data.loader.load_state(records)
        next(data.loader)
        return data, records, words


@pytest.fixture
def change(tmp_path: Path) -> Change:
    return Change(tmp_path)


def documents_behind(data: TrainingData, record: dict[str, Any] | None, number: int) -> list[str]:
    """The next documents that lane 0 reads of the source with a number."""
    reader = Lane(data.pipeline, 0, record)._reader
    drawn = [next(reader) for _ in range(200)]
    return [located.document.key for located in drawn if located.reference[0] == number][:8]


def kept(words: str) -> set[int]:
    """The numbers of the sources that are said to continue where they were."""
    continued = words.partition(" continue where they were")[0] if "continue where" in words else ""
    return {int(number) for number in re.findall(r"source (\d)", continued)}


@pytest.mark.parametrize(
    ("edit", "continued"),
    [
        (lambda change: change.sources[0].update(weight=1), {0, 1, 2}),
        (lambda change: change.sources.insert(0, change.fourth), {0, 1, 2}),
        (lambda change: change.sources.append(change.fourth), {0, 1, 2}),
        (lambda change: change.sources.pop(0), {1, 2}),
        (lambda change: write_json_lines(change.folder / "a.jsonl", texts(150, seed=9)), {1, 2}),
    ],
    ids=["another weight", "a first one", "a last one", "one less", "another text"],
)
def test_sources_that_are_the_same_continue_and_others_begin(
    change: Change, edit: Callable[[Change], Any], continued: set[int]
) -> None:
    edit(change)
    data, records, words = change.after()
    assert kept(words) == continued
    if len(continued) == len(change.sources) == 3:
        assert records == change.records  # what waits included: it was cut by the same rules
    numbers = {opened.number for opened in data.pipeline.sources}
    assert len(numbers) == len(change.sources)
    assert numbers >= continued
    for number in numbers:
        there = change.next[number] if number in continued else documents_behind(data, None, number)
        assert documents_behind(data, records[0], number) == there != []
    for record in records:
        assert {entry[0][0] for entry in record["waiting"]} <= continued
        assert {int(number) for number in record["reader"]["sources"]} <= numbers
    # The run with these sources is one that can be resumed as any other.
    saved = json.loads(json.dumps(data.saved()))
    assert make_data(make_config(mixture=change.sources), num_lanes=2, saved=saved).saved() == saved


def test_weights_may_count_in_another_unit_from_now_on(change: Change) -> None:
    data, records, words = change.after(mixture_weights_count="tokens")
    assert kept(words) == {0, 1, 2}
    assert records == change.records
    assert {number for record in data.loader.state() for number in record["reader"]["tokens_over_weight"]} == {*"012"}


def test_another_order_begins_everything_at_its_start(change: Change) -> None:
    _, records, words = change.after(shuffle_buffer_size=9)
    assert records == []
    assert kept(words) == set()
