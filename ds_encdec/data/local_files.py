"""Local files as data: which ones a pattern names, what they are called, and how one is told from another.

Documents are named by their file's path below the files' common folder, so a data set keeps its order and its
held-out split when it moves to another folder or machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import accumulate
from typing import Any

import numpy as np

from ds_encdec.types import DataError

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
def local_errors(path: str, what: str) -> Iterator[None]:
    """Turn the errors of a local file into DataErrors."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {what} ({error})") from error


class Spans:
    """Byte ranges of documents, over several files: document i is bytes [start, stop) of one file.

    `edges`: for each file where its documents start, and the end of the last one. Memory-mapped ones stay files when
    this is pickled.
    """

    def __init__(self, files: Sequence[str], edges: list[np.ndarray]) -> None:
        self._files = files
        self._edges = edges
        self._first = [0, *accumulate(len(file_edges) - 1 for file_edges in edges)]

    def __len__(self) -> int:
        return self._first[-1]

    def __getstate__(self) -> dict[str, Any]:
        edges = [str(array.filename) if isinstance(array, np.memmap) else array for array in self._edges]
        return {**self.__dict__, "_edges": edges}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        edges = state["_edges"]
        self._edges = [np.load(array, mmap_mode="r") if isinstance(array, str) else array for array in edges]

    def locate(self, index: int) -> tuple[int, int]:
        """The file's number, and the document's number in that file."""
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        return file, index - self._first[file]

    def read(self, index: int) -> bytes:
        """Document `index`. Raises DataError where the file cannot be read."""
        file, row = self.locate(index)
        start, stop = (int(edge) for edge in self._edges[file][row : row + 2])
        with local_errors(self._files[file], "cannot be read"), open(self._files[file], "rb") as handle:
            handle.seek(start)
            return handle.read(stop - start)


def file_digests(files: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Size in bytes of each file and a digest of its first and last 64 KiB, by its short name.

    Cheap for any number of gigabytes. A change in the middle that keeps the size goes unnoticed; a copy, or a
    newer modification time, is no change.
    """
    return {name: file_digest(path) for name, path in zip(names, files, strict=True)}


def file_digest(path: str, digested_bytes: int = _DIGESTED_BYTES) -> str:
    """Size in bytes, and a digest of the first and last `digested_bytes`. Raises DataError."""
    with local_errors(path, "cannot be read"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = hashlib.blake2b(file.read(digested_bytes), digest_size=8)
        file.seek(max(0, size - digested_bytes))
        content.update(file.read(digested_bytes))
    return f"{size}-{content.hexdigest()}"
