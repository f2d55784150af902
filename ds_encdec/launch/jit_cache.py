"""The folder in which DeepSpeed's C++ operators are compiled, and its locks that nobody holds.

torch compiles an operator under a file lock (torch/utils/file_baton.py): a file called `lock` that is
removed when the build ends. A build that is killed leaves it behind, and every later start then waits
for it, for ever and without a word.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

STALE_AFTER_MINUTES = 10.0
"""Builds of DeepSpeed's CPU operators take 1 to 5 minutes, the longest on two busy cores."""


def build_folder(environ: Mapping[str, str]) -> Path:
    """The folder for compiled operators: the user's TORCH_EXTENSIONS_DIR, or a private, stable one.

    The private one carries a hash of what the binaries depend on (versions, instruction set), so an
    upgrade, or another kind of node that shares the home folder, never loads what does not fit it.
    """
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/tmp")) / ".cache")
    parts = [platform.python_version(), platform.machine(), _cpu_flags()]
    parts += [importlib.metadata.version(name) for name in ("torch", "deepspeed")]
    fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return cache / "ds_encdec" / f"torch_extensions-{fingerprint}"


def _cpu_flags() -> str:
    """The instruction sets of this CPU: operators are compiled with -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def clear_stale_locks(folder: Path, stale_after_minutes: float = STALE_AFTER_MINUTES) -> None:
    """Remove locks of builds that were killed; say so when that cannot be known.

    A lock is removed when no process of this machine holds it open and it is older than
    `stale_after_minutes`. A younger one may belong to a build on another machine, or in another
    container, that shares the folder: it is left, and the log names the file to delete. Call it on one
    rank per node, before the ranks meet: no rank of this run can be building then.
    """
    for lock in sorted(folder.glob("*/lock")):
        try:
            age_minutes = (time.time() - lock.stat().st_mtime) / 60
        except FileNotFoundError:
            continue  # released between glob and stat
        if _is_open_anywhere(lock):
            logger.warning("Waiting for another process that compiles %s (%s).", lock.parent.name, lock)
        elif age_minutes > stale_after_minutes:
            lock.unlink(missing_ok=True)
            logger.warning("Removed %s: left behind by a build that was killed %.0f minutes ago.", lock, age_minutes)
        else:
            logger.warning(
                "%s is %.1f minutes old and no process of this machine holds it. If no other machine or container is "
                "compiling %s, its build was killed and this run will wait for ever: delete the file and start again.",
                lock,
                age_minutes,
                lock.parent.name,
            )


def _is_open_anywhere(path: Path) -> bool:
    """True if a process has the file open, as far as this user may look."""
    target = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(opened.path == target for opened in process.open_files()):
                return True
        except psutil.Error:
            continue  # gone, or another user's
    return False
