"""The commit: a checkpoint is whole or invisible, pruned by count."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from saves import found, make_manager, save

from ds_encdec.base.types import TrainingState
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint


def test_a_saved_checkpoint_lists_every_file_and_is_found(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 7)
    manifest = read_manifest(path)
    assert {record.path for record in manifest.files} == {"zero/shard.bin", "trainer.json"}
    assert manifest.num_bytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    assert found(manager).read_json("trainer.json") == {"step": 7}
    assert not list(tmp_path.glob("*.tmp"))


def test_retention_spares_best_and_final(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep=2)
    save(manager, 1, "best")
    for step in (2, 3, 4):
        save(manager, step)
    assert sorted(committed_steps(tmp_path)) == [1, 3, 4]
    save(manager, 5, "best", "final")
    assert sorted(committed_steps(tmp_path)) == [4, 5]
    assert (tmp_path / "best").resolve().name == "step-00000005"


def test_going_back_puts_the_later_steps_aside(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep=3)
    save(manager, 10)
    save(manager, 20, "best")
    save(manager, 30, "best")
    state = TrainingState(global_step=20, best_value=1.5, best_step=20)
    assert manager.adopt(found(manager, tmp_path / "step-00000020"), state) == state
    assert sorted(committed_steps(tmp_path)) == [10, 20]
    assert [path.name[:23] for path in tmp_path.glob("abandoned-*")] == ["abandoned-step-00000030"]
    assert (tmp_path / "best").resolve().name == (tmp_path / "latest").resolve().name == "step-00000020"
    save(manager, 25)
    assert found(manager).manifest.step == 25


def test_a_complete_run_that_is_resumed_stays_complete(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    save(manager, 10, "best")
    last = save(manager, 20, "final")
    state = TrainingState(global_step=20, best_value=1.5, best_step=10)
    for resume in ("auto", last):
        assert manager.adopt(found(manager, resume), state) == state
        assert (tmp_path / "final").resolve() == (tmp_path / "latest").resolve() == last
        assert (tmp_path / "best").resolve().name == "step-00000010"
    manager.adopt(found(manager, tmp_path / "step-00000010"), state)
    assert not (tmp_path / "final").is_symlink()  # what it pointed to is put aside


def test_going_on_from_what_was_put_aside_points_at_nothing_that_is_gone(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    aside = save(manager, 10).rename(tmp_path / "abandoned-step-00000010-20260101T000000")
    (tmp_path / "latest").unlink()
    state = manager.adopt(found(manager, aside), TrainingState(global_step=10, best_value=1.0, best_step=10))
    assert state.best_step is None
    assert [path.name for path in tmp_path.iterdir()] == [aside.name]


def test_a_checkpoint_of_another_run_brings_no_best(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    other = make_manager(tmp_path / "a")
    save(other, 10, "best")
    manager = make_manager(tmp_path / "b")
    foreign = found(manager, tmp_path / "a" / "step-00000010")
    state = manager.adopt(foreign, TrainingState(global_step=10, best_value=1.0, best_step=10))
    assert (state.best_value, state.best_step) == (None, None)
    assert sorted(committed_steps(tmp_path / "a")) == [10]


def test_what_a_kill_at_any_rename_leaves_is_mended(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 3)
    # Killed while the same step was saved again, between the two renames.
    path.rename(tmp_path / f".replaced-{path.name}")
    (tmp_path / f"{path.name}.tmp").mkdir()
    # Killed while a pointer was moved: a link to a folder is no folder.
    (tmp_path / ".latest.tmp").symlink_to(path.name)
    manager.prepare()
    assert found(manager).manifest.step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_what_cannot_be_deleted_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path, keep=1)
    save(manager, 1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr("shutil.rmtree", busy)
    save(manager, 2, "best")
    assert "could not be deleted" in caplog.text
    assert (tmp_path / "best").resolve().name == "step-00000002"
    monkeypatch.undo()
    manager.prepare()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "latest", "step-00000002"]


def test_a_step_is_saved_again_over_what_could_not_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    rmtree = shutil.rmtree

    def busy(path: Path, **options: bool) -> None:
        if path.name.startswith(".replaced-"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    second = verify_checkpoint(save(manager, 1))
    assert (tmp_path / ".replaced-step-00000001").exists()
    monkeypatch.undo()
    assert verify_checkpoint(save(manager, 1)) != second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_what_fails_after_the_rename_does_not_unsay_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target.name == "best":
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    verify_checkpoint(save(manager, 2, "best"))
    assert "step-00000002 is saved, but not all of latest, best point at it" in caplog.text
    monkeypatch.undo()
    manager.prepare()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
