"""The user's cache folder: texts that every process needs and that take a second, and DeepSpeed's compiled operators.

torch compiles an operator under a file lock (torch/utils/file_baton.py): a file called `lock` that is removed when the
build ends. A build that is killed leaves it behind, and every later start then waits for it, for ever and silently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ds_encdec.launch.disk import write_atomically

logger = logging.getLogger(__name__)

STALE_AFTER_MINUTES = 10.0
"""Builds of DeepSpeed's CPU operators take 1 to 5 minutes, the longest on two busy cores."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/ds_encdec`, which need not exist. Raises RuntimeError without that variable and a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ds_encdec")


def cached(name: str, made_from: Iterable[bytes], make: Callable[[], str]) -> str:
    """The text that `make` returns, or returned to an earlier call with this `name` and `made_from`.

    It is kept in `$XDG_CACHE_HOME/ds_encdec/NAME-DIGEST.json`: a line with its digest, and a line of JSON. No run ends
    for the cache's sake: without a home, or an OSError from `made_from`, `make` is called every time; a file that is
    damaged is written anew; one that cannot be written is not.
    """
    path = None
    with suppress(OSError, RuntimeError, ValueError):  # of these the last two: no home; no text, or not two lines
        path = cache_folder() / f"{name}-{_digest(made_from)}.json"
        digest, line = path.read_text().split("\n")
        if digest == _digest([line.encode()]):
            return json.loads(line)
    text = make()
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(text)
            write_atomically(path, f"{_digest([line.encode()])}\n{line}")
    return text


def _digest(parts: Iterable[bytes]) -> str:
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:32]


def build_folder(environ: Mapping[str, str]) -> Path:
    """The folder for compiled operators: the user's TORCH_EXTENSIONS_DIR, or a private, stable one.

    The private one carries a hash of what the binaries depend on (versions, instruction set), so an
    upgrade, or another kind of node that shares the home folder, never loads what does not fit it.
    """
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/tmp")) / ".cache")
    # Operators are compiled with -march=native; FSDP2 does without deepspeed.
    parts = [platform.python_version(), platform.machine(), cpu_line("flags", "Features")]
    parts += installed_versions("torch", "deepspeed").values()
    fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return cache / "ds_encdec" / f"torch_extensions-{fingerprint}"


def cpu_line(*beginnings: str) -> str:
    """The first line of /proc/cpuinfo with one of these beginnings; empty where there is none, as outside Linux."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.rstrip("\n") for line in lines if line.startswith(beginnings)), "")
    return ""


def installed_versions(*packages: str) -> dict[str, str]:
    """The versions of those of `packages` that are installed, by name."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def clear_stale_locks(folder: Path, stale_after_minutes: float = STALE_AFTER_MINUTES) -> None:
    """Remove locks of builds that were killed; say so when that cannot be known.

    A lock is removed when no process of this machine holds it open and it is older than
    `stale_after_minutes`. A younger one may belong to a build on another machine, or in another
    container, that shares the folder: it is left, and the log names the file to delete. Call it on one
    rank per node, before the ranks meet: no rank of this run can be building then.
    """
    for lock in sorted(folder.glob("*/lock")):
        with suppress(FileNotFoundError):  # released between glob and stat
            age_minutes = (time.time() - lock.stat().st_mtime) / 60
            opened = (process.info["open_files"] or () for process in psutil.process_iter(["open_files"]))
            if str(lock.resolve()) in {file.path for files in opened for file in files}:  # as far as this user may look
                logger.warning("Waiting for another process that compiles %s (%s).", lock.parent.name, lock)
            elif age_minutes > stale_after_minutes:
                lock.unlink(missing_ok=True)
                logger.warning(
                    "Removed %s: left behind by a build that was killed %.0f minutes ago.", lock, age_minutes
                )
            else:
                logger.warning(
                    "%s is %.1f minutes old and no process of this machine holds it. If no other machine or container "
                    "is compiling %s, its build was killed and this run will wait for ever: delete the file and start "
                    "again.",
                    lock,
                    age_minutes,
                    lock.parent.name,
                )
