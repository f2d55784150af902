"""Files that appear whole under their names or not at all, names that are free, and flushing to make all durable."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` when the block is left without an error, and is removed otherwise.

    A reader, or a crash, sees the old content or the new one and nothing between. Until then it is called
    `.NAME.HOST.PID.tmp`, beside `path`; only a kill leaves that behind. `mode`: its permissions, before the umask.
    Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path`, text in UTF-8, by way of an `atomic_file`. Raises OSError."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def flush_folder(path: Path) -> None:
    """Make the names in a folder, or the content of a file, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Make `folder` and all files in it durable."""
    for path in (folder, *folder.rglob("*")):
        flush_folder(path)


def unused_path(path: Path) -> Path:
    """`path`, or where there is one already, with the first number behind it that is free."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())
