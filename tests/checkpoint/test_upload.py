"""Copies of a run's outputs on another file system: complete or not to be taken for complete, and never in the way."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from saves import make_manager, save

from ds_encdec.checkpoint.manifest import MANIFEST, verify_checkpoint
from ds_encdec.checkpoint.upload import Uploads
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.types import TrainingState


def tell(uploads: Uploads, checkpoint: Path) -> None:
    uploads.after_save(TrainingState(), checkpoint)


def test_checkpoints_and_exports_arrive_whole(tmp_path: Path) -> None:
    run, there = RunFolder(str(tmp_path / "run")), tmp_path / "there"
    run.root.mkdir()
    manager = make_manager(run.checkpoints)
    (run.root / "metrics.jsonl").write_text("{}\n")
    with Uploads(run, f"file://{there}") as uploads:
        tell(uploads, save(manager, 1, "best"))
        tell(uploads, save(manager, 2, "final"))
        (run.exports / "final").mkdir(parents=True)
        (run.exports / "final" / "config.json").write_text("{}")
    for step in (1, 2):
        assert verify_checkpoint(there / "checkpoints" / f"step-{step:08d}").step == step
    assert (there / "export" / "final" / "config.json").read_text() == "{}"
    assert (there / "metrics.jsonl").exists()
    # A step that is saved again after a rollback takes the place of the earlier one, in another process, too.
    with Uploads(run, f"file://{there}") as uploads:
        tell(uploads, save(manager, 2))
    for name in (MANIFEST, "zero/shard.bin"):
        copied, own = (folder / "checkpoints" / "step-00000002" / name for folder in (there, run.root))
        assert copied.read_bytes() == own.read_bytes()


def test_what_fails_is_no_manifest_a_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, there = RunFolder(str(tmp_path / "run")), tmp_path / "there"
    run.root.mkdir()
    manager, tried, put = make_manager(run.checkpoints), threading.Event(), LocalFileSystem.put_file
    broken = True

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        if broken and path.endswith("shard.bin"):
            tried.set()
            raise ConnectionError("the line is down")
        put(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    with caplog.at_level(logging.WARNING), Uploads(run, f"file://{there}") as uploads:
        tell(uploads, save(manager, 1))
        assert tried.wait(30)
        assert not list(there.rglob(MANIFEST))
        broken = False
        tell(uploads, save(manager, 2))
    assert "ConnectionError: the line is down. It is tried again after the next save." in caplog.text
    assert sorted(path.parent.name for path in there.rglob(MANIFEST)) == ["step-00000001", "step-00000002"]


def test_a_slow_copy_holds_nothing_up_and_what_was_deleted_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, there = RunFolder(str(tmp_path / "run")), tmp_path / "there"
    run.root.mkdir()
    manager, copies, put = make_manager(run.checkpoints, keep=1), threading.Event(), LocalFileSystem.put_file

    def put_file(self: LocalFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        assert copies.wait(30)
        put(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    with caplog.at_level(logging.INFO), Uploads(run, f"file://{there}") as uploads:
        for step in (1, 2, 3):
            tell(uploads, save(manager, step))  # returns although nothing is copied yet
        copies.set()
    assert [path.parent.name for path in there.rglob(MANIFEST)] == ["step-00000003"]


def test_without_a_url_nothing_is_done(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "run"))
    with Uploads(run, None) as uploads:
        tell(uploads, tmp_path)
    assert not run.root.exists()
