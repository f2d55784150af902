"""Locks of compiled operators: held, left behind, and doubtful."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_encdec.launch.disk import build_folder, clear_stale_locks


def make_lock(folder: Path, age_minutes: float) -> Path:
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    then = time.time() - age_minutes * 60
    os.utime(lock, (then, then))
    return lock


def test_old_lock_of_a_dead_build_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = make_lock(tmp_path, age_minutes=45)
    with caplog.at_level(logging.WARNING):
        clear_stale_locks(tmp_path)
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_young_lock_without_a_holder_is_left_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = make_lock(tmp_path, age_minutes=1)
    with caplog.at_level(logging.WARNING):
        clear_stale_locks(tmp_path)
    assert lock.exists()
    assert str(lock) in caplog.text
    assert "delete" in caplog.text


def test_old_lock_with_a_live_holder_is_left(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_minutes=45)
    # torch's FileBaton keeps the descriptor open for as long as it builds.
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os, sys; os.open({str(lock)!r}, os.O_RDONLY); print('held', flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        clear_stale_locks(tmp_path)
        assert lock.exists()
    finally:
        holder.kill()
        holder.wait()


def test_no_folder_is_no_problem(tmp_path: Path) -> None:
    clear_stale_locks(tmp_path / "never_built")
    assert not (tmp_path / "never_built").exists()


def test_build_folder_is_private_and_stable(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "HOME": "/root"}
    folder = build_folder(environ)
    assert folder == build_folder(environ)
    assert folder.parent == tmp_path / "ds_encdec"
    assert build_folder({"HOME": "/home/ada"}).parent == Path("/home/ada/.cache/ds_encdec")


def test_the_users_build_folder_wins() -> None:
    assert build_folder({"TORCH_EXTENSIONS_DIR": "/scratch/ext", "HOME": "/root"}) == Path("/scratch/ext")
