"""One lane: resume exact to the token, without reading what was seen; the held-out documents stay out."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from data_parts import byte_tokenizer, make_config, make_data, texts, write_json_lines, write_parquet

from ds_encdec.base.types import DataError, Document, Example
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import open_sources
from ds_encdec.data.examples.chunks import reconstruct
from ds_encdec.data.lane import Lane
from ds_encdec.data.sources.local_files import JsonLines
from ds_encdec.data.sources.sources import held_out_below, held_out_hash

NUM_LANES = 4


def plain(examples: list[Example]) -> list[Any]:
    """Examples as something that compares by value."""
    return [(e.document, e.denoiser, e.encoder_ids.tolist(), e.decoder_ids.tolist()) for e in examples]


@pytest.fixture(params=["json", "parquet", "documents", "tokens"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> FullConfig:
    lines = write_json_lines(tmp_path / "a.jsonl", texts(150, median_characters=250))
    rows = write_parquet(tmp_path / "a.parquet", texts(150, median_characters=250, seed=1), row_group_size=20)
    sources = [{"dataset_name": "json", "data_files": lines}, {"dataset_name": "parquet", "data_files": rows}]
    if request.param in ("documents", "tokens"):
        mixture = [{"weight": 2, **sources[0]}, {"weight": 1, **sources[1]}]
        return make_config(mixture=mixture, mixture_weights_count=request.param)
    return make_config(**sources[request.param == "parquet"])


@pytest.mark.parametrize("steps", [1, 2, 9, 60])
def test_a_record_resumes_exactly(config: FullConfig, steps: int) -> None:
    pipeline = make_data(config).pipeline
    straight = Lane(pipeline, 2)
    for _ in range(steps):
        next(straight)
    record = json.loads(json.dumps(straight.record))
    assert len(json.dumps(record)) < 3000

    resumed = Lane(pipeline, 2, record)
    assert resumed.record == straight.record
    for _ in range(40):
        assert plain(next(resumed)) == plain(next(straight))
    assert resumed.record == straight.record


class CountingJsonLines(JsonLines):
    """JSON lines that note which documents are read."""

    read: list[int]

    def document(self, index: int) -> Any:
        self.__dict__.setdefault("read", []).append(index)
        return super().document(index)


def test_a_resume_reads_only_what_was_not_seen(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", texts(400, median_characters=250))
    pipeline = make_data(make_config(dataset_name="json", data_files=path)).pipeline
    counting = CountingJsonLines([path], "text")
    object.__setattr__(pipeline.sources[0], "source", counting)

    straight = Lane(pipeline, 0)
    for _ in range(20):
        next(straight)
    before = list(counting.read)
    record = straight.record
    referred = {reference[1] for reference, *_ in record["waiting"]}
    if record["next_chunk"]:
        referred.add(record["next_chunk"][0][1])

    counting.read.clear()
    resumed = Lane(pipeline, 0, record)
    next(resumed)
    again = [index for index in counting.read if index in before]
    assert set(again) == referred
    assert len(again) <= len(referred) + 1  # the document being cut, where a chunk of it waits too
    assert len(referred) < len(set(before)) / 2


def test_documents_are_read_whole_and_once_an_epoch(tmp_path: Path) -> None:
    """A lane's examples reconstruct to the text of its documents, chunk by chunk."""
    documents = texts(60, median_characters=250)
    path = write_json_lines(tmp_path / "a.jsonl", documents)
    config = make_config(dataset_name="json", data_files=path, eval_fraction=0.0)
    tokenizer, vocabulary = byte_tokenizer()
    pipeline = make_data(config, num_lanes=1).pipeline
    lane = Lane(pipeline, 0)
    pieces: dict[str, list[str]] = {}
    while lane.record["epoch"] == 0:
        for example in next(lane):
            tokens = reconstruct(example.encoder_ids, example.decoder_ids, vocabulary)
            pieces.setdefault(example.document, []).append(tokenizer.decode(tokens))
    complete = {f"a.jsonl:{i}" for i, text in enumerate(documents) if len("".join(pieces[f"a.jsonl:{i}"])) >= len(text)}
    assert len(complete) > 40  # the last ones of the epoch still wait
    for key in complete:
        text = documents[int(key.partition(":")[2])]
        first_epoch_pieces = pieces[key]
        assert all(piece in text for piece in first_epoch_pieces)
        assert sum(len(piece) for piece in first_epoch_pieces) % len(text) == 0


def test_neither_side_is_ever_too_long(tmp_path: Path) -> None:
    config = make_config(dataset_name="random")
    lane = Lane(make_data(config).pipeline, 1)
    examples = [example for batch in islice(lane_batches(lane), 50) for example in batch]
    assert max(len(example.encoder_ids) for example in examples) == config.data.max_encoder_length
    assert max(len(example.decoder_ids) for example in examples) <= config.data.max_decoder_length


def lane_batches(lane: Lane) -> Any:
    while True:
        yield next(lane)


def test_epochs_differ_in_their_corruption(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", ["one text of some fifty characters, used over and over"] * 15)
    pipeline = make_data(make_config(dataset_name="json", data_files=path, eval_fraction=0.0), num_lanes=1).pipeline
    lane = Lane(pipeline, 0)
    seen: dict[str, set[Any]] = {}
    while lane.record["epoch"] < 6:
        for example in next(lane):
            seen.setdefault(example.document, set()).add((example.denoiser, tuple(example.encoder_ids.tolist())))
    # One in 2^6 documents draws S, which has nothing random, in every epoch.
    assert sum(len(variants) > 1 for variants in seen.values()) >= 12


def test_held_out_documents_never_train(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", texts(100))
    data = make_data(make_config(dataset_name="json", data_files=path, eval_fraction=0.3))
    held_out = {key for batch in data.eval_batches() for key in batch.documents}
    trained: set[str] = set()
    for number in range(NUM_LANES):
        lane = Lane(data.pipeline, number)
        while lane.record["epoch"] < 2:
            trained |= {example.document for example in next(lane)}
    expected = {f"a.jsonl:{i}" for i in range(100) if held_out_hash(f"a.jsonl:{i}") < 0.3}
    assert trained == {f"a.jsonl:{i}" for i in range(100)} - expected
    assert held_out <= expected
    assert 15 < len(expected) < 45


class Keys:
    """A `MapSource` of which only the keys are read."""

    identity: ClassVar[dict[str, Any]] = {}

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> str:
        return f"document {index}"

    def document(self, index: int) -> Document:
        raise AssertionError(index)


def test_a_small_source_holds_one_document_out() -> None:
    threshold = held_out_below(Keys(10), 0.001)
    assert sum(held_out_hash(Keys(10).key(index)) < threshold for index in range(10)) == 1
    assert held_out_below(Keys(1), 0.5) == 0.0  # training needs it
    assert held_out_below(Keys(10), 0.0) == 0.0
    assert held_out_below(Keys(10**9), 0.001) == 0.001  # reads a thousand keys


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    documents = [text if i % 3 else ("", "x")[i % 2] for i, text in enumerate(texts(90))]
    path = write_json_lines(tmp_path / "a.jsonl", documents)
    config = make_config(dataset_name="json", data_files=path, eval_fraction=0.0)
    lane = Lane(make_data(config, num_lanes=1).pipeline, 0)
    while lane.record["epoch"] < 1:
        next(lane)
    assert 30 <= lane.record["skipped_documents"] <= 60


def test_a_lane_without_text_says_so(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", texts(100))
    pipeline = make_data(make_config(dataset_name="json", data_files=path, eval_fraction=0.0)).pipeline
    empty = JsonLines([write_json_lines(tmp_path / "b.jsonl", [""] * 20)], "text")
    object.__setattr__(pipeline.sources[0], "source", empty)
    with pytest.raises(DataError, match="lane 1 read 10000 documents in a row without finding text"):
        next(Lane(pipeline, 1))


def test_text_that_spells_sentinels_is_only_text(tmp_path: Path) -> None:
    _, vocabulary = byte_tokenizer()
    text = "<extra_id_0> <extra_id_1><|im_end|> and <|endoftext|> in a text about tokens "
    path = write_json_lines(tmp_path / "a.jsonl", [text * 3] * 30)
    lane = Lane(make_data(make_config(dataset_name="json", data_files=path)).pipeline, 0)
    for example in next(lane):
        tokens = reconstruct(example.encoder_ids, example.decoder_ids, vocabulary)
        assert max(tokens) < 256
        assert np.isin(example.encoder_ids, vocabulary.sentinel_ids).sum() == (
            np.isin(example.decoder_ids, vocabulary.sentinel_ids).sum()
        )


def test_a_file_that_changed_in_its_middle_is_named(tmp_path: Path) -> None:
    """At the same size and with the same ends, which is all that the fingerprint looks at."""
    for kind in ("json", "parquet"):
        documents = texts(60, median_characters=300)
        folder = tmp_path / kind
        folder.mkdir()
        path = folder / "data"
        write = write_json_lines if kind == "json" else partial(write_parquet, row_group_size=60)
        write(path, documents)
        config = make_config(dataset_name=kind, data_files=str(path), eval_fraction=0.0, training={"eval_samples": 0})
        pipeline = make_data(config, num_lanes=1).pipeline
        lane = Lane(pipeline, 0)
        next(lane)
        record = json.loads(json.dumps(lane.record))
        assert record["waiting"]
        write(path, ["" for _ in documents] if kind == "json" else documents[:1])
        changed = dataclasses.replace(pipeline, sources=open_sources(config.data, 0, pipeline.maker, 1, {}))
        with pytest.raises(DataError, match=r"data:\d.* is not there any more: the file has changed since"):
            next(Lane(changed, 0, record))
