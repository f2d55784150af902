"""Local files as people have them: compressed, a JSON array, CSV, saved by `datasets`; and rows that cannot be read,
which are named and refused, or passed over, alike for every rank, worker and resume."""

import bz2
import errno
import gzip
import json
import logging
import lzma
import multiprocessing
import os
import pickle
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_parts import (
    byte_maker,
    damage_row_group,
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
from ds_encdec.config.first_rows import unusable_rows
from ds_encdec.config.schema import DataConfig, FullConfig, MixtureSource, ModelConfig
from ds_encdec.data import lane
from ds_encdec.data.build import Opener
from ds_encdec.data.eval_set import held_out_examples
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources import local_files
from ds_encdec.data.sources.local_files import INDEXED_BYTES, JsonLines
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.data.sources.tables import _record, open_hub_data

pytestmark = pytest.mark.usefixtures("cache")


def opened(name: str, path: Path) -> Any:
    config = DataConfig(dataset_name=name, data_files=str(path))
    return Opener(config, 0, byte_maker(config), {}).open_sources(1)[0].source


def all_texts(source: Any) -> list[str]:
    return [source.document(i).text for i in range(len(source))]


def arrow(content: bytes, codec: str) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, codec) as stream:
        stream.write(content)
    return out.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    """With what pzstd writes before a frame, two frames, and what seekable zstd writes behind the last one."""
    half = len(content) // 2
    frames = arrow(content[:half], "zstd") + arrow(content[half:], "zstd")
    return b"\x50\x2a\x4d\x18\4\0\0\0size" + frames + b"\x5e\x2a\x4d\x18\3\0\0\0end"


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": partial(lzma.compress, format=lzma.FORMAT_ALONE),
    "zlib": zlib.compress,
    "zst": zstd,
    "lz4": partial(arrow, codec="lz4"),
}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_compressed_files_are_read_and_named_where_they_are_cut_short(tmp_path: Path, cache: Path, suffix: str) -> None:
    documents = texts(500)
    plain = Path(write_json_lines(tmp_path / "a.jsonl", documents)).read_bytes()
    packed = tmp_path / f"a.jsonl.{suffix}"
    packed.write_bytes(COMPRESSED[suffix](plain))
    source = opened("json", packed)
    assert all_texts(source) == documents
    assert source.key(7) == f"a.jsonl.{suffix}:7"

    kept = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert opened("json", packed).identity == source.identity  # it is that of the compressed file
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == kept  # unpacked once

    content = COMPRESSED[suffix](json.dumps({"text": os.urandom(50_000).hex()}).encode())
    packed.write_bytes(content[: len(content) - 1000])
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}: cannot be unpacked: damaged, or cut short"):
        opened("json", packed)
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} <= kept.keys()


def test_streams_padding_and_what_follows_a_compressed_file(tmp_path: Path) -> None:
    packed, compress = tmp_path / "a.txt.gz", gzip.compress
    packed.write_bytes(compress(b"one ") + compress(b"") + compress(b"two") + bytes(40_000))
    assert all_texts(opened("text", packed)) == ["one two"]
    packed.write_bytes(compress(b"one") + b"something else")
    with pytest.raises(DataError, match=r"cannot be unpacked: .*other bytes follow the compressed data"):
        opened("text", packed)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    for name, content, count in (("a.txt", b"a\n", 1), ("b.txt", b"line\n\n" * 30_000, 3)):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        source = opened("text", tmp_path / name)
        assert "".join(all_texts(source)).encode() == content
        assert len(source) == count


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("csv", "text,id\na,1\nb,2,3\nc,4\n"),
        ("json", '\ufeff[{"text": "a"},\n{"text": "b", "text": "d"}, {"text": "c"}]'),
    ],
)
def test_a_bad_row_leaves_the_others_and_validate_sees_it(tmp_path: Path, kind: str, content: str) -> None:
    path = tmp_path / "a"
    path.write_text(content)
    source = opened(kind, path)
    assert [getattr(source.document(i), "text", None) for i in range(3)] == ["a", None, "c"]
    config = DataConfig(dataset_name=kind, data_files=str(path))
    (problem,) = unusable_rows(config, ModelConfig())
    assert problem.message.removeprefix(str(path)) == source.document(1).problem.removeprefix("a")
    assert not [*unusable_rows(config.model_copy(update={"on_bad_row": "skip"}), ModelConfig())]


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("csv", "a", gzip.compress(b"text,text\na,b\n", mtime=0), "has text twice"),
        ("json", "a", b'[\n {"text": "a"},\n {"text" "b"}\n]\n', "a damaged JSON array"),
        ("text", "a", "text\na\n".encode("utf-16"), "UTF-16 text"),
        ("text", "a.parquet", b"PAR1 and more", "a.parquet: a parquet file: set data.dataset_name=parquet"),
    ],
)
def test_a_file_without_rows_is_named_by_the_run_and_by_validate(
    tmp_path: Path, kind: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        opened(kind, tmp_path / name)
    config = DataConfig(dataset_name=kind, data_files=str(tmp_path / name), on_bad_row="skip")
    assert [problem.message for problem in unusable_rows(config, ModelConfig())] == [str(caught.value)]


def test_parquet_files_without_rows_are_passed_over(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({}), tmp_path / "a.parquet")  # which have no columns, either
    config = DataConfig(dataset_name="parquet", data_files=str(tmp_path / "*.parquet"))
    assert "a.parquet: none of the files has a row" in next(unusable_rows(config, ModelConfig())).message
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([0.1], "f4")}), tmp_path / "b.parquet")
    assert not list(unusable_rows(config, ModelConfig()))
    assert _record(pyarrow.parquet.read_table(tmp_path / "b.parquet"), 0) == {"text": 0.1}


def test_bytes_that_are_no_text_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 30_000 + b"\0\n" + bytes(range(0x80, 0xC0)) * 5000)
    source = opened("text", tmp_path / "a.txt")
    rows = [source.document(i) for i in range(len(source))]
    assert [isinstance(row, BadRow) for row in rows] == [False, False, *[True] * (len(rows) - 2)]
    assert len(rows) > 5
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read as parquet"):
        opened("parquet", tmp_path / "bad.parquet")


def test_a_copy_is_as_private_as_its_source_and_made_without_locks_too(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(b"text"))
    packed.chmod(0o600)
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert all_texts(opened("text", packed)) == ["text"]
    (copy,) = (path for path in cache.iterdir() if path.suffix != ".lock")
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_json_array_is_read(tmp_path: Path) -> None:
    documents = [*texts(1000), "two\nlines é"]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in documents] + [5], indent=1, ensure_ascii=False))
    source = opened("json", path)
    assert [source.document(i).text for i in range(1001)] == documents
    assert source.document(1001).problem == "a.json, line 1002: expected one JSON object a line, found int"


def test_csv_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffid,text\r\n1,"two\nlines, ""é"""\r\n2,plain\r\n3\r\n4,more,than,that\r\n'.encode())
    source = opened("csv", path)
    assert [source.document(i).text for i in (0, 1)] == ['two\nlines, "é"', "plain"]
    assert [source.document(i).problem[:23] for i in (2, 3)] == ["a.csv, row 3: 1 fields,", "a.csv, row 4: 4 fields,"]


@pytest.mark.parametrize("streaming", [True, False])
def test_one_split_or_several_that_were_saved_are_read(tmp_path: Path, streaming: bool) -> None:
    rows = {split: [f"{split} {i}" for i in range(9)] for split in ("train", "validation")}
    both = {split: datasets.Dataset.from_dict({"text": documents}) for split, documents in rows.items()}
    both["train"].save_to_disk(tmp_path / "one")
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")

    def opened_as(name: str, split: str) -> Any:
        entry = MixtureSource(weight=1, dataset_name=str(tmp_path / name), dataset_split=split)
        return open_hub_data(entry, 2, streaming=streaming)

    one = pickle.loads(pickle.dumps(opened_as("one", "train")))
    assert all_texts(one) == rows["train"]
    assert one.identity["files"]
    for split, documents in rows.items():
        source = opened_as("both", split)
        read = [row for unit in range(getattr(source, "num_units", 0)) for row in source.documents(unit, 0)]
        assert [row.text for row in read] == documents if streaming else all_texts(source) == documents


def large_json_lines(folder: Path) -> tuple[str, list[str]]:
    documents = texts(5000, median_characters=400)
    path = write_json_lines(folder / "a.jsonl", documents)
    assert os.path.getsize(path) > INDEXED_BYTES
    return path, documents


def count_scans(path: str, start: Any, counts: Any) -> None:
    local_files._line_edges = scan = mock.Mock(wraps=local_files._line_edges)
    start.wait()
    source = JsonLines([path], "text")
    counts.put((scan.call_count, [source.document(i).key for i in (0, len(source) - 1)]))


def test_the_index_of_lines_is_made_by_one_process_and_kept(tmp_path: Path) -> None:
    path, documents = large_json_lines(tmp_path)
    context = multiprocessing.get_context("fork")
    start, counts = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=partial(count_scans, path, start, counts)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    answers = [counts.get(timeout=600) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert sorted(scans for scans, _ in answers) == [0, 0, 0, 1]
    assert {tuple(keys) for _, keys in answers} == {("a.jsonl:0", f"a.jsonl:{len(documents) - 1}")}


@pytest.mark.parametrize(
    "change",
    [
        lambda index, _: index.write_bytes(index.read_bytes()[:-8]),
        lambda _, path: path.write_text('{"text": "new"}\n' + path.read_text()),
        lambda index, _: os.environ.update(XDG_CACHE_HOME="/proc/none"),
    ],
)
def test_an_index_that_is_cut_short_or_of_another_file_or_cannot_be_kept_is_not_read(
    tmp_path: Path, cache: Path, change: Callable[[Path, Path], object]
) -> None:
    path, documents = large_json_lines(tmp_path)
    source = JsonLines([path], "text")
    assert len(pickle.dumps(source)) < 2000  # a worker opens the index, it is not sent one
    assert pickle.loads(pickle.dumps(source)).document(4321).text == documents[4321]
    (index,) = (kept for kept in cache.iterdir() if kept.suffix != ".lock")
    change(index, Path(path))
    again = JsonLines([path], "text")
    assert all_texts(pickle.loads(pickle.dumps(again)))[-5000:] == documents
    assert len(again) in (5000, 5001)


LIMIT = 2000  # bytes of a row
LONG = "long\n" * 1000


def rows_of(source: Any) -> list[Any]:
    if hasattr(source, "num_units"):
        return [row for unit in range(source.num_units) for row in source.documents(unit, 0)]
    return [source.document(i) for i in range(len(source))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.csv.bz2", "a.parquet"])
def test_a_row_that_is_too_long_is_a_bad_one_and_is_named(tmp_path: Path, name: str) -> None:
    path, texts_of_rows = tmp_path / name, ["short", LONG.replace("\n", " "), "last"]
    rows = [{"text": text} for text in texts_of_rows]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    else:
        lines = ["text", *texts_of_rows] if "csv" in name else map(json.dumps, rows)
        text = json.dumps(rows) if name == "a.json" else "\n".join(lines)
        path.write_bytes({"gz": gzip.compress, "bz2": bz2.compress}.get(name[-3:].strip("."), bytes)(text.encode()))
    kind = {"jsonl": "json"}.get(name.split(".")[1], name.split(".")[1])
    config = DataConfig(dataset_name=kind, data_files=str(path), max_row_bytes=LIMIT)
    first, bad, last = rows_of(Opener(config, 0, byte_maker(config), {}).open_sources(1)[0].source)
    assert (first.text, last.text) == ("short", "last")
    assert bad.problem.startswith(name)
    assert f"longer than data.max_row_bytes={LIMIT}: raise that where such rows are meant" in bad.problem


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("csv", f'text\n"{LONG}', "longer than data.max_row_bytes"),  # a quote that is never closed
        ("csv", "x" * 3000, "longer than data.max_row_bytes"),
        ("json", json.dumps(["x"] * 10_000), "JSON array of 50.0 KB, which is read into memory whole"),
    ],
    ids=["open quote", "names", "array"],
)
def test_what_cannot_be_cut_into_rows_within_the_limit_is_an_error_of_the_file(
    tmp_path: Path, kind: str, text: str, problem: str
) -> None:
    (tmp_path / "a").write_text(text)
    config = DataConfig(dataset_name=kind, data_files=str(tmp_path / "a"), max_row_bytes=LIMIT)
    with pytest.raises(DataError, match=problem):
        Opener(config, 0, byte_maker(config), {}).open_sources(1)


@pytest.mark.parametrize(("kind", "head"), [("json", b""), ("csv", b"text\n")])
def test_a_line_of_a_compressed_file_never_fills_the_memory(tmp_path: Path, kind: str, head: bytes) -> None:
    with gzip.open(tmp_path / "a.gz", "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(300):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    config = DataConfig(dataset_name=kind, data_files=str(tmp_path / "a.gz"), max_row_bytes=1 << 20)
    (bad,) = rows_of(Opener(config, 0, byte_maker(config), {}).open_sources(1)[0].source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "longer than data.max_row_bytes" in bad.problem
    assert peak < 100 << 20


def test_an_unpacked_copy_does_not_fill_the_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * (1 << 26)))
    free = iter([40 << 30, 20 << 30])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, next(free, 900 << 20)))
    with pytest.raises(DataError, match=r"a\.gz: .* have become .* so far, and .* has .* left") as raised:
        opened("text", tmp_path / "a.gz")
    assert "XDG_CACHE_HOME" in str(raised.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


COUNT = 80
BAD = 31  # the row that is spoiled


class Case(NamedTuple):
    kind: str
    write: Callable[[Path], None]  # writes `COUNT` documents with bad ones
    where: str  # the place that the error names
    bad: set[str]  # the keys of the bad rows


def lines_with(line: bytes, path: Path) -> None:
    write_json_lines(path, texts(COUNT))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:BAD], line, *lines[BAD + 1 :]]))


def parquet_with_a_latin_text(path: Path) -> None:
    documents = [text.encode() for text in texts(COUNT)]
    documents[BAD] = "déjà vu".encode("latin-1")
    offsets = [0]
    for document in documents:
        offsets.append(offsets[-1] + len(document))
    buffers = [None, pyarrow.array(offsets, pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"".join(documents))]
    column = pyarrow.StringArray.from_buffers(COUNT, buffers[1], buffers[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=20)


def parquet_with_a_damaged_group(path: Path) -> None:
    write_parquet(path, texts(COUNT), row_group_size=20)
    damage_row_group(path, 1)


NESTED = b'{"text": "x", "more": ' + b"[" * 200 + b"]" * 200 + b"}"
CASES = {
    "UTF-8": Case("json", partial(lines_with, b'{"text": "d\xe9j\xe0"}'), f"data, line {BAD + 1}", {f"data:{BAD}"}),
    "nested": Case("json", partial(lines_with, NESTED), f"data, line {BAD + 1}", {f"data:{BAD}"}),
    "parquet UTF-8": Case("parquet", parquet_with_a_latin_text, "data, row group 1, row 11", {"data:1:11"}),
    "row group": Case("parquet", parquet_with_a_damaged_group, "data, row group 1", {f"data:1:{i}" for i in range(20)}),
}


def config_of(case: Case, folder: Path, **fields: Any) -> FullConfig:
    path = folder / "data"
    if not path.exists():
        case.write(path)
    return make_config(dataset_name=case.kind, data_files=str(path), **fields)


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_cannot_be_read_is_named_or_passed_over_and_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    with pytest.raises(DataError) as caught:
        read_until(make_data(config_of(case, tmp_path)), 1)
    assert case.where in str(caught.value)
    assert "data.on_bad_row=skip" in str(caught.value)

    data = make_data(config_of(case, tmp_path, on_bad_row="skip", eval_fraction=0.1))
    with caplog.at_level(logging.WARNING):
        seen = read_until(data, 1)
    assert count_rows(data.loader.state()).bad[0] == len(case.bad)
    told = [record.getMessage() for record in caplog.records if case.where in record.getMessage()]
    assert len(told) == (1 if len(case.bad) == 1 else len({*told})) > 0
    seen |= read_until(data, 2) | documents_of(held_out_examples(data.pipeline))
    assert not seen & case.bad
    assert len(seen) == COUNT - len(case.bad)
    assert max(count_rows(data.loader.state()).bad) == len(case.bad)  # a row counts once, however often it is read


def test_skipping_goes_on_where_stopping_ended(tmp_path: Path) -> None:
    case = CASES["UTF-8"]
    stopped, skipped = (config_of(case, tmp_path, on_bad_row=word) for word in ("stop", "skip"))
    saved = make_data(skipped).saved()
    assert make_data(stopped, saved=saved).saved() == saved


def test_more_than_allowed_names_the_last_row_and_the_limit(tmp_path: Path) -> None:
    case = CASES["row group"]
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3)
    saved = make_data(config_of(case, tmp_path, on_bad_row="skip")).saved()
    told = r"more than data\.max_bad_rows=3 rows .* the last one data, row group 1: "
    with pytest.raises(DataError, match=told):
        make_data(config)  # the look at the data before the first step
    data = make_data(config, saved=saved)
    with pytest.raises(DataError, match=told):
        read_until(data, 1)
    config = config_of(case, tmp_path, on_bad_row="skip", max_bad_rows=3, eval_fraction=0.9)
    data = make_data(config, saved=saved, accept_other_data=True)
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows=3 rows"):
        list(held_out_examples(data.pipeline))


def spoil(path: Path, count: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"#" + line[1:] if i < count else line for i, line in enumerate(lines)))


@pytest.mark.parametrize("limit", [5, 40])
def test_damage_that_appears_after_the_first_pass_is_counted_told_and_limited(
    tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    data = make_data(json_config(path, texts(COUNT), on_bad_row="skip", max_bad_rows=limit))
    read_until(data, 1)
    records = data.loader.state()
    assert not count_rows(data.loader.state()).bad
    data.loader.load_state([{**record, "bad_rows": [1]} for record in records])
    next(data.loader)
    spoil(path, 40)
    if limit == 5:
        with pytest.raises(DataError, match=r"more than data\.max_bad_rows=5 rows"):
            read_until(data, 3)
        return
    read_until(data, 3)
    first, second, third = count_rows(data.loader.state()).bad[:3]
    assert (first, third) == (4, 40)
    assert 20 <= second < 40  # some were read in this pass when they were whole
    assert 40 <= sum("not a JSON line" in record.getMessage() for record in caplog.records) < 60


def test_bad_rows_in_a_row_have_their_own_limit_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_EMPTY_DOCUMENTS", 10)
    more = {"on_bad_row": "skip", "eval_fraction": 0.0, "shuffle_buffer_size": 1}
    data = make_data(config_of(CASES["row group"], tmp_path, **more), num_lanes=1)
    read_until(data, 2)
    assert count_rows(data.loader.state()).bad == [20, 20]
    path = tmp_path / "lines"
    data = make_data(json_config(path, texts(COUNT), **more))
    spoil(path, COUNT)
    with pytest.raises(DataError, match=r"found no text in .* documents in a row"):  # no pass reaches the limit
        next(data.loader)
