"""Local files as data: which ones a pattern names, their names, their digests, and plain copies.

Documents are named by their file's path below the files' common folder, so a data set keeps its order and its
held-out split when it moves to another folder or machine. They are read by byte position, so a file that is compressed,
or holds rows otherwise than line by line, is copied once on a machine to a plain file in the user's cache folder.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import json
import logging
import lzma
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import IO, Any

from ds_encdec.launch.disk import atomic_file, cache_folder
from ds_encdec.launch.run_folder import lock_file
from ds_encdec.types import ConfigError, DataError

_DIGESTED_BYTES = 1 << 16

_ABANDONED_SECONDS = 86_400
"""Without a write, after which another host's unfinished file is taken for a killed process's."""

logger = logging.getLogger(__name__)


def expand_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that paths and glob patterns (`**` included) name, sorted, each once.

    Raises DataError naming every pattern that matches no file.
    """
    matches = {
        pattern: [path for path in glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        for pattern in patterns
    }
    missing = [pattern for pattern, paths in matches.items() if not paths]
    if missing:
        folders = ", ".join(pattern for pattern in missing if os.path.isdir(os.path.expanduser(pattern)))
        advice = f". {folders}: a folder; add /** for its files, or name it in data.dataset_name" if folders else ""
        raise DataError(f"data.data_files: no file matches {', '.join(missing)} (looked from {os.getcwd()}){advice}")
    return tuple(sorted({os.path.abspath(path) for paths in matches.values() for path in paths}))


def short_names(files: Sequence[str]) -> list[str]:
    """Each file's path below the folder that all of them share."""
    if len(files) < 2:
        return [os.path.basename(path) for path in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in files])
    return [os.path.relpath(path, folder) for path in files]


@contextmanager
def local_errors(path: str, what: str = "cannot be read") -> Iterator[None]:
    """Turn the errors of a local file into DataErrors."""
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: {what} ({error})") from error


def file_digests(files: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Size in bytes of each file and a digest of its first and last 64 KiB, by its short name.

    Cheap for any number of gigabytes. A change in the middle that keeps the size goes unnoticed; a copy, or a
    newer modification time, is no change.
    """
    return {name: file_digest(path) for name, path in zip(names, files, strict=True)}


def file_digest(path: str, digested_bytes: int = _DIGESTED_BYTES) -> str:
    """Size in bytes, and a digest of the first and last `digested_bytes`. Raises DataError."""
    with local_errors(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = hashlib.blake2b(file.read(digested_bytes), digest_size=8)
        file.seek(max(0, size - digested_bytes))
        content.update(file.read(digested_bytes))
    return f"{size}-{content.hexdigest()}"


def kept_file(source: str, kind: str, make: Callable[[str, IO[bytes]], None], *, checked_bytes: int) -> Path:
    """The file that `make(source, file)` writes, in the cache folder as `KIND-DIGEST`.

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
        with suppress(ConfigError):  # without locks several may make it, each a file of its own
            if lock_file(record, wait=True):
                _remove_unfinished(path)
        record.seek(0)
        if not path.is_file() or record.read() != file_digest(str(path), checked_bytes):
            logger.info("%s: preparing it for reading, once, in %s", source, path.parent)
            with atomic_file(path, status.st_mode & 0o777 | 0o600) as file:
                make(source, file)
            record.truncate(0)
            record.write(file_digest(str(path), checked_bytes))
    return path


def _remove_unfinished(path: Path) -> None:
    """Delete what killed processes left unfinished. The lock may hold on this host alone: others may be at work."""
    for left in path.parent.glob(f"*{path.name}.*.tmp"):
        with suppress(OSError):
            is_mine = f"{path.name}.{socket.gethostname()}." in left.name
            if is_mine or time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                left.unlink()


def _open_zstd(path: str) -> Any:
    # Imported here because it takes 0.2 s, and most runs need none of it.
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")


_NOT_PLAIN: tuple[tuple[bytes, Callable[[str], Any] | str], ...] = (
    (rb"\x1f\x8b\x08", gzip.open),
    (rb"BZh.1AY&SY", bz2.open),
    (rb"\xfd7zXZ\0", lzma.open),
    (rb"\x28\xb5\x2f\xfd", _open_zstd),
    (rb"PAR1", "a parquet file: set data.dataset_name=parquet"),
    (rb"PK\x03\x04", "a zip archive: unpack it"),
)
"""First bytes of files that are not plain text (patterns), and the function that opens a compressed one to read the
original, or the advice for one that is of no use here."""


def plain_file(path: str) -> str:
    """`path`, or a plain copy of a compressed file (gzip, bzip2, xz, zstd: by its first bytes).

    Raises DataError for one that is damaged, cut short or of another kind, and where a copy cannot be kept.
    """
    with local_errors(path), open(path, "rb") as file:
        start = file.read(10)
    found = next((what for pattern, what in _NOT_PLAIN if re.match(pattern, start, re.DOTALL)), None)
    if isinstance(found, str):
        raise DataError(f"{path}: {found}, or leave it out of data.data_files")
    return plain_copy(path, "plain", partial(_unpack, found)) if found else path


def lines_of_json(path: str) -> str:
    """`path`, or where it holds one JSON array, a copy with an element a line. The array is read into memory whole."""
    with local_errors(path), open(path, "rb") as file:
        is_array = file.read(4096).lstrip()[:1] == b"["
        file.seek(max(0, os.path.getsize(path) - 4096))
        is_array = is_array and file.read().rstrip()[-1:] == b"]"
    try:
        return plain_copy(path, "rows", _write_array) if is_array else path
    except (ValueError, RecursionError):
        return path  # lines that are lists, or damaged: whoever reads the lines will say so


def plain_copy(path: str, kind: str, make: Callable[[str, IO[bytes]], None]) -> str:
    """The `kept_file` of `path`. Raises DataError where it cannot be kept."""
    try:
        return str(kept_file(path, kind, make, checked_bytes=1 << 16))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path}: a plain copy is needed to read it, and cannot be kept in the cache folder ({error}). Set "
            "XDG_CACHE_HOME to a folder on a disk with room, or make plain files yourself"
        ) from error


def _unpack(opener: Callable[[str], Any], path: str, out: IO[bytes]) -> None:
    with opener(path) as packed:
        while block := _read(path, packed):
            out.write(block)


def _read(path: str, packed: Any) -> bytes:
    """The next block. An error here is one of `path`; one of writing is of the cache folder."""
    with local_errors(path, "cannot be unpacked: damaged, or cut short"):
        return packed.read(1 << 20)


def _write_array(path: str, out: IO[bytes]) -> None:
    with open(path, "rb") as file:
        out.writelines(json.dumps(row).encode() + b"\n" for row in json.load(file))


def write_csv(path: str, out: IO[bytes]) -> None:
    """Write the rows of a CSV file as JSON objects, one a line; its first row names the columns. Raises DataError."""
    csv.field_size_limit(sys.maxsize)
    # Bytes that are no UTF-8 go into the copy as they are: the row that has them cannot be read, and no other.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            for row in csv.DictReader(file, restkey=""):
                fields = {name: value for name, value in row.items() if value is not None}
                line = json.dumps(fields, ensure_ascii=False)
                out.write(line.encode(errors="surrogateescape") + b"\n")
        except csv.Error as error:
            raise DataError(f"{path}: not a CSV file ({error})") from error
