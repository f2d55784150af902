"""Manifests and records that are wrong: `auto` passes over them, every tool says so with exit code 5, nothing hangs."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_checkpoints import config, flip_byte, random_state, save_checkpoint

from ds_encdec import cli
from ds_encdec.base.types import CheckpointError
from ds_encdec.checkpoint.manager import find_checkpoint
from ds_encdec.checkpoint.manifest import MANIFEST, DamagedCheckpointError, _content_hash, read_manifest, record_file
from ds_encdec.config.yaml.plain_files import MAX_RECORD_BYTES
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.weights import INDEX_FILE, SafetensorsFolder

Output = pytest.CaptureFixture[str]
NEWEST = "step-00000300"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    for step, engine in ((100, "dcp"), (200, "deepspeed"), (300, "dcp")):
        save_checkpoint(run / "checkpoints", step, random_state(config(), 0), config(), engine=engine)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def changed(rehash: bool = False, **fields: Any) -> Callable[[Path], None]:

    def change(manifest: Path) -> None:
        content = json.loads(manifest.read_text()) | fields
        if rehash:
            del content["sha256"]
            content["sha256"] = _content_hash(content)
        manifest.write_text(json.dumps(content))

    return change


def text(content: bytes) -> Callable[[Path], object]:
    return lambda manifest: manifest.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(manifest: Path) -> None:
        manifest.unlink()
        make(manifest)

    return damage


def listed_fifo(manifest: Path) -> None:
    victim = next(manifest.parent.glob("dcp/*.distcp"))
    victim.unlink()
    os.mkfifo(victim)


NO_TEXT = [{"path": ["a"], "num_bytes": 1, "sha256": ""}]
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (text(b'"abc"'), "it holds no JSON object"),
    "nested": (text(b'{"step": ' + b"[" * 100_000), "nested more than 100 deep"),
    "large": (lambda manifest: os.truncate(manifest, MAX_RECORD_BYTES + 1), "larger than 32 MB"),
    "fifo": (instead(os.mkfifo), "a FIFO"),
    "broken link": (instead(lambda manifest: manifest.symlink_to("nowhere")), "no manifest.json"),
    "another step": (changed(step=999_999), "own SHA-256"),
    "unknown format": (changed(format_version=6), "format version is 6"),
    "a state that is not finite": (changed(True, state_is_finite=False), "the state is not finite"),
    "finite as a number": (changed(True, state_is_finite=1), "state_is_finite is 1: Input should be a valid boolean"),
    "step as text": (changed(True, step="7"), "step is '7'"),
    "rehashed, list as path": (
        changed(True, files=NO_TEXT),
        "files.0.path is ['a']: Input should be a valid string",
    ),
    "rehashed, another key": (changed(True, more=1), "more is 1: Unexpected keyword"),
    "listed fifo": (listed_fifo, "a FIFO; a checkpoint holds plain files"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_manifest_that_is_none(run: Path, capsys: Output, damage: str) -> None:
    newest = run / "checkpoints" / NEWEST
    spoil, message = DAMAGE[damage]
    spoil(newest / MANIFEST)
    found = find_checkpoint(run / "checkpoints", HostCollectives(), "auto")
    assert found is not None
    assert found.manifest.step == 200
    with pytest.raises(DamagedCheckpointError) as caught:
        find_checkpoint(run / "checkpoints", HostCollectives(), str(newest))
    assert message in str(caught.value)
    out = run.parent / "out"
    for words in (["verify", run], ["verify", newest], ["export", newest, out], ["average", run, out]):
        assert cli.main([str(word) for word in words]) == 5, words
        assert message in capsys.readouterr().err


def test_the_only_checkpoint_is_not_written_over_because_its_manifest_is_a_folder(run: Path) -> None:
    for step in (100, 200):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    instead(Path.mkdir)(run / "checkpoints" / NEWEST / MANIFEST)
    with pytest.raises(CheckpointError, match=r"none of its checkpoints \(1\) is whole"):
        find_checkpoint(run / "checkpoints", HostCollectives(), "auto")


def reseal(checkpoint: Path, name: str, content: str) -> None:
    (checkpoint / name).write_text(content)
    sealed = read_manifest(checkpoint)
    files = tuple(record_file(checkpoint / record.path, checkpoint) for record in sealed.files)
    (checkpoint / MANIFEST).write_text(replace(sealed, files=files).to_json())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer.json", "{}", "has no 'state'"),
        ("trainer.json", '{"state": {"steps": 5}}', "`state` was not written"),
        ("trainer.json", "[]", "holds no JSON object"),
        ("engine.json", '{"groups": [1]}', "no readable record of an engine"),
    ],
)
def test_records_that_are_none(run: Path, capsys: Output, name: str, content: str, message: str) -> None:
    newest = run / "checkpoints" / NEWEST
    reseal(newest, name, content)
    assert cli.main(["export", str(newest), str(run.parent / "out")]) == 5
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["[1]", '{"weight_map": [1]}', '{"weight_map": {"a": "../x"}}', "[" * 10**5, None],
)
def test_an_index_of_shards_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is None:
        os.mkfifo(tmp_path / INDEX_FILE)
    else:
        (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="has neither" if content is None else "is damaged"):
        SafetensorsFolder(tmp_path)


Output = pytest.CaptureFixture[str]


def test_a_checkpoint_a_run_and_its_folder_of_checkpoints(run: Path, capsys: Output) -> None:
    (run / "checkpoints" / "final").symlink_to("step-00000300")
    assert cli.main(["verify", str(run / "checkpoints" / "final")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    checkpoint = run / "checkpoints" / "step-00000300"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json")
    assert line.startswith(f"{checkpoint}: whole; step 300, dcp zero0 on 1 rank, ")
    assert line.endswith(f" {size / 1e9:.3f} GB")
    for path in (run, run / "checkpoints"):
        assert cli.main(["verify", str(path)]) == 0
        found = [line.partition(" on ")[0].rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()]
        assert found == ["step 100, dcp zero0", "step 200, deepspeed zero0", "step 300, dcp zero0"]


def test_every_damaged_one_is_named_and_the_others_are_still_checked(run: Path, capsys: Output) -> None:
    flipped = run / "checkpoints" / "step-00000100" / "dcp" / ".metadata"
    flip_byte(flipped)
    missing = run / "checkpoints" / "step-00000200" / "trainer.json"
    missing.unlink()
    assert cli.main(["verify", str(run)]) == 5
    shown = capsys.readouterr()
    assert [line.split(": whole")[0] for line in shown.out.splitlines()] == [str(run / "checkpoints" / "step-00000300")]
    assert f"{flipped}: its SHA-256" in shown.err
    assert f"{missing}: missing" in shown.err


def test_what_is_no_checkpoint(tmp_path: Path, capsys: Output) -> None:
    assert cli.main(["verify", str(tmp_path)]) == 5
    assert "no manifest.json" in capsys.readouterr().err
