"""Local files that are compressed, or hold rows otherwise than line by line, as plain files in the user's cache.

Everything behind it reads by byte position, which needs a plain file. A copy is made once on a machine (kept_files.py).
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import logging
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

from ds_encdec.data.kept_files import kept_file
from ds_encdec.data.local_files import local_errors
from ds_encdec.launch.user_cache import cache_folder
from ds_encdec.types import DataError

logger = logging.getLogger(__name__)


def _open_zstd(path: str) -> Any:
    # Imported here because it takes 0.2 s, and most runs need none of it.
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")


_COMPRESSIONS: tuple[tuple[bytes, Callable[[str], Any]], ...] = (
    (b"\x1f\x8b\x08", partial(gzip.open, mode="rb")),
    (b"BZh", partial(bz2.open, mode="rb")),
    (b"\xfd7zXZ\0", partial(lzma.open, mode="rb")),
    (b"\x28\xb5\x2f\xfd", _open_zstd),
)
"""First bytes of compressed files, and what opens one to read what it was made from."""

_BZIP2_BLOCK = b"1AY&SY"

_OTHERS = (
    (b"PAR1", "a parquet file: set data.dataset_name=parquet"),
    (b"PK\x03\x04", "a zip archive: unpack it"),
)
"""First bytes of files that are neither, and what to do with one."""


def plain_files(files: Sequence[str]) -> list[str]:
    """`files`, each compressed one (gzip, bzip2, xz, zstd: by its first bytes) replaced by a plain copy.

    Raises DataError for one that is damaged, cut short or of another kind, and where a copy cannot be kept.
    """
    return [
        _kept(path, "plain", partial(_unpack, path, opener)) if (opener := _opener(path)) else path for path in files
    ]


def lines_of_json(path: str) -> str:
    """`path`, or where it holds one JSON array, a copy with an element a line. The array is read into memory whole."""
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
        is_array = file.read(4096).lstrip()[:1] == b"["
        file.seek(max(0, os.path.getsize(path) - 4096))
        is_array = is_array and file.read().rstrip()[-1:] == b"]"
    try:
        return _kept(path, "rows", partial(_write_array, path)) if is_array else path
    except (ValueError, RecursionError):
        return path  # lines that are lists, or damaged: whoever reads the lines will say so


def lines_of_csv(path: str) -> str:
    """A copy of the CSV file `path` with a JSON object a line: its first row names the columns."""
    return _kept(path, "rows", partial(_write_csv, path))


def _kept(path: str, kind: str, make: Callable[[IO[bytes]], None]) -> str:
    def make_and_tell(file: IO[bytes]) -> None:
        logger.info("%s: making a plain copy, once, in %s", path, cache_folder())
        make(file)

    try:
        return str(kept_file(path, kind, make_and_tell, checked_bytes=1 << 16))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path}: a plain copy is needed to read it, and cannot be kept in the cache folder ({error}). Set "
            "XDG_CACHE_HOME to a folder on a disk with room, or make plain files yourself"
        ) from error


def _opener(path: str) -> Callable[[str], Any] | None:
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
        start = file.read(10)
    for magic, what in _OTHERS:
        if start.startswith(magic):
            raise DataError(f"{path}: {what}, or leave it out of data.data_files")
    for magic, opener in _COMPRESSIONS:
        if start.startswith(magic) and (magic != b"BZh" or start.endswith(_BZIP2_BLOCK)):
            return opener
    return None


def _unpack(path: str, opener: Callable[[str], Any], out: IO[bytes]) -> None:
    with opener(path) as packed:
        while block := _read(path, packed):
            out.write(block)


def _read(path: str, packed: Any) -> bytes:
    """The next block. An error here is one of `path`; one of writing is of the cache folder."""
    try:
        return packed.read(1 << 20)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be unpacked: damaged, or cut short ({error})") from error


def _write_array(path: str, out: IO[bytes]) -> None:
    with open(path, "rb") as file:
        for row in json.load(file):
            out.write(json.dumps(row).encode() + b"\n")


def _write_csv(path: str, out: IO[bytes]) -> None:
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
