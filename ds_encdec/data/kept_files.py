"""Large files that are made from data files: made once on a machine, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from ds_encdec.data.local_files import file_digest
from ds_encdec.launch.run_folder import lock_file
from ds_encdec.launch.user_cache import cache_folder
from ds_encdec.types import ConfigError

_ABANDONED_SECONDS = 86_400
"""Without a write, after which another host's unfinished file is taken for a killed process's."""


def kept_file(source: str, kind: str, make: Callable[[IO[bytes]], None], *, checked_bytes: int) -> Path:
    """The file that `make` writes from the file `source`, in the cache folder as `KIND-DIGEST`.

    It is made again when `source` has another path, size or modification time, or when it is damaged itself: its size
    and `checked_bytes` at either end are compared at every call. One process of a machine makes it while the others
    wait, and it appears whole or not at all, with the permissions of `source`. Raises what `make` raises, and OSError
    (RuntimeError without a home) where it cannot be kept.
    """
    status = os.stat(source)
    made_from = f"{os.path.realpath(source)} {status.st_size} {status.st_mtime_ns}"
    path = cache_folder() / f"{kind}-{hashlib.sha256(made_from.encode(errors='surrogateescape')).hexdigest()[:32]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.sum", "a+") as record:
        locked = False
        with suppress(ConfigError):  # without locks several may make it, each a file of its own
            locked = lock_file(record, wait=True)
        record.seek(0)
        if not path.is_file() or record.read() != file_digest(str(path), checked_bytes):
            if locked:
                _remove_unfinished(path)
            _write(path, make, status.st_mode & 0o777 | 0o600)
            record.truncate(0)
            record.write(file_digest(str(path), checked_bytes))
    return path


def _remove_unfinished(path: Path) -> None:
    """What killed processes left of it. The lock may be one of this host alone: others may be at work."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        with suppress(OSError):
            is_mine = left.name.startswith(f"{path.name}.{socket.gethostname()}.")
            if is_mine or time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                left.unlink()


def _write(path: Path, make: Callable[[IO[bytes]], None], mode: int) -> None:
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            make(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
