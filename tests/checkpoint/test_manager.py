"""The commit: a checkpoint is whole or invisible, pruned by count; and what a run sees of saves in the background and
of failed ones. On a disk that is full: tests/faults."""

import errno
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from disk_calls import Call, recorded
from saved_checkpoints import flip_byte
from saves import NUM_BYTES, begin, collect, engine, find, found, make_manager, save
from tiny_run import wait_until

from ds_encdec.base.types import CheckpointError, ConfigError, TrainingState
from ds_encdec.checkpoint.folder import Checkpoint, committed_steps, written_whole
from ds_encdec.checkpoint.manager import CheckpointManager, find_checkpoint
from ds_encdec.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint
from ds_encdec.launch.host_collectives import HostCollectives


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


def test_going_back_puts_the_later_steps_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path, keep=3)
    save(manager, 10)
    save(manager, 20, "best")
    save(manager, 30, "best")
    state = TrainingState(global_step=20, best_value=1.5, best_step=20)
    with monkeypatch.context() as watched:
        watched.setattr(time, "strftime", lambda _: "now")
        done = recorded(watched)
        assert manager.adopt(found(manager, tmp_path / "step-00000020"), state) == state
    assert done[:4] == [  # a link names what is there at any moment
        Call("replace", tmp_path / "best"),
        Call("replace", tmp_path / "latest"),
        Call("fsync", tmp_path),
        Call("rename", tmp_path / "abandoned-step-00000030-now"),
    ]
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


def test_nothing_to_resume(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    assert find(manager, "auto") is None
    assert find(manager, None) is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        find(manager, str(tmp_path / "empty"))
    save(manager, 1, "final")
    with pytest.raises(CheckpointError, match=r"give .*final"):
        find(manager, str(tmp_path))


@pytest.mark.parametrize("damage", [flip_byte, lambda shard: os.truncate(shard, NUM_BYTES - 1), Path.unlink])
def test_auto_passes_over_a_damaged_checkpoint_and_a_path_is_refused(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    newest = save(manager, 2)
    shard = newest / "zero" / "shard.bin"
    damage(shard)
    assert found(manager).manifest.step == 1
    with pytest.raises(CheckpointError, match=r"shard\.bin"):
        find(manager, str(newest))


def test_auto_looks_no_later_than_it_is_told(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    for step in (2, 4, 6):
        save(manager, step)
    for latest, step in ((7, 6), (5, 4), (4, 4), (1, None)):
        newest = find_checkpoint(manager.folder, HostCollectives(), "auto", at_most=latest)
        assert (newest and newest.manifest.step) == step


def test_a_foreign_file_or_link_is_refused_before_anything_reads_it(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    path = save(manager, 1)
    foreign = path / "zero" / "foreign_optim_states.pt"
    foreign.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"foreign_optim_states\.pt: not in the manifest"):
        find(manager, str(path))
    foreign.unlink()
    shard = path / "zero" / "shard.bin"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a symbolic link"):
        find(manager, str(path))


def test_what_other_run_and_other_ranks_cannot_use_is_refused_before_large_files_are_read(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    newest = save(manager, 2)
    (newest / "zero" / "shard.bin").write_bytes(b"x" * 1000)  # nobody notices: it is not read
    seen = []

    def refuse(checkpoint: Checkpoint) -> None:
        seen.append(checkpoint.read_json("trainer.json"))
        raise ConfigError("3 ranks do not divide")

    for resume in ("auto", str(newest)):
        with pytest.raises(ConfigError, match="3 ranks"):
            find_checkpoint(tmp_path, HostCollectives(), resume, accept=refuse)
    assert seen == [{"step": 2}, {"step": 2}]  # refused, not passed over
    (newest / "trainer.json").write_text(json.dumps({"step": 9}))
    with pytest.raises(ConfigError):
        find_checkpoint(tmp_path, HostCollectives(), "auto", accept=refuse)
    assert seen[2:] == [{"step": 1}]  # a damaged one is not even asked about


def test_a_checkpoint_of_another_run_is_refused_where_this_run_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    foreign = save(make_manager(tmp_path / "a"), 10)
    manager = make_manager(tmp_path / "b")
    assert find(manager, str(foreign)) is not None
    own = save(manager, 3, "final")
    with pytest.raises(
        CheckpointError, match=rf"{foreign} is not one of .*{tmp_path / 'b'}.*step-00000003.*output_dir"
    ):
        find(manager, str(foreign))
    assert find(manager, str(tmp_path / "b" / "final")) is not None
    aside = own.with_name("abandoned-step-00000009")
    foreign.rename(aside)
    with pytest.raises(CheckpointError, match="is not one of this run's"):
        find(manager, str(aside))


BOTH_WAYS = pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "shard.bin")


def problem_of(manager: CheckpointManager, step: int, *pointers: str, **how: Any) -> str:
    begin(manager, step, *pointers, **how)
    problem = collect(manager).problem
    assert problem is not None
    return str(problem)


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


def test_a_commit_is_durable_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(tmp_path, keep=1)
    old = save(manager, 1)
    done = recorded(monkeypatch)
    final, temporary = save(manager, 2, "best"), tmp_path / "step-00000002.tmp"
    manifest = temporary / f".manifest.json.{socket.gethostname()}.{os.getpid()}.tmp"
    written = {temporary / path.relative_to(final) for path in (final, *final.rglob("*"))} - {temporary / MANIFEST}
    named = done.index(Call("rename", final))
    assert written | {manifest} <= {path for name, path in done[:named] if name == "fsync"}
    assert done[done.index(Call("fsync", manifest)) :][:9] == [
        Call("fsync", manifest),
        Call("replace", temporary / MANIFEST),
        Call("fsync", temporary),
        Call("rename", final),
        Call("fsync", tmp_path),  # before a link names it
        Call("replace", tmp_path / "latest"),
        Call("replace", tmp_path / "best"),
        Call("fsync", tmp_path),  # before anything that they named before is gone
        Call("rename", old.with_name(f"{old.name}.tmp")),
    ]


def flushes(folder: Path, after: Path) -> Callable[[Call], bool]:
    """Whether a call flushes `folder` with `after` in it: the flush behind that rename."""
    return lambda call: call == Call("fsync", folder) and after.is_dir()


@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
def test_a_name_that_may_not_be_on_the_disk_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    manager = make_manager(tmp_path, keep=1)
    earlier = verify_checkpoint(save(manager, 1, "best"))
    with monkeypatch.context() as broken:
        final = tmp_path / f"step-{step:08d}"
        done = recorded(broken, lambda call: flushes(tmp_path, final)(call) and Call("rename", final) in done)
        problem = problem_of(manager, step, "best")
    assert "Input/output error" in problem
    assert verify_checkpoint(tmp_path / "step-00000001") == earlier
    assert list(committed_steps(tmp_path)) == [1]
    assert (tmp_path / "best").resolve() == (tmp_path / "latest").resolve() == tmp_path / "step-00000001"
    verify_checkpoint(save(manager, step, "best"))


def test_nothing_old_is_deleted_until_the_links_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(tmp_path, keep=1)
    save(manager, 1)
    linked = Call("replace", tmp_path / "latest")
    with monkeypatch.context() as broken:
        done = recorded(broken, lambda call: call == Call("fsync", tmp_path) and linked in done)
        save(manager, 2)
    assert list(committed_steps(tmp_path)) == [1, 2]
    assert "step-00000002 is saved, but not all of latest point at it" in caplog.text
    save(manager, 3)
    assert list(committed_steps(tmp_path)) == [3]


def test_pointers_that_no_run_has_left_are_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that has followed links has folders in their place; a power loss may leave links to nothing."""
    manager = make_manager(tmp_path)
    newest = save(manager, 2, "best", "final")
    (tmp_path / "latest").unlink()
    shutil.copytree(newest, tmp_path / "latest")
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-00000009")
    resumed = make_manager(tmp_path)
    assert not (tmp_path / "best").is_symlink()
    resumed.adopt(found(resumed), TrainingState(2, best_step=2))
    assert {(tmp_path / name).readlink().name for name in ("latest", "best", "final")} == {newest.name}
    assert "It is no link: latest is now abandoned-latest-" in caplog.text
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # while a run is on
    later = save(resumed, 3)
    assert (tmp_path / "latest").resolve() == later


def test_an_export_is_durable_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, temporary = tmp_path / "export" / "out", tmp_path / "export" / "out.tmp"
    done = recorded(monkeypatch)
    with written_whole(final):
        assert done == [Call("fsync", tmp_path)]  # the name of `export`
    done.clear()
    with written_whole(final, replace=True) as (folder, _):
        (folder / "part").mkdir()
        (folder / "part" / "model.safetensors").touch()
    named = done.index(Call("rename", final))
    flushed = {path for name, path in done[:named] if name == "fsync"}
    assert {temporary, temporary / "part", temporary / "part" / "model.safetensors"} <= flushed
    assert done[named + 1] == Call("fsync", final.parent)
    assert [path.name for path in final.parent.iterdir()] == ["out"]


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
        told.append((outcome.failures, manager.newest_step))
    assert told == [(1, None), (0, 2), (1, 2), (2, 2), (0, 5)]
    resumed = make_manager(tmp_path)
    resumed.adopt(found(resumed), TrainingState(5))
    begin(resumed, 6, stage=engine(no_space))
    collect(resumed)
    assert resumed.newest_step == 5
