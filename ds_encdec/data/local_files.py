"""Files as sources: plain text, JSON lines and parquet (the last one also behind a URL, as the hub's are).

Documents are named by their file's path below the files' common folder, so a data set keeps its order and its
held-out split when it moves to another folder or machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import accumulate
from typing import Any

import numpy as np

from ds_encdec.data.remote import retry, retry_rows
from ds_encdec.types import DataError, Document

TEXT_PIECE_BYTES = 1 << 16
"""A larger text file is cut at blank lines into documents of at most this size, so that one long file can be
shuffled, spread over lanes and held out in part."""

_SCAN_BYTES = 1 << 24
_DIGESTED_BYTES = 1 << 16


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
        raise DataError(f"data.data_files: no file matches {', '.join(missing)} (looked from {os.getcwd()})")
    return tuple(sorted({os.path.abspath(path) for paths in matches.values() for path in paths}))


def short_names(files: Sequence[str]) -> list[str]:
    """Each file's path below the folder that all of them share."""
    if len(files) < 2:
        return [os.path.basename(path) for path in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in files])
    return [os.path.relpath(path, folder) for path in files]


def text_of(value: Any, where: str) -> str:
    """A text field's value: null is an empty text, anything but a string a DataError naming `where`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, found {type(value).__name__} {value!r:.60}")
    return value


def missing_column(column: str, where: str, existing: Sequence[str]) -> DataError:
    """The error for a column that is not there, listing those that are."""
    return DataError(
        f"data.text_column={column}: {where} has no such column; it has {', '.join(map(str, existing)) or 'none'}"
    )


class _Spans:
    """Byte ranges of documents, over several files: document i is bytes [start, stop) of one file."""

    def __init__(self, files: Sequence[str], edges: list[np.ndarray]) -> None:
        self._files = files
        self._edges = edges
        self._first = [0, *accumulate(len(file_edges) - 1 for file_edges in edges)]

    def __len__(self) -> int:
        return self._first[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """The file's number, and the document's number in that file."""
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        return file, index - self._first[file]

    def read(self, index: int) -> bytes:
        file, row = self.locate(index)
        start, stop = (int(edge) for edge in self._edges[file][row : row + 2])
        with open(self._files[file], "rb") as handle:
            handle.seek(start)
            return handle.read(stop - start)


class TextFiles:
    """UTF-8 text files. A `MapSource`."""

    def __init__(self, files: Sequence[str]) -> None:
        self._names = short_names(files)
        self._spans = _Spans(files, [_text_edges(path) for path in files])
        self.identity = {"kind": "text", "files": file_digests(files, self._names)}

    def __len__(self) -> int:
        return len(self._spans)

    def key(self, index: int) -> str:
        """`FILE:PIECE`."""
        file, piece = self._spans.locate(index)
        return f"{self._names[file]}:{piece}"

    def document(self, index: int) -> Document:
        """Document `index`, read from its file. Raises DataError where it is not UTF-8."""
        try:
            return Document(self.key(index), self._spans.read(index).decode("utf-8"))
        except UnicodeDecodeError as error:
            file, _ = self._spans.locate(index)
            raise DataError(
                f"{self._names[file]}: not UTF-8 text ({error.reason} in document {self.key(index)}). Convert it, for "
                "example with `iconv -f latin1 -t utf-8`, or leave it out of data.data_files"
            ) from error


class JsonLines:
    """Files with one JSON object a line. A `MapSource`: an index of line starts is made when it is opened."""

    def __init__(self, files: Sequence[str], text_column: str) -> None:
        self._names = short_names(files)
        self._spans = _Spans(files, [_line_edges(path) for path in files])
        self._text_column = text_column
        self.identity = {"kind": "json", "files": file_digests(files, self._names), "text_column": text_column}
        if len(self):
            self.document(0)  # a wrong column or format shows now, not after the model is built

    def __len__(self) -> int:
        return len(self._spans)

    def key(self, index: int) -> str:
        """`FILE:LINE`, lines counted from 0."""
        file, line = self._spans.locate(index)
        return f"{self._names[file]}:{line}"

    def document(self, index: int) -> Document:
        """Document `index`. A blank line is an empty document."""
        line = self._spans.read(index)
        if not line.strip():
            return Document(self.key(index), "")
        file, row = self._spans.locate(index)
        where = f"{self._names[file]}, line {row + 1}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not a JSON line ({error}); data.dataset_name=json reads JSON lines") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected one JSON object a line, found {type(record).__name__}")
        if self._text_column not in record:
            raise missing_column(self._text_column, where, list(record))
        return Document(self.key(index), text_of(record[self._text_column], where))


class ParquetFiles:
    """Parquet files, local or behind an fsspec URL. A `StreamSource`.

    A unit is a file where there are many for each lane, else a row group (whose number only the files' footers
    tell, and reading thousands of footers over a network takes minutes). Keys do not depend on that choice.
    """

    FILES_PER_LANE = 2

    def __init__(
        self, files: Sequence[str], text_column: str, *, num_lanes: int, identity: dict[str, Any] | None = None
    ) -> None:
        self._files = list(files)
        self._names = short_names(files)
        self._text_column = text_column
        self._units: list[tuple[int, int | None]] = [(file, None) for file in range(len(files))]
        if len(files) < self.FILES_PER_LANE * num_lanes:
            groups = [self._open(file).num_row_groups for file in range(len(files))]
            self._units = [(file, group) for file, count in enumerate(groups) for group in range(count)]
        else:
            self._open(0)
        self.num_units = len(self._units)
        self.identity = identity or {
            "kind": "parquet",
            "files": file_digests(files, self._names),
            "text_column": text_column,
        }

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Document]:
        """The documents of `unit` from row `first_row` on; one row group is in memory at a time.

        Only those whose key is `wanted`, if given; a row group without any is not read. A remote file whose
        connection breaks is opened again where it was.
        """
        path = self._files[self._units[unit][0]]
        if not _is_remote(path):
            rows = self._rows(unit, first_row, wanted)
        else:
            rows = retry_rows(lambda row: self._rows(unit, row, wanted), first_row, path)
        return (document for document in rows if document is not None)

    def _rows(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None) -> Iterator[Document | None]:
        """Every row of `unit` from `first_row` on; None for one that is not wanted."""
        file, only_group = self._units[unit]
        parquet = self._open_once(file)
        groups = range(parquet.num_row_groups) if only_group is None else [only_group]
        skip = first_row
        for group in groups:
            num_rows = parquet.metadata.row_group(group).num_rows
            keys = [f"{self._names[file]}:{group}:{row}" for row in range(skip, num_rows)]
            yield from self._documents(parquet, file, group, keys, wanted)
            skip = max(0, skip - num_rows)

    def _documents(
        self, parquet: Any, file: int, group: int, keys: list[str], wanted: Callable[[str], bool] | None
    ) -> Iterator[Document | None]:
        """The last rows of a row group, as many as there are `keys`."""
        chosen = [wanted is None or wanted(key) for key in keys]
        if not any(chosen):
            yield from [None] * len(keys)
            return
        where = f"{self._names[file]}, row group {group}"
        column = self._read(parquet, file, group)
        first_row = len(column) - len(keys)
        for row, (key, is_chosen) in enumerate(zip(keys, chosen, strict=True), start=first_row):
            yield Document(key, text_of(column[row].as_py(), f"{where}, row {row}")) if is_chosen else None

    def _read(self, parquet: Any, file: int, group: int) -> Any:
        """The texts of a row group, an Arrow array."""
        with _local_errors(self._files[file], f"cannot be read (row group {group})"):
            return parquet.read_row_group(group, columns=[self._text_column]).column(0)

    def _open(self, file: int) -> Any:
        path = self._files[file]
        return retry(lambda: self._open_once(file), path) if _is_remote(path) else self._open_once(file)

    def _open_once(self, file: int) -> Any:
        # Imported here because it takes 0.2 s, and most runs read no parquet.
        import fsspec  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile

        path = self._files[file]
        with _local_errors(path, "cannot be read as parquet"):
            parquet = ParquetFile(fsspec.open(path, "rb").open() if _is_remote(path) else path)
        if self._text_column not in parquet.schema_arrow.names:
            raise missing_column(self._text_column, self._names[file], parquet.schema_arrow.names)
        return parquet


def _is_remote(path: str) -> bool:
    return "://" in path


@contextmanager
def _local_errors(path: str, what: str) -> Iterator[None]:
    """Turn the errors of a local file into DataErrors at once. Those of a remote one are `remote.py`'s to judge."""
    try:
        yield
    except (OSError, ValueError) as error:
        if _is_remote(path):
            raise
        raise DataError(f"{path}: {what} ({error})") from error


def file_digests(files: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Size in bytes of each file and a digest of its first and last 64 KiB, by its short name.

    Cheap for any number of gigabytes. A change in the middle that keeps the size goes unnoticed; a copy, or a
    newer modification time, is no change.
    """
    return {name: _digest(path) for name, path in zip(names, files, strict=True)}


def _digest(path: str) -> str:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        content = hashlib.blake2b(file.read(_DIGESTED_BYTES), digest_size=8)
        file.seek(max(0, size - _DIGESTED_BYTES))
        content.update(file.read(_DIGESTED_BYTES))
    return f"{size}-{content.hexdigest()}"


def _line_edges(path: str) -> np.ndarray:
    """Where each line starts, and the file's end; int64 [lines + 1]."""
    starts = [np.zeros(1, dtype=np.int64)]
    position = 0
    with open(path, "rb") as file:
        while block := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    edges = np.concatenate(starts)
    return edges if edges[-1] == position else np.append(edges, position)


def _text_edges(path: str) -> np.ndarray:
    """Where the documents of a text file start, and the file's end; int64 [documents + 1]."""
    size = os.path.getsize(path)
    edges = [0]
    with open(path, "rb") as file:
        while size - edges[-1] > TEXT_PIECE_BYTES:
            file.seek(edges[-1])
            edges.append(edges[-1] + _piece_length(file.read(TEXT_PIECE_BYTES)))
    return np.array([*edges, size], dtype=np.int64)


def _piece_length(block: bytes) -> int:
    """Where to cut: behind the last blank line, else the last line, else before the last UTF-8 character."""
    for separator in (b"\n\n", b"\n"):
        if (cut := block.rfind(separator)) >= 0:
            return cut + len(separator)
    cut = len(block) - 1
    while cut > 1 and block[cut] & 0xC0 == 0x80:  # a continuation byte
        cut -= 1
    return cut
