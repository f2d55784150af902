"""Going on with other data: each source that is still there keeps its places, whatever happened to the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_parts import make_config, make_data, texts, write_json_lines, write_parquet

from ds_encdec.data.build import TrainingData
from ds_encdec.data.fingerprint import told, usable_records
from ds_encdec.data.lane import Lane
from ds_encdec.types import CheckpointError

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
        words = told(saved, data.fingerprint)
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


def test_weights_are_no_part_of_a_place(change: Change) -> None:
    change.sources[0]["weight"] = 1
    data, records, words = change.after()
    assert words.count("goes on where it was") == 3
    assert records == change.records  # what waits included: it was cut by the same rules
    for number in range(3):
        assert documents_behind(data, records[0], number) == change.next[number]


def test_weights_may_count_in_another_unit_from_now_on(change: Change) -> None:
    data, records, words = change.after(mixture_weights_count="tokens")
    assert words.count("goes on where it was") == 3
    assert records == change.records
    assert {number for record in data.loader.state() for number in record["reader"]["tokens_over_weight"]} == {*"012"}


@pytest.mark.parametrize("place", [0, 3])
def test_an_added_source_leaves_the_others_where_they_are(change: Change, place: int) -> None:
    added = {"weight": 1, "dataset_name": "json", "data_files": str(change.folder / "d.jsonl")}
    change.sources.insert(place, added)
    data, records, words = change.after()
    assert "source 3 (json d.jsonl): new" in words
    assert words.count("goes on where it was") == 3
    for number in range(3):
        assert documents_behind(data, records[0], number) == change.next[number]
    assert documents_behind(data, records[0], 3)
    # The run with four sources is one that can be resumed as any other.
    saved = json.loads(json.dumps(data.saved()))
    assert make_data(make_config(mixture=change.sources), num_lanes=2, saved=saved).saved() == saved


def test_a_source_that_is_taken_out_is_dropped(change: Change) -> None:
    del change.sources[0]
    data, records, words = change.after()
    assert "source 0 (json a.jsonl): dropped" in words
    assert [opened.number for opened in data.pipeline.sources] == [1, 2]
    for record in records:
        assert set(record["reader"]["sources"]) == {"1", "2"}
        assert {entry[0][0] for entry in record["waiting"]} <= {1, 2}


def test_a_repaired_line_keeps_every_place(change: Change) -> None:
    path = change.folder / "a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[40] = json.dumps({"text": "a longer line than it was, by far " * 20}) + "\n"
    path.write_text("".join(lines))
    data, records, words = change.after()
    assert "source 0 (json a.jsonl): changed, and goes on where it was (as many documents)" in words
    assert words.count("goes on where it was") == 3
    for number in range(3):
        assert documents_behind(data, records[0], number) == change.next[number]
    assert all(entry[0][0] for record in records for entry in record["waiting"])  # none of the changed source


def test_a_deleted_line_starts_its_source_over_and_no_other(change: Change) -> None:
    write_json_lines(change.folder / "a.jsonl", texts(149, seed=ord("a")))
    data, records, words = change.after()
    assert "source 0 (json a.jsonl): changed, and starts over (150 documents there, 149 now)" in words
    assert documents_behind(data, records[0], 0) == documents_behind(data, None, 0)
    for number in (1, 2):
        assert documents_behind(data, records[0], number) == change.next[number]


def test_another_order_starts_everything_over(change: Change) -> None:
    _, records, words = change.after(shuffle_buffer_size=9)
    assert records == []
    assert words.count("starts over (data.shuffle_buffer_size differs)") == 3


def earlier_form(change: Change) -> None:
    """The saved facts, as they were when sources had no numbers and weights were among their facts."""
    fingerprint = change.saved["fingerprint"]
    weights = fingerprint.pop("mixture weights")
    for facts in fingerprint["sources"]:
        facts["weight"] = weights[str(facts.pop("number"))]
        del facts["size"]
    for record in change.records:
        record["reader"]["sources"] = [record["reader"]["sources"][str(number)] for number in range(3)]
        del record["bad_rows"], record["last_bad_row"]


def test_an_earlier_checkpoint_goes_on(change: Change) -> None:
    earlier_form(change)
    data = make_data(make_config(mixture=change.sources), num_lanes=2, saved=change.saved)
    data.loader.load_state(usable_records(change.records, change.saved["fingerprint"], data.fingerprint))
    for _ in range(5):
        batches, expected = next(data.loader), next(change.before.loader)
        assert [batch.documents for batch in batches] == [batch.documents for batch in expected]
    assert data.loader.state() == change.before.loader.state()


def test_a_change_after_an_earlier_checkpoint_keeps_the_unchanged_places(change: Change) -> None:
    earlier_form(change)
    write_json_lines(change.folder / "a.jsonl", texts(150, seed=9))
    _, _, words = change.after()
    assert words.count("goes on where it was") == 2
    assert "source 0 (json a.jsonl): changed, and starts over (unknown documents there, 150 now)" in words
