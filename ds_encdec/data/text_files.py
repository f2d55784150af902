"""Local files whose documents are byte ranges: plain text, JSON lines, and what becomes lines (a JSON array, CSV).

Each class says where documents start in a file and what their bytes mean; the rest is the same for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from ds_encdec.data.local_files import (
    file_digests,
    kept_file,
    lines_of_json,
    local_errors,
    plain_copy,
    plain_file,
    short_names,
    write_csv,
)
from ds_encdec.data.sources import BadRow, Row, field_document
from ds_encdec.types import DataError, Document

TEXT_PIECE_BYTES = 1 << 16
"""A larger text file is cut at blank lines into documents of at most this size, so that one long file can be
shuffled, spread over lanes and held out in part."""

_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""

_SCAN_BYTES = 1 << 24
INDEXED_BYTES = 1 << 20
"""From this size on the index of a file's lines is kept; that of a smaller one is made anew in a millisecond."""

MAX_NESTING = 200
"""Levels of objects and lists in a line. How deep Python can read depends on its caller, which must decide nothing."""


class _FileRanges:
    """Documents that are byte ranges of local files, compressed ones included. A `MapSource`.

    `plain`: for each of `files` the plain file with the same documents. `edges`: where the documents of a plain file
    start, and the end of the last one; int64 [documents + 1]. Memory-mapped ones stay files when this is pickled.
    """

    def __init__(
        self, files: Sequence[str], plain: Sequence[str], edges: Callable[[str], np.ndarray], **facts: str
    ) -> None:
        self._names = short_names(files)
        self._plain = plain
        self._edges = [edges(path) for path in plain]
        self._first = [0, *accumulate(len(file_edges) - 1 for file_edges in self._edges)]
        self.identity: dict[str, Any] = {**facts, "files": file_digests(files, self._names)}

    def __len__(self) -> int:
        return self._first[-1]

    def __getstate__(self) -> dict[str, Any]:
        edges = [str(array.filename) if isinstance(array, np.memmap) else array for array in self._edges]
        return {**self.__dict__, "_edges": edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        edges = [np.load(array, mmap_mode="r") if isinstance(array, str) else array for array in state["_edges"]]
        self.__dict__.update(state, _edges=edges)

    def key(self, index: int) -> str:
        """`FILE:NUMBER`: the file's name below the files' common folder, and the document's number in it, from 0."""
        file, row = self._locate(index)
        return f"{self._names[file]}:{row}"

    def document(self, index: int) -> Row:
        """Document `index`, read from its file. Raises DataError where the file cannot be read."""
        file, row = self._locate(index)
        start, stop = (int(edge) for edge in self._edges[file][row : row + 2])
        with local_errors(self._plain[file]), open(self._plain[file], "rb") as handle:
            handle.seek(start)
            content = handle.read(stop - start)
        return self._parse(content, self.key(index), self._names[file], row)

    def _locate(self, index: int) -> tuple[int, int]:
        """The file's number, and the document's number in that file."""
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        return file, index - self._first[file]

    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        """The document of the bytes of number `row` of the file `name`."""
        raise NotImplementedError


class TextFiles(_FileRanges):
    """UTF-8 text files: a small one is a document, a larger one is cut into several.

    Raises DataError for a binary file.
    """

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(files, [plain_file(path) for path in files], _text_edges, kind="text")

    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        if b"\0" in content:
            return BadRow(key, f"{key}: not text (a NUL character in this document)")
        try:
            return Document(key, content.decode("utf-8"))
        except UnicodeDecodeError as error:
            return BadRow(
                key,
                f"{name}: not UTF-8 text ({error.reason}, document {row} of the file). Convert it, for example with "
                "`iconv -f latin1 -t utf-8`, or leave it out of data.data_files",
            )


class JsonLines(_FileRanges):
    """Files with one JSON object a line, or with one array, of which an element is a line then."""

    kind: ClassVar = "json"
    row_word: ClassVar = "line"
    failure: ClassVar = "not a JSON line"

    def __init__(self, files: Sequence[str], text_column: str) -> None:
        self._text_column = text_column
        lines = [self._as_lines(path) for path in files]
        super().__init__(files, lines, _line_index, kind=self.kind, text_column=text_column)

    def _as_lines(self, path: str) -> str:
        if ".csv" in os.path.basename(path).lower():
            raise DataError(f"{path}: a CSV file: set data.dataset_name=csv, or leave it out of data.data_files")
        return lines_of_json(plain_file(path))

    def _parse(self, content: bytes, key: str, name: str, row: int) -> Row:
        if not content.strip():
            return Document(key, "")
        where = f"{name}, {self.row_word} {row + 1}"
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            return BadRow(key, f"{where}: {self.failure} ({error})")
        if content.count(b"[") + content.count(b"{") > MAX_NESTING and _is_deep(record):
            return BadRow(key, f"{where}: {self.failure} (nested more than {MAX_NESTING} deep)")
        if not isinstance(record, dict):
            return BadRow(key, f"{where}: expected one JSON object a line, found {type(record).__name__}")
        return field_document(key, record, self._text_column, where)


class CsvFiles(JsonLines):
    """CSV files: a row is a line, below that of the names."""

    kind = "csv"
    row_word = "row"
    failure = "not UTF-8 text"

    def _as_lines(self, path: str) -> str:
        return plain_copy(plain_file(path), "rows", write_csv)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [child for children in inner for child in children]
    return any(isinstance(one, dict | list) for one in level)


def _line_index(path: str) -> np.ndarray:
    """The start of each line, and the file's end. A large file's index is kept, and memory-mapped."""
    with local_errors(path):
        is_small = os.path.getsize(path) < INDEXED_BYTES
    if is_small:
        return _line_edges(path)
    try:
        index = kept_file(path, "lines", lambda source, out: np.save(out, _line_edges(source)), checked_bytes=1 << 26)
        return np.load(index, mmap_mode="r")
    except (OSError, RuntimeError):  # no folder to keep it in
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
    """The start of each document of a text file, and the file's end."""
    edges = [0]
    with local_errors(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if b"\0" in file.read(TEXT_PIECE_BYTES):
            raise DataError(_binary(path, "NUL characters"))
        while size - edges[-1] > TEXT_PIECE_BYTES:
            file.seek(edges[-1])
            block = file.read(TEXT_PIECE_BYTES)
            if len(block) < TEXT_PIECE_BYTES:
                raise DataError(f"{path}: became shorter while it was read. Start again when nobody writes to it")
            length = _piece_length(block)
            if not length:
                raise DataError(_binary(path, f"neither lines nor UTF-8 characters near byte {edges[-1]}"))
            edges.append(edges[-1] + length)
    return np.array([*edges, size], dtype=np.int64)


def _binary(path: str, sign: str) -> str:
    return (
        f"{path}: a binary file, or text in another encoding than UTF-8 ({sign}). Convert it, for example with "
        "`iconv -f utf-16 -t utf-8`, or leave it out of data.data_files"
    )


def _piece_length(block: bytes) -> int:
    """The place to cut: behind the last blank line, else the last line, else before the last character; 0: nowhere."""
    for separator in (b"\n\n", b"\n"):
        if (cut := block.rfind(separator)) >= 0:
            return cut + len(separator)
    starts = (len(block) - back for back in range(1, _LONGEST_CHARACTER + 1))
    return next((cut for cut in starts if block[cut] & 0xC0 != 0x80), 0)  # no continuation byte
