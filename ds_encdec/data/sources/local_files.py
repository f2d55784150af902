"""Local files as data: the files of a pattern, their digests, plain copies of them, and the documents in them.

Documents are byte ranges of text, of JSON lines, and of files that become lines (a JSON array, CSV). Their keys use
paths below the files' common folder, so a data set that moves keeps its order and its held-out split.
"""

import hashlib
import json
import logging
import lzma
import os
import shutil
import zlib
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import IO, Any, ClassVar

import numpy as np

from ds_encdec.base.file_patterns import named_files, no_file_matches
from ds_encdec.base.quantities import disk_size
from ds_encdec.base.types import ConfigError, DataError, Document
from ds_encdec.config.data_sections import MAX_ROW_BYTES
from ds_encdec.config.file_rows import RowError, array_rows, csv_rows, is_array, json_object, json_row, too_long
from ds_encdec.config.packed_files import NOT_UTF8, UNPACKABLE, packing
from ds_encdec.data.sources.sources import BadRow, Row, row_document
from ds_encdec.launch.disk import atomic_file, cache_folder
from ds_encdec.launch.run_folder import lock_file

# A larger text file is cut at blank lines into documents of at most this size, so that one long file can be shuffled,
# spread over lanes and held out in part.
TEXT_PIECE_BYTES = 1 << 16

INDEXED_BYTES = 1 << 20  # the index of a larger file's lines is kept; that of a smaller file takes a millisecond
_SCAN_BYTES = 1 << 24
_PEEKED_BYTES = 1 << 16  # of a JSON file: enough to see whether it is an array
_DIGESTED_BYTES = 1 << 16
_SPARED_BYTES = 1 << 30  # what an unpacked copy leaves of the disk, or a twentieth of a small one
_ARRAY_ROWS = 16  # as many bytes as the longest rows: a JSON array is read whole
_FORMAT = 2  # raised when the code makes another copy or index of the same file, so that an earlier one is not read

logger = logging.getLogger(__name__)


def expand_files(patterns: Sequence[str], field: str = "data.data_files") -> tuple[str, ...]:
    """Return the sorted files of paths and glob patterns (`**` included). Raises DataError with the unmatched ones."""
    matches = {pattern: [*named_files(pattern)] for pattern in patterns}
    if missing := [pattern for pattern, paths in matches.items() if not paths]:
        raise DataError(f"{field}: {no_file_matches(missing)}")
    return tuple(sorted({os.path.abspath(path) for paths in matches.values() for path in paths}))


def short_names(files: Sequence[str]) -> list[str]:
    """Return each file's path below their common folder."""
    folder = os.path.commonpath([os.path.dirname(path) for path in files] or [""])
    return [os.path.relpath(path, folder) for path in files]


@contextmanager
def local_errors(path: str, what: str = "cannot be read") -> Iterator[None]:
    """Turn the errors of a local file into DataErrors."""
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: {what} ({error})") from error


def file_digests(files: Sequence[str]) -> dict[str, str]:
    """Return each file's size in bytes and a digest of its first and last 64 KiB, by its short name. Raises DataError.
    This is cheap for any number of gigabytes. It misses a change in the middle that keeps the size, and ignores
    times."""
    digests = {}
    for name, path in zip(short_names(files), files, strict=True):
        with local_errors(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = hashlib.blake2b(file.read(_DIGESTED_BYTES), digest_size=8)
            file.seek(max(0, size - _DIGESTED_BYTES))
            content.update(file.read(_DIGESTED_BYTES))
        digests[name] = f"{size}-{content.hexdigest()}"
    return digests


def kept_file(source: str, kind: str, make: Callable[[str, IO[bytes]], None]) -> str:
    """Return the file `KIND-DIGEST` of the cache folder, which `make(source, file)` writes again if `source` changes.
    One process of a machine makes it while the others wait; it appears whole or not at all, with the permissions of
    `source`. Raises the errors of `make`, and DataError if it cannot be kept."""
    try:
        status = os.stat(source)
        made_from = f"{_FORMAT} {os.path.realpath(source)} {status.st_size} {status.st_mtime_ns}"
        path = cache_folder() / f"{kind}-{hashlib.sha256(made_from.encode(errors='surrogateescape')).hexdigest()[:32]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.lock", "a+") as lock:
            with suppress(ConfigError):  # without locks several processes may make it, each in a separate file
                lock_file(lock, wait=True)
            if not path.is_file():
                logger.info("%s: preparing it for reading, once, in %s", source, path.parent)
                with atomic_file(path, status.st_mode & 0o777 | 0o600) as file:
                    make(source, file)
        return str(path)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{source}: a plain copy is needed to read it, and cannot be kept in the cache folder ({error}). Set "
            "XDG_CACHE_HOME to a folder on a disk with room, or make plain files yourself"
        ) from error


def plain_file(path: str) -> str:
    """Return `path`, or a plain copy of a compressed file. Raises DataError if it is damaged or cannot be kept."""
    with local_errors(path):
        opener = packing(path)
    if opener is None:
        return path

    def unpack(_: str, out: IO[bytes]) -> None:
        blocks, checked = opener(path), 0
        while True:
            with local_errors(path, UNPACKABLE):  # an error of writing is one of the cache folder
                block = next(blocks, None)
            if block is None:
                return
            out.write(block)
            if out.tell() > checked:
                _require_room(path, out)
                checked = out.tell() + _SCAN_BYTES

    return kept_file(path, "plain", unpack)


def _require_room(path: str, out: IO[bytes]) -> None:
    usage = shutil.disk_usage(folder := os.path.dirname(out.name))
    if usage.total and usage.free < min(_SPARED_BYTES, usage.total // 20):
        packed, unpacked, free = map(disk_size, (os.path.getsize(path), out.tell(), usage.free))
        raise DataError(
            f"{path}: {packed} have become {unpacked} so far, and {folder} has {free} left. Set XDG_CACHE_HOME to a "
            "folder on a disk with room, or look at the file"
        )


class _FileRanges(ABC):
    """Documents that are byte ranges of local files, compressed ones included. A `MapSource`. `plain`: the plain files.
    `edges` returns the starts of one file's documents, and its end; int64 [documents + 1]. A document of more than
    `_longest` bytes is a bad row, and is not read."""

    row_word: ClassVar = "line"
    _longest = TEXT_PIECE_BYTES

    def __init__(
        self, files: Sequence[str], plain: Sequence[str], edges: Callable[[str], np.ndarray], **facts: str | None
    ) -> None:
        self._names = short_names(files)
        self._plain = plain
        self._edges = [edges(path) for path in plain]
        self._first = [0, *accumulate(len(file_edges) - 1 for file_edges in self._edges)]
        self.identity: dict[str, Any] = {**facts, "files": file_digests(files)}

    def __len__(self) -> int:
        return self._first[-1]

    def __getstate__(self) -> dict[str, Any]:
        edges = [str(array.filename) if isinstance(array, np.memmap) else array for array in self._edges]
        return {**self.__dict__, "_edges": edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        edges = [np.load(array, mmap_mode="r") if isinstance(array, str) else array for array in state["_edges"]]
        self.__dict__.update(state, _edges=edges)

    def key(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{self._names[file]}:{row}"

    def document(self, index: int) -> Row:
        file, row = self._locate(index)
        start, stop = (int(edge) for edge in self._edges[file][row : row + 2])
        if stop - start > self._longest:
            return BadRow(self.key(index), f"{self._where(self._names[file], row)}: {too_long(self._longest)}")
        with local_errors(self._plain[file]), open(self._plain[file], "rb") as handle:
            handle.seek(start)
            content = handle.read(stop - start)
        return self._parse(content, self.key(index), self._names[file], row)

    def _where(self, name: str, row: int) -> str:
        return f"{name}, {self.row_word} {row + 1}"

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        return file, index - self._first[file]

    @abstractmethod
    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        """Return the document of the bytes of number `row` of the file `name`."""


class TextFiles(_FileRanges):
    """UTF-8 text files: small ones are documents, larger ones are cut. Raises DataError for a binary file."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(files, [plain_file(path) for path in files], _text_edges, kind="text")

    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        if b"\0" in content:
            return BadRow(key, f"{key}: not text (a NUL character in this document)")
        try:
            return Document(key, content.decode("utf-8"))
        except UnicodeDecodeError:
            return BadRow(key, f"{name}, document {row}: {NOT_UTF8}, or leave it out of data.data_files")


class JsonLines(_FileRanges):
    """Files with one JSON object a line, or an array of them; `text_column` None: a document is a whole object."""

    kind: ClassVar = "json"

    def __init__(self, files: Sequence[str], text_column: str | None, limit: int = MAX_ROW_BYTES) -> None:
        self._text_column, self._longest = text_column, limit
        lines = [self._as_lines(path) for path in files]
        super().__init__(files, lines, _line_index, kind=self.kind, text_column=text_column)

    def _as_lines(self, path: str) -> str:
        def write_rows(plain: str, out: IO[bytes]) -> None:
            if (size := os.path.getsize(plain)) > _ARRAY_ROWS * self._longest:
                raise DataError(
                    f"{path}: a JSON array of {disk_size(size)}, which is read into memory whole, may have at most "
                    f"{_ARRAY_ROWS} times data.max_row_bytes={self._longest}. Make lines of it: `jq -c '.[]'`"
                )
            with local_errors(path), open(plain, "rb") as file:
                content = file.read()
            out.writelines(row + b"\n" for row in array_rows(content, path))

        plain = plain_file(path)
        with local_errors(path), open(plain, "rb") as file:
            start = file.read(_PEEKED_BYTES)
        return kept_file(plain, "rows", write_rows) if is_array(start) else plain

    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        if not content.strip():
            return Document(key, "")
        where = self._where(name, row)
        try:
            record = self._read(content)
        except RowError as error:
            return BadRow(key, f"{where}: {error}")
        return row_document(key, lambda: record, self._text_column, where)

    _read: Callable[[bytes], dict[str, Any]] = staticmethod(json_object)


class CsvFiles(JsonLines):
    """CSV files: each row below the line of the names becomes a line."""

    kind = "csv"
    row_word = "row"

    def _as_lines(self, path: str) -> str:
        def write_rows(plain: str, out: IO[bytes]) -> None:
            # An unreadable row becomes a text. Bytes that are not UTF-8 are copied, so only their row is unreadable.
            with open(plain, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                for row in csv_rows(iter(partial(file.readline, self._longest + 1), ""), path, longest=self._longest):
                    out.write(json.dumps(row, ensure_ascii=False).encode(errors="surrogateescape") + b"\n")

        return kept_file(plain_file(path), f"rows-{self._longest}", write_rows)

    def _read(self, content: bytes) -> dict[str, Any]:
        record = json_row(content)
        if isinstance(record, str):  # why the row cannot be read
            raise RowError(record)
        return record


def _line_index(path: str) -> np.ndarray:
    if os.path.getsize(path) >= INDEXED_BYTES:
        with suppress(DataError, ValueError, OSError):  # there is no cache folder, or the index is cut short
            kept = kept_file(path, "lines", lambda source, out: np.save(out, _line_edges(source)))
            return np.load(kept, mmap_mode="r")
    return _line_edges(path)


def _line_edges(path: str) -> np.ndarray:
    starts = [np.zeros(1, dtype=np.int64)]
    position = 0
    with local_errors(path), open(path, "rb") as file:
        while block := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    edges = np.concatenate(starts)
    return edges if edges[-1] == position else np.append(edges, position)


def _text_edges(path: str) -> np.ndarray:
    """Return the start of each document of a text file, the first behind a byte order mark, and the file's end."""
    with local_errors(path), open(path, "rb") as file:
        edges = [len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0]
        while True:
            file.seek(edges[-1])
            piece = file.read(TEXT_PIECE_BYTES)
            if not file.read(1):
                return np.array([*edges, edges[-1] + len(piece)], dtype=np.int64)
            # Cut behind the last blank line, else the last line, else before the last character, which is at most 4
            # bytes long and begins with one that is not a continuation byte; bytes that are no text, anywhere.
            cuts = [piece.rfind(end) + len(end) for end in (b"\n\n", b"\n") if end in piece]
            cuts += [cut for cut in range(len(piece) - 1, len(piece) - 5, -1) if piece[cut] & 0xC0 != 0x80]
            edges.append(edges[-1] + [*cuts, len(piece)][0])
