"""Plain text files as a source: a small one is a document, a larger one is cut into several."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ds_encdec.data.bad_rows import BadRow
from ds_encdec.data.local_files import Spans, file_digests, local_errors, short_names
from ds_encdec.data.plain_copies import plain_files
from ds_encdec.types import DataError, Document

TEXT_PIECE_BYTES = 1 << 16
"""A larger text file is cut at blank lines into documents of at most this size, so that one long file can be
shuffled, spread over lanes and held out in part."""

_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""


class TextFiles:
    """UTF-8 text files, compressed ones included. A `MapSource`. Raises DataError for a binary file."""

    def __init__(self, files: Sequence[str]) -> None:
        self._names = short_names(files)
        plain = plain_files(files)
        self._spans = Spans(plain, [_text_edges(path) for path in plain])
        self.identity = {"kind": "text", "files": file_digests(files, self._names)}

    def __len__(self) -> int:
        return len(self._spans)

    def key(self, index: int) -> str:
        """`FILE:PIECE`."""
        file, piece = self._spans.locate(index)
        return f"{self._names[file]}:{piece}"

    def document(self, index: int) -> Document | BadRow:
        """Document `index`, read from its file; a bad row where it is not UTF-8, or holds NUL characters."""
        key = self.key(index)
        content = self._spans.read(index)
        if b"\0" in content:
            return BadRow(key, f"{key}: not text (a NUL character in this document)")
        try:
            return Document(key, content.decode("utf-8"))
        except UnicodeDecodeError as error:
            file, piece = self._spans.locate(index)
            return BadRow(
                key,
                f"{self._names[file]}: not UTF-8 text ({error.reason}, document {piece} of the file). Convert it, for "
                "example with `iconv -f latin1 -t utf-8`, or leave it out of data.data_files",
            )


def _text_edges(path: str) -> np.ndarray:
    """Where the documents of a text file start, and the file's end; int64 [documents + 1]."""
    edges = [0]
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
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
    """Where to cut: behind the last blank line, else the last line, else before the last character; 0: nowhere."""
    for separator in (b"\n\n", b"\n"):
        if (cut := block.rfind(separator)) >= 0:
            return cut + len(separator)
    starts = (len(block) - back for back in range(1, _LONGEST_CHARACTER + 1))
    return next((cut for cut in starts if block[cut] & 0xC0 != 0x80), 0)  # no continuation byte
