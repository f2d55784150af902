"""One lane: resume exact to the token, without reading what was seen; the held-out documents stay out."""

from __future__ import annotations

import dataclasses
from functools import partial
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

from ds_encdec.base.types import DataError
from ds_encdec.data.build import open_sources
from ds_encdec.data.examples.chunks import reconstruct
from ds_encdec.data.lane import Lane
from ds_encdec.data.sources.local_files import JsonLines
from ds_encdec.data.sources.sources import held_out_below, held_out_hash


def test_a_resume_reads_only_what_was_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = make_data(json_config(tmp_path / "a.jsonl", texts(400, median_characters=250))).pipeline
    read: list[int] = []
    document = JsonLines.document
    monkeypatch.setattr(JsonLines, "document", lambda source, index: read.append(index) or document(source, index))
    straight = Lane(pipeline, 0)
    for _ in range(20):
        next(straight)
    before, record = set(read), straight.record
    referred = {reference[1] for reference, *_ in record["waiting"]}
    if record["next_chunk"]:
        referred.add(record["next_chunk"][0][1])
    read.clear()
    next(Lane(pipeline, 0, record))
    again = [index for index in read if index in before]
    assert set(again) == referred
    assert len(again) <= len(referred) + 1  # the document being cut, where a chunk of it waits too
    assert len(referred) < len(before) / 2


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


def test_epochs_differ_in_their_corruption(tmp_path: Path) -> None:
    documents = ["one text of some fifty characters, used over and over"] * 15
    config = json_config(tmp_path / "a.jsonl", documents, eval_fraction=0.0)
    lane = Lane(make_data(config, num_lanes=1).pipeline, 0)
    seen: dict[str, set[Any]] = {}
    while lane.record["epoch"] < 6:
        for example in next(lane):
            seen.setdefault(example.document, set()).add((example.denoiser, tuple(example.encoder_ids.tolist())))
    # One in 2^6 documents draws S, which has nothing random, in every epoch.
    assert sum(len(variants) > 1 for variants in seen.values()) >= 12


def test_held_out_documents_never_train(tmp_path: Path) -> None:
    data = make_data(json_config(tmp_path / "a.jsonl", texts(100), eval_fraction=0.3))
    expected = {f"a.jsonl:{i}" for i in range(100) if held_out_hash(f"a.jsonl:{i}") < 0.3}
    assert documents_of(data.eval_batches()) <= expected
    assert read_until(data, 2) == {f"a.jsonl:{i}" for i in range(100)} - expected
    assert 15 < len(expected) < 45


class Keys:
    """A `MapSource` of which only the keys are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> str:
        return f"document {index}"


def test_a_small_source_holds_one_document_out() -> None:
    threshold = held_out_below(Keys(10), 0.001)
    assert sum(held_out_hash(Keys(10).key(index)) < threshold for index in range(10)) == 1
    assert held_out_below(Keys(1), 0.5) == 0.0  # training needs it
    assert held_out_below(Keys(10), 0.0) == 0.0
    assert held_out_below(Keys(10**9), 0.001) == 0.001  # reads a thousand keys


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    documents = [text if i % 3 else ("", "x")[i % 2] for i, text in enumerate(texts(90))]
    data = make_data(json_config(tmp_path / "a.jsonl", documents, eval_fraction=0.0), num_lanes=1)
    read_until(data, 1)
    assert 30 <= data.loader.state()[0]["skipped_documents"] <= 60


def test_a_lane_without_text_says_so(tmp_path: Path) -> None:
    pipeline = make_data(json_config(tmp_path / "a.jsonl", texts(100), eval_fraction=0.0)).pipeline
    empty = JsonLines([write_json_lines(tmp_path / "b.jsonl", [""] * 20)], "text")
    object.__setattr__(pipeline.sources[0], "source", empty)
    with pytest.raises(DataError, match="lane 1 read 10000 documents in a row without finding text"):
        next(Lane(pipeline, 1))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_that_changed_in_its_middle_is_named(tmp_path: Path, kind: str) -> None:
    """At the same size and with the same ends, which is all that the fingerprint looks at."""
    documents, path = texts(60, median_characters=300), tmp_path / "data"
    write = write_json_lines if kind == "json" else partial(write_parquet, row_group_size=60)
    write(path, documents)
    config = make_config(dataset_name=kind, data_files=str(path), eval_fraction=0.0)
    pipeline = make_data(config, num_lanes=1).pipeline
    lane = Lane(pipeline, 0)
    next(lane)
    assert lane.record["waiting"]
    write(path, ["" for _ in documents] if kind == "json" else documents[:1])
    changed = dataclasses.replace(pipeline, sources=open_sources(config.data, 0, pipeline.maker, 1, {}))
    with pytest.raises(DataError, match=r"data:\d.* is not there any more: the file has changed since"):
        next(Lane(changed, 0, lane.record))
