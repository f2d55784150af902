"""Read configurations, manifests and indexes, which may come from anybody. Manifests and indexes must be plain files: a
FIFO would block forever, a device never ends. Text and JSON are bounded: deep JSON exhausts the interpreter's stack."""

import errno
import json
import os
import re
import stat
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 1_000_000  # of a YAML or JSON file that people write
MAX_RECORD_BYTES = 32_000_000  # of a manifest or index, which programs write: enough for about 100,000 files or tensors
MAX_DEPTH = 100  # of nested mappings and lists
MAX_NODES = 10_000  # keys, values and list items of a configuration; those behind an alias count each time
# Brackets, and the strings (also one that never ends) in which they mean nothing.
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*\\?(?:"|\Z)|[\[\]{}]', re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str | None:
    """Return the kind of a file with this `st_mode`, or None for a plain file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no plain file")


def _refuse_other_kinds(status: os.stat_result, path: str | Path) -> None:
    if kind := kind_of(status.st_mode):
        raise OSError(errno.EINVAL, f"{kind}, not a plain file", str(path))


def open_plain(path: str | Path) -> BufferedReader:
    """Open a plain file for reading bytes. Raises OSError, also for other kinds of files."""
    _refuse_other_kinds(os.stat(path), path)  # opening some devices has effects
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    try:
        _refuse_other_kinds(os.fstat(file.fileno()), path)  # another file may have replaced it
    except BaseException:
        file.close()
        raise
    return file


@cache
def _read_pipe(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def read_config(path: str | Path) -> str:
    """Return the text of a configuration that the user names, which may be a pipe. Raises OSError, and ValueError if it
    is too large or not UTF-8."""
    read = _read_pipe.__wrapped__ if os.path.isfile(path) else _read_pipe  # a pipe can be read once
    return _decoded(read(os.fspath(path)), MAX_CONFIG_BYTES)


def _decoded(content: bytes, max_bytes: int | None) -> str:
    if max_bytes is not None and len(content) > max_bytes:
        raise ValueError(f"larger than {max_bytes / 1e6:g} MB, the most that is read of such a file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("not a text file in UTF-8") from error


def read_json(path: str | Path, max_bytes: int | None = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Parse a program's JSON file. Raises OSError, and ValueError if it is no JSON object, too large, or nested too
    deep."""
    with open_plain(path) as file:
        text = _decoded(file.read(-1 if max_bytes is None else max_bytes + 1), max_bytes)
    if (place := too_deep(text, MAX_DEPTH)) is not None:
        raise json.JSONDecodeError(f"nested more than {MAX_DEPTH} deep", text, place)
    if not isinstance(content := json.loads(text), dict):
        raise ValueError("it holds no JSON object")
    return content


def too_deep(text: str, most: int) -> int | None:
    """Return the place in a JSON text that is nested more than `most` deep, or None."""
    depth = 0
    for token in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > most:
            return token.start()
    return None
