"""Saves in the background, and saves that fail: what a run sees of them. On a disk that is full: tests/faults."""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from saves import NUM_BYTES, begin, collect, engine, found, make_manager, save
from tiny_run import wait_until

from ds_encdec.base.types import TrainingState
from ds_encdec.checkpoint.folder import committed_steps, written_whole
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.checkpoint.manifest import verify_checkpoint

BOTH_WAYS = pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "shard.bin")


def problem_of(manager: CheckpointManager, step: int, *pointers: str, **how: Any) -> str:
    begin(manager, step, *pointers, **how)
    problem = collect(manager).problem
    assert problem is not None
    return problem


def test_training_goes_on_while_files_are_written(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    written = threading.Event()
    begin(manager, 1, stage=engine(before_writing=written.wait), in_background=True)
    time.sleep(0.2)
    assert not manager.save_is_over
    assert not committed_steps(tmp_path)
    written.set()
    wait_until(lambda: manager.save_is_over, 10)
    outcome = collect(manager)
    assert outcome.problem is None
    assert verify_checkpoint(tmp_path / "step-00000001").num_bytes > NUM_BYTES
    assert outcome.blocked_seconds < outcome.seconds - 0.15  # not held up while this test slept
    assert outcome.state.global_step == 1
    assert not manager.save_is_over
    assert manager.collect() is None


@BOTH_WAYS
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path, in_background: bool) -> None:
    manager = make_manager(tmp_path)
    earlier = save(manager, 1, "best")
    problem = problem_of(manager, 2, "best", stage=engine(no_space, num_bytes=4321), in_background=in_background)
    assert "rank 0: [Errno 28] No space left on device: 'shard.bin'" in problem
    assert "about 4.3 KB" in problem
    assert f"free in {tmp_path}" in problem
    assert "training.save_total_limit" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", earlier.name]
    assert (tmp_path / "best").resolve() == (tmp_path / "latest").resolve() == earlier
    verify_checkpoint(earlier)
    verify_checkpoint(save(manager, 3))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is flushed, and what gets its name by a rename, in their order."""
    done: list[Path] = []
    fsync, rename = os.fsync, os.rename

    def flush(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def name(source: Path, target: Path) -> None:
        done.append(Path(target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", name)
    return done


def test_a_commit_is_durable_in_its_order(tmp_path: Path, done: list[Path]) -> None:
    final, temporary = save(make_manager(tmp_path), 1), tmp_path / "step-00000001.tmp"
    named = done.index(final)
    written = {temporary / path.relative_to(final) for path in (final, *final.rglob("*"))}
    manifest = temporary / f".manifest.json.{socket.gethostname()}.{os.getpid()}.tmp"  # which is named when it is whole
    assert (written - {temporary / "manifest.json"}) | {manifest} <= set(done[:named])
    assert temporary in done[done.index(manifest) : named]
    assert tmp_path in done[named:]


def test_an_export_is_durable_in_its_order(tmp_path: Path, done: list[Path]) -> None:
    final, temporary = tmp_path / "out", tmp_path / "out.tmp"
    with written_whole(final) as (folder, _):
        (folder / "part").mkdir()
        (folder / "part" / "model.safetensors").touch()
    named = done.index(final)
    assert {temporary, temporary / "part", temporary / "part" / "model.safetensors"} <= set(done[:named])
    assert tmp_path in done[named:]


def test_the_same_step_again_that_fails_leaves_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path)
    first = verify_checkpoint(save(manager, 1))
    rename = os.rename

    def full(source: Path, target: Path) -> None:
        if source.name.endswith(".tmp"):
            no_space()
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    assert "No space" in problem_of(manager, 1)
    assert verify_checkpoint(tmp_path / "step-00000001") == first


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    written: list[int] = []
    problem = problem_of(manager, 1, stage=engine(before_writing=lambda: written.append(1), num_bytes=1 << 60))
    assert problem.startswith("too little space is free. The checkpoint takes about ")
    assert not written
    assert not list(tmp_path.iterdir())


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [IndexError("a bug"), ConnectionResetError(errno.ECONNRESET, "by peer")], ids=repr)
def test_what_the_disk_is_not_to_blame_for_is_raised(tmp_path: Path, error: Exception) -> None:
    manager = make_manager(tmp_path)
    begin(manager, 1, stage=engine(raiser(error)), in_background=True)
    with pytest.raises(Exception, match=type(error).__name__):
        manager.collect()
    assert manager.collect() is None
    assert not committed_steps(tmp_path)


def test_an_interrupted_wait_leaves_the_save_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    manager = make_manager(tmp_path)
    begin(manager, 1, in_background=True)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Future, "exception", raiser(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            manager.collect()
    manager.close()
    assert list(committed_steps(tmp_path)) == [1]
    assert "saved step 1" in caplog.text


def test_closing_waits_for_the_save_under_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(tmp_path)
    manager.close()
    begin(manager, 1, stage=engine(before_writing=lambda: time.sleep(0.2)), in_background=True)
    manager.close()
    assert sorted(committed_steps(tmp_path)) == [1]
    for reason in (no_space, raiser(IndexError("a bug"))):
        begin(manager, 2, stage=engine(reason), in_background=True)
        manager.close()
    assert "step 2 was not saved: rank 0: [Errno 28]" in caplog.text
    assert "IndexError" in caplog.text


def test_a_failure_says_how_many_and_what_is_left(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    told = []
    for step, before_writing in enumerate((no_space, None, no_space, no_space, None), start=1):
        begin(manager, step, stage=engine(before_writing) if before_writing else None)
        outcome = collect(manager)
        told.append((outcome.failures, outcome.newest_step))
    assert told == [(1, None), (0, 2), (1, 2), (2, 2), (0, 5)]
    resumed = make_manager(tmp_path)
    resumed.adopt(found(resumed), TrainingState(5))
    begin(resumed, 6, stage=engine(no_space))
    assert collect(resumed).newest_step == 5
