"""Files with one JSON object a line as a source, and files that hold the same otherwise: a JSON array, CSV."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from typing import IO, Any

import numpy as np

from ds_encdec.data.bad_rows import BadRow, missing_column, text_document
from ds_encdec.data.kept_files import kept_file
from ds_encdec.data.local_files import Spans, file_digests, local_errors, short_names
from ds_encdec.data.plain_copies import lines_of_csv, lines_of_json, plain_files
from ds_encdec.types import DataError, Document

_SCAN_BYTES = 1 << 24
INDEXED_BYTES = 1 << 20
"""From this size on the index of a file's lines is kept; that of a smaller one is made anew in a millisecond."""

MAX_NESTING = 200
"""Of objects and lists in a line. How deep Python can read depends on who calls it, which must not decide anything."""


class JsonLines:
    """Files with one JSON object a line, compressed ones included. A `MapSource`, by an index of line starts.

    `kind`: `json` (also one array a file: an element is a line) or `csv` (a row is a line, below that of the names).
    """

    def __init__(self, files: Sequence[str], text_column: str, *, kind: str = "json") -> None:
        self._names = short_names(files)
        if kind == "json" and (tables := [path for path in files if ".csv" in os.path.basename(path).lower()]):
            raise DataError(f"{tables[0]}: a CSV file: set data.dataset_name=csv, or leave it out of data.data_files")
        lines = [lines_of_csv(path) if kind == "csv" else lines_of_json(path) for path in plain_files(files)]
        self._spans = Spans(lines, [_line_index(path) for path in lines])
        self._text_column = text_column
        self._row_word, self._failure = ("row", "not UTF-8 text") if kind == "csv" else ("line", "not a JSON line")
        self.identity = {"kind": kind, "files": file_digests(files, self._names), "text_column": text_column}

    def __len__(self) -> int:
        return len(self._spans)

    def key(self, index: int) -> str:
        """`FILE:LINE`, lines counted from 0."""
        file, line = self._spans.locate(index)
        return f"{self._names[file]}:{line}"

    def document(self, index: int) -> Document | BadRow:
        """Document `index`. A blank line is an empty document."""
        key, line = self.key(index), self._spans.read(index)
        if not line.strip():
            return Document(key, "")
        file, row = self._spans.locate(index)
        where = f"{self._names[file]}, {self._row_word} {row + 1}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return BadRow(key, f"{where}: {self._failure} ({error})")
        if line.count(b"[") + line.count(b"{") > MAX_NESTING and _is_deep(record):
            return BadRow(key, f"{where}: {self._failure} (nested more than {MAX_NESTING} deep)")
        if not isinstance(record, dict):
            return BadRow(key, f"{where}: expected one JSON object a line, found {type(record).__name__}")
        if self._text_column not in record:
            return BadRow(key, missing_column(self._text_column, where, list(record)))
        return text_document(key, record[self._text_column], where)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [child for children in inner for child in children]
    return any(isinstance(one, dict | list) for one in level)


def _line_index(path: str) -> np.ndarray:
    """Where each line starts, and the file's end; int64 [lines + 1]. A large file's is kept, and memory-mapped."""
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
        if file.seek(0, 2) < INDEXED_BYTES:
            return _line_edges(path)
    try:
        index = kept_file(path, "lines", partial(_write_index, path), checked_bytes=1 << 26)
        return np.load(index, mmap_mode="r")
    except (OSError, RuntimeError):  # no folder to keep it in
        return _line_edges(path)


def _write_index(path: str, out: IO[bytes]) -> None:
    np.save(out, _line_edges(path))


def _line_edges(path: str) -> np.ndarray:
    starts = [np.zeros(1, dtype=np.int64)]
    position = 0
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
        while block := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    edges = np.concatenate(starts)
    return edges if edges[-1] == position else np.append(edges, position)
