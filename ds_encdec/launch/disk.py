"""Files that appear whole under their names or not at all, and file systems that do not take what is written.

Those are recognised in errors, and reported with what is free and what to do.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ds_encdec.types import CheckpointError, DsEncDecError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = {
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f).",
    errno.EROFS: "Make its file system writable again.",
}
_LOOK = "Look at that file system: is it mounted, healthy, and writable for this user?"


class DiskRefusedError(CheckpointError):
    """A file system does not take the files of a checkpoint or model."""


def disk_error(error: BaseException | None) -> OSError | None:
    """The OSError of a file system that `error` is or was raised from; None for others, also those of a network.

    An error that only happened while an OSError was handled is not one, but for RuntimeError: torch.save raises that
    where it cannot close its file after an OSError.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or (error.__context__ if type(error) is RuntimeError else None)
    return None if isinstance(error, ConnectionError | TimeoutError) else error


def free_bytes(folder: Path) -> int | None:
    """Space on the file system of `folder`; None where that does not say (some network ones report 0 in all)."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


@dataclass(slots=True)
class Writing:
    """Files that are being written into `folder`, and what is said where its file system does not take them.

    `what` they are ("The checkpoint"), how one would `make_room`, the rank that writes, where there are several, and
    the bytes they take (0: not known yet).
    """

    folder: Path
    what: str
    make_room: str
    rank: int | None = None
    num_bytes: int = 0

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Raise DiskRefusedError where what is wrapped, a block or a function, raises a file system's error."""
        try:
            yield
        except Exception as error:
            refusal = None if isinstance(error, DsEncDecError) else disk_error(error)  # ours says it already
            if refusal is None:
                raise
            # Ranks that write together all raise the error of one, which says whose it is.
            named = self.rank is None or (refusal.strerror or "").startswith("rank ")
            cause = f"{'' if named else f'rank {self.rank}: '}{refusal}"
            advice = self.make_room if refusal.errno in NO_SPACE else _ADVICE.get(refusal.errno or 0, _LOOK)
            raise self._refused(cause, advice) from error

    def require_space(self, num_bytes: int) -> None:
        """Take note of what the files take. Raises DiskRefusedError where less is free."""
        self.num_bytes = num_bytes
        free = free_bytes(self.folder)
        if free is not None and free < num_bytes:
            raise self._refused("too little space is free", self.make_room)

    def _refused(self, cause: str, advice: str) -> DiskRefusedError:
        """The error, with the space that is free now: some more will be when what was written is removed."""
        takes = f"takes about {self.num_bytes:,} bytes and " if self.num_bytes else ""
        free = free_bytes(self.folder)
        has = "an unknown amount" if free is None else f"{free:,}"
        return DiskRefusedError(f"{cause}. {self.what} {takes}has {has} free in {self.folder}. {advice}")


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


def unused_path(path: Path) -> Path:
    """Return `path`, or where there is one already, `path` with the first number behind it that is free."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())
