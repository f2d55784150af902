"""Prepared data is the data: the same examples and records, or a refusal that says why not."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
from data_parts import (
    byte_tokenizer,
    make_config,
    make_data,
    plain_batches,
    plain_examples,
    texts,
    write_parquet,
)
from tokenizers import normalizers

from ds_encdec import cli
from ds_encdec.base.types import DataError, OutputLockedError
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import prepare_data
from ds_encdec.data.inspection import split_examples
from ds_encdec.data.lane import Lane
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources import prepared as prepare
from ds_encdec.data.sources.prepared import PreparedSource
from ds_encdec.launch.disk import DiskRefusedError
from ds_encdec.launch.run_folder import lock_file

QUICKSTART = Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml"


def rows(count: int) -> list[str]:
    lines = [json.dumps({"text": text}) for text in texts(count)]
    return [("{]", '{"text": ""}')[i % 10] if i % 10 < 2 else line for i, line in enumerate(lines)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows(250)) + "\n")
    return path


def settings(lines: Path, **more: Any) -> dict[str, Any]:
    return {"dataset_name": "json", "data_files": str(lines), "on_bad_row": "skip", **more}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_work_off", lambda todo, _, *work: prepare._make(todo, *work))
    monkeypatch.setattr(prepare, "SHARD_ROWS", 7)
    monkeypatch.setattr(prepare, "MOST_PARTS", 2)


def prepared(folder: Path, data: dict[str, Any], num_proc: int = 2) -> FullConfig:
    config = make_config(**data, prepared_dir=str(folder))
    list(prepare_data(config, *byte_tokenizer(), num_proc))
    return config


def kept(folder: Path) -> dict[str, int]:
    """Return the inode of each shard that is said to be whole."""
    parts = folder.glob("source-0/0*.json")
    shards = (path for part in parts for path in part.parent.glob(f"{part.stem}-*.arrow"))
    return {path.name: path.stat().st_ino for path in shards}


def test_a_map_gives_the_same_examples_and_records(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PART_ROWS", 60)
    direct = make_data(make_config(**settings(lines)))
    config = prepared(tmp_path / "out", settings(lines, preprocessing_num_workers=2))
    away = lines.rename(tmp_path / "away.jsonl")
    data = make_data(config)  # without the source
    away.rename(lines)
    assert data.fingerprint == direct.fingerprint
    assert plain_batches(data.eval_batches()) == plain_batches(direct.eval_batches())
    for _ in range(12):
        assert plain_batches(next(data.loader)) == plain_batches(next(direct.loader))
    assert data.loader.state() == direct.loader.state()
    assert sum(count_rows(data.loader.state()).bad) > 5
    data.loader.close()

    resumed = Lane(data.pipeline, 1, direct.loader.state()[1])  # its records are good for either
    straight = Lane(direct.pipeline, 1, data.loader.state()[1])
    for _ in range(5):
        assert plain_examples(next(resumed)) == plain_examples(next(straight))


@pytest.mark.usefixtures("in_this_process")
def test_a_stream_becomes_a_map_of_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = texts(90)
    file = write_parquet(tmp_path / "a.parquet", documents, row_group_size=20)
    mixture = [{"weight": 2, "dataset_name": "parquet", "data_files": file}, {"weight": 1, "dataset_name": "builtin"}]
    config = prepared(tmp_path / "out", {"mixture": mixture})
    data = make_data(config)
    source = data.pipeline.sources[0].source
    assert isinstance(source, PreparedSource)
    tokenizer, _ = byte_tokenizer()
    found = {row.key: tokenizer.decode(row.token_ids) for row in map(source.document, range(90))}
    assert found == {f"a.parquet:{i // 20}:{i % 20}": text for i, text in enumerate(documents)}
    assert [facts["kind"] for facts in data.fingerprint["sources"]] == ["prepared parquet", "builtin"]

    # A part that is not whole is made again.
    folder = tmp_path / "out" / "source-0"
    before = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert len(before) > 13
    for gone in ("0000.json", "0001-00002.arrow"):
        (folder / gone).unlink()
    prepared(tmp_path / "out", {"mixture": mixture})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert cli.main(["verify", str(tmp_path / "out")]) == 0
    assert "source-0: 14 shards" in capsys.readouterr().out
    shard = bytearray(before["0001-00000.arrow"])
    shard[len(shard) // 2] ^= 1
    (folder / "0001-00000.arrow").write_bytes(shard)
    assert cli.main(["verify", str(tmp_path / "out")]) == DataError.exit_code
    assert "0001-00000.arrow is damaged" in capsys.readouterr().err
    (folder / "0001-00000.arrow").write_bytes(before["0001-00000.arrow"])


@pytest.mark.usefixtures("in_this_process")
def test_pairs_of_all_splits(tmp_path: Path) -> None:
    lines = [{"instruction": f"say {i}", "input": "", "output": "x" * (i % 60 + 1)} for i in range(90)]
    lines[5]["output"] = None
    for name, rows in (("own", lines[:9]), ("a", lines)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = settings(tmp_path / "a.jsonl", objective="sft", on_long_row="skip", test_files=f"{tmp_path}/own.jsonl")
    config = prepared(tmp_path / "out", data)
    ours, theirs = make_data(config), make_data(make_config(**data))
    assert ours.fingerprint == theirs.fingerprint
    for _ in range(9):
        assert plain_batches(next(ours.loader)) == plain_batches(next(theirs.loader))
    assert ours.loader.state() == theirs.loader.state()
    for split in ("validation", "test"):
        here, there = (
            [(example.key, example.decoder_ids.tolist()) for example in split_examples(one, *byte_tokenizer(), split)]
            for one in (config, make_config(**data))
        )
        assert here == there
    with pytest.raises(DataError, match=r"data.output_template: .*output.* there, .*other.* now"):
        make_data(make_config(**data, output_template="other {output}", prepared_dir=str(tmp_path / "out")))


@pytest.mark.usefixtures("in_this_process")
def test_what_is_not_the_same_is_refused(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PART_ROWS", 100)
    out = tmp_path / "out"
    config = prepared(out, settings(lines))
    with pytest.raises(DataError, match=r"source-0 was made from .*data.text_column: 'text' there, 'body' now.*delete"):
        make_data(make_config(**settings(lines, text_column="body"), prepared_dir=str(out)))
    other = byte_tokenizer.__wrapped__()
    other[0].backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match=r"tokenizer: '.*' there, '.*' now"):
        list(prepare_data(config, *other, 1))
    more = [{"weight": 1, "dataset_name": "json", "data_files": str(lines)}, {"weight": 1, "dataset_name": "random"}]
    with pytest.raises(DataError, match=r"source-1 is not finished: run `ds-encdec prepare`"):
        make_data(make_config(mixture=more, on_bad_row="skip", prepared_dir=str(out)))

    shard = out / "source-0" / "0001-00000.arrow"
    before = kept(out)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"0001-00000.arrow is missing or damaged: run `ds-encdec prepare`"):
        make_data(config)
    prepared(out, settings(lines))
    make_data(config)
    assert {name[:4] for name, file in kept(out).items() if file != before[name]} == {"0001"}  # this part

    lines.write_text("\n".join(rows(250)[::-1]) + "\n")
    for refused in (lambda: make_data(config), lambda: prepared(out, settings(lines))):
        with pytest.raises(DataError, match=r"a.jsonl.* there, .* now"):
            refused()
    with pytest.raises(DataError, match=r"more than data.max_bad_rows=20 rows cannot be read"):
        prepared(tmp_path / "some", settings(lines, max_bad_rows=20))
    with (out / ".lock").open("a+") as lock:
        assert lock_file(lock)
        with pytest.raises(OutputLockedError, match=r"data\.prepared_dir: .* is in use by "):
            prepared(out, settings(lines))


@pytest.mark.usefixtures("in_this_process")
def test_any_byte_that_changes_is_noticed_before_its_row_is_used(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.write_text("\n".join(rows(12)) + "\n")
    source = make_data(prepared(tmp_path / "out", settings(lines))).pipeline.sources[0].source
    assert isinstance(source, PreparedSource)
    whole = [source.document(index) for index in range(len(source))]
    shard = tmp_path / "out" / "source-0" / "0000-00001.arrow"
    before = shard.read_bytes()
    numbers = range(7, len(source))
    for place in range(len(before)):
        shard.write_bytes(before[:place] + bytes([before[place] ^ 1 << place % 8]) + before[place + 1 :])
        changed = pickle.loads(pickle.dumps(source))  # without the files that are open
        used: list[Any] = []
        with pytest.raises(DataError, match=r"0000-00001.arrow is damaged: delete it, and run `ds-encdec prepare`"):
            used += (changed.document(index) for index in numbers)
        assert list(map(repr, used)) == list(map(repr, whole[7:][: len(used)]))


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_that_has_changed_is_refused(tmp_path: Path) -> None:
    folder, out = tmp_path / "saved", tmp_path / "out"
    datasets.Dataset.from_dict({"text": texts(60)}).save_to_disk(folder)
    config = prepared(out, {"dataset_name": str(folder)})
    make_data(config)
    datasets.Dataset.from_dict({"text": texts(60, seed=1)}).save_to_disk(folder)
    with pytest.raises(DataError, match=r"out/source-0 was made from .*data-00000-of-00001.arrow.* now"):
        make_data(config)
    shutil.rmtree(folder)
    make_data(config)


def test_a_disk_that_takes_no_more_is_told(tmp_path: Path) -> None:
    verb = f"prepare {QUICKSTART} --num-proc 1 --out {tmp_path}/out model.architecture.vocab_size=600"
    limited = f"ulimit -f 20; exec {sys.executable} -m ds_encdec.cli {verb} data.dataset_name=random"
    process = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=120)
    assert process.returncode == DiskRefusedError.exit_code
    assert "Traceback" not in process.stderr
    assert "The prepared data has " in process.stderr
    assert "Raise the limit on the size of files (ulimit -f)" in process.stderr


@pytest.mark.usefixtures("in_this_process")
def test_a_killed_one_is_finished_and_never_read_before(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PART_ROWS", 100)
    with monkeypatch.context() as patched:
        write = mock.Mock(side_effect=[*range(22), KeyboardInterrupt])
        shard = prepare._write_shard
        patched.setattr(prepare, "_write_shard", lambda *what: (write(), shard(*what))[1])
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "out", settings(lines))
    before = kept(tmp_path / "out")
    assert {name[:4] for name in before} == {"0000"}
    config = make_config(**settings(lines), prepared_dir=str(tmp_path / "out"))
    with pytest.raises(DataError, match="is not finished: run `ds-encdec prepare`"):
        make_data(config)
    prepared(tmp_path / "out", settings(lines))
    make_data(config)
    assert before.items() <= kept(tmp_path / "out").items()
