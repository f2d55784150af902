"""Reading order: keyed draws, every document once per epoch over all lanes, and positions that resume."""

import json
from pathlib import Path

import numpy as np
import pytest
from data_parts import texts, write_json_lines, write_parquet

from ds_encdec.base.types import DataError
from ds_encdec.data.randomness import Permutation, keyed_generator, unit_hash
from ds_encdec.data.readers import LaneShare, Located, MapReader, MixtureReader, StreamReader
from ds_encdec.data.sources.local_files import JsonLines
from ds_encdec.data.sources.sources import MapSource, OpenSource, StreamSource
from ds_encdec.data.sources.tables import ParquetFiles

COUNT = 61


@pytest.fixture
def map_source(tmp_path: Path) -> JsonLines:
    return JsonLines([write_json_lines(tmp_path / "a.jsonl", texts(COUNT))], "text")


def parquet(tmp_path: Path, num_lanes: int) -> ParquetFiles:
    files = [write_parquet(tmp_path / f"{i}.parquet", texts(COUNT)[i::3], row_group_size=4) for i in range(3)]
    return ParquetFiles(files, "text", num_lanes=num_lanes)


def share(lane: int, num_lanes: int, *, seed: int = 1, window: int = 6) -> LaneShare:
    return LaneShare(lane, num_lanes, seed, shuffle_buffer_size=window)


def first_epochs(reader: MapReader | StreamReader, epochs: int) -> list[list[Located]]:
    passes: list[list[Located]] = [[] for _ in range(epochs)]
    while (located := next(reader)).epoch < epochs:
        passes[located.epoch].append(located)
    return passes


@pytest.mark.parametrize("kind", ["map", "stream, units", "stream, rows"])
@pytest.mark.parametrize("num_lanes", [1, 4, 7])
def test_an_epoch_of_all_lanes_is_every_document_once(
    tmp_path: Path, map_source: JsonLines, kind: str, num_lanes: int
) -> None:
    source: MapSource | StreamSource = map_source
    if kind != "map":
        source = parquet(tmp_path, num_lanes)
        if kind == "stream, rows":  # pretend that there are more lanes than units
            source._units, source.num_units = [(0, None), (1, None), (2, None)], 3
            num_lanes += 3
    reader_of = StreamReader if isinstance(source, StreamSource) else MapReader
    lanes = [first_epochs(reader_of(source, 0, share(lane, num_lanes), None), 3) for lane in range(num_lanes)]  # type: ignore[arg-type]
    orders = []
    for epoch in range(3):
        read = [located.document.text for lane in lanes for located in lane[epoch]]  # type: ignore[union-attr]
        assert sorted(read) == sorted(texts(COUNT))
        orders.append(tuple(read))
    assert len(set(orders)) == 3  # in another order each time


def test_a_resumed_stream_rereads_at_most_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = parquet(tmp_path, 1), []
    straight = StreamReader(source, 0, share(0, 1), None)
    for _ in range(45):
        next(straight)
    documents = ParquetFiles.documents
    monkeypatch.setattr(
        ParquetFiles, "documents", lambda *place: (read.append(row) or row for row in documents(*place))
    )
    resumed = StreamReader(source, 0, share(0, 1), straight.position)
    first = next(resumed)
    assert 0 < len(read) <= 6  # the window of the position: documents 42 to 47
    assert [first.document.key, next(resumed).document.key] == [next(straight).document.key for _ in range(2)]


def test_windows_shuffle(tmp_path: Path) -> None:
    source = parquet(tmp_path, 1)

    def order(window: int) -> list[str]:
        (located,) = first_epochs(StreamReader(source, 0, share(0, 1, window=window), None), 1)
        return [one.document.key for one in located]

    assert order(1) != order(20)
    assert sorted(order(1)[:20]) == sorted(order(20)[:20])


def test_seeds_and_lanes_give_other_orders(map_source: JsonLines) -> None:
    readers = [MapReader(map_source, 0, share(lane, 3, seed=seed), None) for lane, seed in ((0, 1), (0, 2), (1, 1))]
    first, of_seed, of_lane = ([next(reader).reference for _ in range(20)] for reader in readers)
    assert first != of_seed
    assert set(first).isdisjoint(of_lane)


def test_too_many_lanes_for_the_data(tmp_path: Path, map_source: JsonLines) -> None:
    with pytest.raises(DataError, match="lane 61 of 62 has nothing to read: the source has 61 documents"):
        MapReader(map_source, 0, share(61, 62), None)
    reader = StreamReader(parquet(tmp_path, 1), 0, share(90, 100), None)
    with pytest.raises(DataError, match="lane 90 of 100 has nothing to read"):
        next(reader)


def test_a_mixture_draws_by_weight(tmp_path: Path, map_source: JsonLines) -> None:
    sources = (OpenSource(map_source, 3.0, 0.0, 0), OpenSource(parquet(tmp_path, 2), 1.0, 0.0, 1))
    reader = MixtureReader(sources, share(0, 2), None)
    drawn = [next(reader) for _ in range(2000)]
    shares = np.bincount([located.reference[0] for located in drawn]) / len(drawn)
    assert shares[0] == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 2000))
    assert reader.epoch == min(located.epoch for located in drawn[-40:] if located.reference[0] == 1)
    assert all(reader.fetch(located.reference) == located.document for located in drawn[:30])

    other_lane = MixtureReader(sources, share(1, 2), None)
    assert [next(other_lane).reference[0] for _ in range(100)] != [located.reference[0] for located in drawn[:100]]


def test_weights_that_count_tokens(tmp_path: Path, map_source: JsonLines) -> None:
    other = JsonLines([write_json_lines(tmp_path / "b.jsonl", texts(COUNT))], "text")
    tokens, length = [0, 0, 0], [20, 500, 20]
    sources = [OpenSource(map_source, 3.0, 0.0, 0, 0.0, True), OpenSource(other, 1.0, 0.0, 1, 0.0, True)]
    readers = [MixtureReader(sources, share(lane, 8), None) for lane in range(8)]

    def draw(reader: MixtureReader) -> int:
        number = next(reader).reference[0]
        reader.took(number, length[number])
        tokens[number] += length[number]
        return number

    drawn = [[draw(reader) for _ in range(2000)] for reader in readers]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.02)
    assert len({one.index(1) for one in drawn}) > 4  # not all at once

    position = json.loads(json.dumps(readers[0].position))
    resumed = MixtureReader(sources, share(0, 8), position)
    assert [draw(resumed) for _ in range(300)] == [draw(readers[0]) for _ in range(300)]
    # A source that is added has its share from then on, and nothing to catch up with.
    tokens[:] = [0, 0, 0]
    more = MixtureReader([*sources, OpenSource(other, 4.0, 0.0, 2, 0.0, True)], share(0, 8), position)
    for _ in range(4000):
        draw(more)
    assert tokens[2] / sum(tokens) == pytest.approx(0.5, abs=0.03)


def test_draws_are_those_of_every_process_and_of_earlier_runs() -> None:
    assert keyed_generator(7, "x", "ä", 1).integers(2**62) == 531506523708626883
    assert unit_hash("k", "p") == 0.1653630540473937


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 4097])
def test_a_permutation_is_one(size: int) -> None:
    permutation = Permutation(size, 42, "test", 0)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        permutation[size]


def test_a_huge_permutation_costs_no_memory() -> None:
    permutation = Permutation(10**12, 1, "test")
    images = {permutation[i] for i in range(1000)}
    assert len(images) == 1000
    assert max(images) > 10**11
