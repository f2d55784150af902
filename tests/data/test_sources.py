"""Sources, users' readers too: what becomes a document, how it is named, and errors for what is missing."""

import gzip
import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parts import (
    byte_tokenizer,
    documents_of,
    make_config,
    make_data,
    texts,
    write_json_lines,
    write_parquet,
)

from ds_encdec.base.types import CheckpointError, ConfigError, DataError, Document
from ds_encdec.config.schema import MixtureSource, read_config
from ds_encdec.data.build import prepare_data
from ds_encdec.data.inspection import inspect_data
from ds_encdec.data.sources import builtin_corpus
from ds_encdec.data.sources.builtin_corpus import RandomIds, builtin_documents
from ds_encdec.data.sources.local_files import TEXT_PIECE_BYTES, JsonLines, TextFiles, expand_files
from ds_encdec.data.sources.sources import StreamSource
from ds_encdec.data.sources.tables import HubStream, HubTable, ParquetFiles, open_hub_data
from ds_encdec.model.modeling import PackedLossOutput
from ds_encdec.objectives import tokens
from ds_encdec.objectives.tokens import split_by_task
from ds_encdec.registry.denoisers import DENOISERS, Denoiser
from ds_encdec.registry.objectives import TASKS, Task
from ds_encdec.registry.source_kinds import LOCAL_SOURCES, SourceKind
from ds_encdec.training.absent import look_here


def test_builtin_corpus_is_read_once_and_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = builtin_documents()
    characters = sum(len(document.text) for document in documents)
    assert characters > 1_500_000
    assert len({document.key for document in documents}) == len(documents) > 700
    code = (
        "from ds_encdec.data.sources.builtin_corpus import builtin_documents; import hashlib; "
        "print(hashlib.sha256(repr(builtin_documents()).encode()).hexdigest())"
    )
    command = [sys.executable, "-OO", "-c", code]  # docstrings are read from source, not from compiled code
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    elsewhere = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    # Checkpoints know the corpus by this form of its documents.
    assert repr(documents[0]).startswith("Document(key='builtin/topics/assert', text=")
    assert "token_ids" not in repr(documents[0])
    assert elsewhere.stdout.strip() == hashlib.sha256(repr(documents).encode()).hexdigest()
    monkeypatch.setattr(builtin_corpus, "_read_documents", lambda *_: pytest.fail("read although cached"))
    builtin_documents.cache_clear()
    assert builtin_documents() == documents


def test_random_ids_spare_the_special_tokens() -> None:
    _, vocabulary = byte_tokenizer()
    source = RandomIds(3, vocabulary)
    tokens = np.concatenate([source.document(i).token_ids for i in range(300)])
    special = {*vocabulary.sentinel_ids, vocabulary.eos_id, vocabulary.pad_id}
    assert special.isdisjoint(tokens.tolist())
    assert len(set(tokens.tolist())) == vocabulary.vocab_size - len(special)
    np.testing.assert_array_equal(source.document(5).token_ids, RandomIds(3, vocabulary).document(5).token_ids)


def test_a_text_file_is_a_document_and_a_long_one_several(tmp_path: Path) -> None:
    short, paragraphs, unbroken = "One small file.\n", "\n\n".join(texts(3000)), "é" * TEXT_PIECE_BYTES
    for name, text in {"a": short, "b": paragraphs, "c": unbroken, "empty": ""}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    source = TextFiles(expand_files([str(tmp_path / "*.txt")]))

    documents = [source.document(i) for i in range(len(source))]
    by_file = {name: "".join(d.text for d in documents if d.key.startswith(name)) for name in ("a", "b", "c", "empty")}
    assert by_file == {"a": short, "b": paragraphs, "c": unbroken, "empty": ""}
    pieces = [d.text for d in documents if d.key.startswith("b")]
    assert len(pieces) > 5
    assert all(len(piece.encode()) <= TEXT_PIECE_BYTES for piece in pieces)
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert [source.key(i) for i in (0, 1)] == [d.key for d in documents[:2]] == ["a.txt:0", "b.txt:0"]


def test_json_lines_are_read_by_number(tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"Zeile {i} ü"}, ensure_ascii=False) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:30]) + "\n\n")  # a blank line at the end
    (tmp_path / "b.jsonl").write_text("\n".join(lines[30:]))  # and no newline
    source = JsonLines(expand_files([str(tmp_path / "*.jsonl")]), "body")
    assert len(source) == 51
    assert [source.document(i).text for i in (29, 30, 31, 50)] == ["Zeile 29 ü", "", "Zeile 30 ü", "Zeile 49 ü"]
    assert source.document(31).key == source.key(31) == "b.jsonl:0"


def test_wrong_json_lines_are_named(tmp_path: Path, golden: Callable[[object], None]) -> None:
    objects = ('{"title": "x", "id": 1}', '{"text": 5}', '{"text": "half \\ud83d pair"}', '{"text": "cut')
    lines = ['[{"text": "x"}]', *objects]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": "\\ud83d\\ude00", "other": "\\ud83d"}']))
    source = JsonLines([str(tmp_path / "a.jsonl")], "text")
    golden("\n".join(source.document(i).problem for i in range(len(lines))))
    assert source.document(len(lines)) == Document("a.jsonl:5", "😀")


def read_all(source: StreamSource) -> list[tuple[str, str]]:
    return [(d.key, d.text) for unit in range(source.num_units) for d in source.documents(unit, 0)]  # type: ignore[union-attr]


def test_parquet_keys_do_not_depend_on_the_units(tmp_path: Path) -> None:
    documents = texts(100)
    for part in range(4):
        write_parquet(tmp_path / f"{part}.parquet", documents[part::4], row_group_size=10)
    files = expand_files([str(tmp_path / "*.parquet")])
    by_file, by_group = (ParquetFiles(files, "text", num_lanes=lanes) for lanes in (1, 8))
    assert (by_file.num_units, by_group.num_units) == (4, 12)
    assert read_all(by_file) == read_all(by_group)
    assert sorted(text for _, text in read_all(by_file)) == sorted(documents)
    for source, unit, row in ((by_file, 2, 13), (by_group, 5, 4)):
        tail = [d.key for d in source.documents(unit, row)]
        assert tail == [d.key for d in source.documents(unit, 0)][row:]


def test_a_folder_keeps_its_order_when_it_moves(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("x", "y"):
        write_json_lines(tmp_path / "one" / f"{name}.jsonl", texts(5))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first, second = (JsonLines(expand_files([str(tmp_path / folder / "*")]), "text") for folder in ("one", "two"))
    assert [first.document(i) for i in range(10)] == [second.document(i) for i in range(10)]
    assert first.identity == second.identity


@pytest.fixture
def parquet_set(tmp_path: Path) -> Path:
    folder = tmp_path / "parquet_set"
    folder.mkdir()
    for part in range(2):
        write_parquet(folder / f"train-{part}.parquet", texts(40)[part::2], row_group_size=10)
    return folder


def opened(path: Path | str, *, streaming: bool, **fields: str) -> Any:
    return open_hub_data(MixtureSource(weight=1.0, dataset_name=str(path), **fields), 4, streaming=streaming)


def test_a_parquet_set_is_read_by_row_group_or_by_row(parquet_set: Path) -> None:
    stream, table = (opened(parquet_set, streaming=streaming) for streaming in (True, False))
    assert isinstance(stream, ParquetFiles)
    assert stream.num_units == 4
    assert isinstance(table, HubTable)
    read = [table.document(i).text for i in range(len(table))]
    assert sorted(read) == sorted(text for _, text in read_all(stream)) == sorted(texts(40))
    assert pickle.loads(pickle.dumps(table)).document(7) == table.document(7)


def test_another_format_is_streamed_by_shard(tmp_path: Path) -> None:
    folder = tmp_path / "json_set"
    folder.mkdir()
    for part in range(3):
        with gzip.open(folder / f"train-{part}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps({"text": text}) + "\n" for text in texts(30)[part::3]))
    source = opened(folder, streaming=True)
    assert isinstance(source, HubStream)
    assert source.num_units == 3
    assert sorted(text for _, text in read_all(source)) == sorted(texts(30))
    assert [d.key for d in source.documents(1, 4)] == [d.key for d in source.documents(1, 0)][4:]
    assert read_all(pickle.loads(pickle.dumps(source))) == read_all(source)


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_errors_say_what_exists(parquet_set: Path, streaming: bool) -> None:
    with pytest.raises(DataError, match=r"data.text_column=body: .* has no such column; it has text, id"):
        opened(parquet_set, streaming=streaming, text_column="body")
    with pytest.raises(DataError, match=r"dataset_name=.*validation: .*split.* data.data_files='FOLDER/\*\*'"):
        opened(parquet_set, streaming=streaming, dataset_split="validation")
    with pytest.raises(DataError, match="Not on the hub, or needs"):
        opened(parquet_set / "nowhere", streaming=streaming)


# Its file is open, so workers that shared its position would read nonsense.
READER = """
import json
class Lines:
    def __init__(self, path):
        self.file = open(path)
        self.starts = [0]
        while self.file.readline():
            self.starts.append(self.file.tell())
    def __len__(self):
        return len(self.starts) - 1
    def __getitem__(self, number):
        self.file.seek(self.starts[number])
        return {rows}
def lines():
    return Lines({path!r})
def nothing():
    return 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `own_lines` in the working folder, whose rows are those of a JSON file."""
    monkeypatch.chdir(tmp_path)
    path = write_json_lines(tmp_path / "a.jsonl", texts(300))
    (tmp_path / "own_lines.py").write_text(
        READER.replace("{rows}", "json.loads(self.file.readline())").format(path=path)
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "own_lines.py"
    sys.modules.pop("own_lines", None)


def own(**changes: object) -> dict[str, object]:
    return {"dataset_name": "python:own_lines:lines"} | changes


def test_a_run_goes_on_behind_the_rows_it_has_read_with_any_workers(module: Path) -> None:
    data = make_data(make_config(**own()))
    assert {key.rpartition("/")[0] for key in documents_of(next(data.loader))} == {"python:own_lines:lines"}
    saved, lanes = json.loads(json.dumps(data.saved())), data.loader.state()
    second = [batch.documents for batch in next(data.loader)]
    resumed = make_data(make_config(**own(preprocessing_num_workers=2)), saved=saved)
    resumed.loader.load_state(lanes)
    assert [batch.documents for batch in next(resumed.loader)] == second
    resumed.loader.close()
    # Another text of the module is other data.
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(CheckpointError, match=r"source 0 \(python own_lines:lines, .* there, source 1 "):
        make_data(make_config(**own()), saved=saved)


def test_prepared_rows_are_those_of_the_code_that_read_them(module: Path) -> None:
    config = make_config(**own(prepared_dir="out"))
    list(prepare_data(config, *byte_tokenizer(), 1))
    make_data(config)
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(DataError, match=r"reader's code: '\w+' there, '\w+' now"):
        make_data(config)


def test_rows_that_cannot_be_read_are_named(module: Path) -> None:
    with pytest.raises(DataError, match=r"python:own_lines:lines/\d+ has no such column; it has text, id"):
        make_data(make_config(**own(text_column="body")))
    module.write_text(module.read_text().replace("json.loads(self.file.readline())", "1 / 0"))
    sys.modules.pop("own_lines")
    with pytest.raises(DataError, match=r"python:own_lines:lines/\d+: ZeroDivisionError: division by zero"):
        make_data(make_config(**own()))
    with pytest.raises(DataError, match=r"must return an object with a length and numbered rows \(TypeError"):
        make_data(make_config(dataset_name="python:own_lines:nothing"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.dataset_name=python:own_lines:gone", "module 'own_lines' has no attribute 'gone'"),
        ("data.eval_dataset_name=python:gone:x", "No module named 'gone'"),
        ("training.callbacks=own_lines:Gone", "training.callbacks=own_lines:Gone cannot be imported"),
        ("infra.upload_to=nowhere://x", "Protocol not known: nowhere"),
    ],
)
def test_what_is_not_there_is_found_before_a_run(module: Path, setting: str, message: str) -> None:
    loaded = read_config("ds_configs/quickstart.yaml", [setting])
    look_here(loaded)
    with pytest.raises(ConfigError, match=f"(?s)1 problem:.*{message}"):
        loaded.valid()


class Numbered(list[str]):
    """A `MapSource` of the texts that `seed` gives."""

    def __init__(self, seed: int) -> None:
        super().__init__(texts(60, seed=seed))
        self.identity = {"kind": "numbered", "seed": seed}

    def key(self, index: int) -> str:
        return f"numbered/{index}"

    def document(self, index: int) -> Document:
        return Document(self.key(index), self[index])


def test_a_denoiser_and_a_kind_of_source_are_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_SOURCES, "numbered", SourceKind(f"{__name__}:Numbered", ("seed",)))
    names = list(DENOISERS)
    config = make_config(dataset_name="numbered")
    monkeypatch.setitem(DENOISERS, "R3", Denoiser(mean_span=6, density=0.3, weight=9))
    monkeypatch.setitem(TASKS, "R3", Task())
    monkeypatch.setattr(tokens, "COLUMNS", (*TASKS,))
    weights = tuple(row.weight for row in DENOISERS.values())
    config = config.model_copy(update={"data": config.data.model_copy(update={"ul2_task_weights": weights})})
    tokenizer, _ = byte_tokenizer()
    data = make_data(config, num_lanes=2)
    report = json.loads(inspect_data(data, tokenizer, num_examples=60, as_json=True))
    counts = report["statistics"]["denoisers"]
    assert list(counts) == [*names, "R3"]
    assert counts["R3"] > report["statistics"]["examples"] / 4  # 9 of 17 chunks

    assert data.fingerprint["sources"] == [{"number": 0, "size": 60, "kind": "numbered", "seed": 42}]
    batch = next(data.loader)[0]
    assert {*batch.documents} <= {f"numbered/{index}" for index in range(60)}
    losses = (batch.labels != -100).float()
    split = split_by_task(PackedLossOutput(losses.sum(), losses), batch)
    number = list(TASKS).index("R3")
    assert split.counts[number] == (batch.denoiser_ids == number).sum() > 0
    assert data.fingerprint["data.ul2_task_weights"] == list(weights)
