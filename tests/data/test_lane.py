"""One lane: resume exact to the token, also with other data; the held-out documents stay out."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parts import (
    byte_tokenizer,
    documents_of,
    json_config,
    make_config,
    make_data,
    read_until,
    texts,
    write_json_lines,
    write_parquet,
)

from ds_encdec.base.types import CheckpointError, DataError
from ds_encdec.data.build import Opener, TrainingData
from ds_encdec.data.examples.chunks import reconstruct
from ds_encdec.data.fingerprint import changes, usable_records
from ds_encdec.data.lane import Lane
from ds_encdec.data.sources.local_files import JsonLines
from ds_encdec.data.sources.sources import held_out_below, held_out_hash


def test_documents_are_read_whole_and_once_an_epoch(tmp_path: Path) -> None:
    """A lane's examples reconstruct to the text of its documents, chunk by chunk; spelled sentinels are only text."""
    documents = texts(60, median_characters=250)
    documents[::5] = [f"<extra_id_0> {text}<|im_end|> and <|endoftext|>" for text in documents[::5]]
    config = json_config(tmp_path / "a.jsonl", documents, eval_fraction=0.0)
    tokenizer, vocabulary = byte_tokenizer()
    lane = Lane(make_data(config, num_lanes=1).pipeline, 0)
    pieces: dict[str, list[str]] = {}
    longest = [0, 0]
    while lane.record["epoch"] == 0:
        for example in next(lane):
            tokens = reconstruct(example.encoder_ids, example.decoder_ids, vocabulary)
            assert max(tokens) < 256
            pieces.setdefault(example.document, []).append(tokenizer.decode(tokens))
            longest = np.maximum(longest, [len(example.encoder_ids), len(example.decoder_ids)]).tolist()
    assert longest[0] == config.data.max_encoder_length
    assert longest[1] <= config.data.max_decoder_length
    complete = {f"a.jsonl:{i}" for i, text in enumerate(documents) if len("".join(pieces[f"a.jsonl:{i}"])) >= len(text)}
    assert len(complete) > 40  # the last ones of the epoch still wait
    for key in complete:
        text = documents[int(key.partition(":")[2])]
        assert all(piece in text for piece in pieces[key])
        assert sum(len(piece) for piece in pieces[key]) % len(text) == 0


def test_held_out_documents_never_train(tmp_path: Path) -> None:
    data = make_data(json_config(tmp_path / "a.jsonl", texts(100), eval_fraction=0.3))
    expected = {f"a.jsonl:{i}" for i in range(100) if held_out_hash(f"a.jsonl:{i}") < 0.3}
    assert documents_of(data.eval_batches()) <= expected
    assert read_until(data, 2) == {f"a.jsonl:{i}" for i in range(100)} - expected
    assert 15 < len(expected) < 45


def test_a_small_source_holds_one_document_out(tmp_path: Path) -> None:
    for count, share, expected in ((10, 0.001, 1), (1, 0.5, 0), (10, 0.0, 0)):  # training needs the only one
        source = JsonLines([write_json_lines(tmp_path / "a.jsonl", texts(count))], "text")
        threshold = held_out_below(source, share)
        assert sum(held_out_hash(source.key(index)) < threshold for index in range(count)) == expected


def test_a_lane_without_text_says_so(tmp_path: Path) -> None:
    pipeline = make_data(json_config(tmp_path / "a.jsonl", texts(100), eval_fraction=0.0)).pipeline
    empty = JsonLines([write_json_lines(tmp_path / "b.jsonl", [""] * 20)], "text")
    object.__setattr__(pipeline.sources[0], "source", empty)
    with pytest.raises(DataError, match="lane 1 found no text in 10000 documents in a row"):
        next(Lane(pipeline, 1))


def test_a_file_that_changed_in_its_middle_is_named(tmp_path: Path) -> None:
    documents, path = texts(60, median_characters=300), tmp_path / "data"
    config = json_config(path, documents, eval_fraction=0.0)
    pipeline = make_data(config, num_lanes=1).pipeline
    lane = Lane(pipeline, 0)
    next(lane)
    assert lane.record["waiting"]
    write_json_lines(path, [""] * 60)
    changed = dataclasses.replace(pipeline, sources=Opener(config.data, 0, pipeline.maker, {}).open_sources(1))
    with pytest.raises(DataError, match=r"data:\d.* is not there any more: the file has changed since"):
        next(Lane(changed, 0, lane.record))


STEPS = 6


class Change:
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
    reader = Lane(data.pipeline, 0, record)._reader
    drawn = [next(reader) for _ in range(200)]
    return [located.document.key for located in drawn if located.reference[0] == number][:8]


def kept(words: str) -> set[int]:
    continued = words.partition(" continue where they were")[0] if "continue where" in words else ""
    return {int(number) for number in re.findall(r"source (\d)", continued)}


@pytest.mark.parametrize(
    ("edit", "continued"),
    [
        (lambda change: change.sources[0].update(weight=1), {0, 1, 2}),
        (lambda change: change.sources.insert(0, change.fourth), {0, 1, 2}),
        (lambda change: change.sources.pop(0), {1, 2}),
        (lambda change: write_json_lines(change.folder / "a.jsonl", texts(150, seed=9)), {1, 2}),
    ],
    ids=["another weight", "one more", "one less", "another text"],
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


def test_weights_may_count_in_another_unit_and_another_order_begins_at_its_start(change: Change) -> None:
    data, records, words = change.after(mixture_weights_count="tokens")
    assert (kept(words), records) == ({0, 1, 2}, change.records)
    assert {number for record in data.loader.state() for number in record["reader"]["tokens_over_weight"]} == {*"012"}
    _, records, words = change.after(shuffle_buffer_size=9)
    assert (kept(words), records) == (set(), [])
