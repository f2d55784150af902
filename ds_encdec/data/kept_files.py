"""Large files that are made from data files: made once on a machine, and kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from ds_encdec.data.local_files import file_digest
from ds_encdec.launch.user_cache import cache_folder


def kept_file(source: str, kind: str, make: Callable[[IO[bytes]], None], *, checked_bytes: int) -> Path:
    """The file that `make` writes from the file `source`, in the cache folder as `KIND-DIGEST`.

    It is made again when `source` has another path, size or modification time, or when it is damaged itself: its size
    and `checked_bytes` at either end are compared at every call. One process of a machine makes it while the others
    wait, and it appears whole or not at all. Raises what `make` raises, and OSError (RuntimeError without a home) where
    it cannot be kept.
    """
    status = os.stat(source)
    made_from = f"{os.path.realpath(source)} {status.st_size} {status.st_mtime_ns}"
    path = cache_folder() / f"{kind}-{hashlib.sha256(made_from.encode(errors='surrogateescape')).hexdigest()[:32]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.sum", "a+") as record:
        with suppress(OSError):  # without locks several may make it, each a file of its own
            fcntl.flock(record, fcntl.LOCK_EX)
        record.seek(0)
        if not path.is_file() or record.read() != file_digest(str(path), checked_bytes):
            _write(path, make)
            record.truncate(0)
            record.write(file_digest(str(path), checked_bytes))
    return path


def _write(path: Path, make: Callable[[IO[bytes]], None]) -> None:
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            make(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
