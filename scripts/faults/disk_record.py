"""Reads what a traced run did to its disk: strace's lines become file operations, in the order of time."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CALLS = (
    "open,openat,creat,write,pwrite64,writev,lseek,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat,symlink,symlinkat,ftruncate,sendfile"
)
# What the replay does not know: a run that begins to use one is noticed.
_UNKNOWN = "sync,syncfs,pwritev,pwritev2,link,linkat,truncate,copy_file_range,fallocate,mmap"
_ON_FILES = ("write", "pwrite64", "writev", "lseek", "fsync", "fdatasync", "ftruncate", "sendfile")
_LINE = re.compile(rb"(\d+) +(\w+)\((.*)\) += (\d+)(?:<[^>]*>(?:\(deleted\))?)?", re.DOTALL)
_UNFINISHED = re.compile(rb"(\d+) +(\w+\(.*) <unfinished \.\.\.>", re.DOTALL)
_RESUMED = re.compile(rb"(\d+) +<\.\.\. \w+ resumed>(.*)", re.DOTALL)
_TEXT = re.compile(rb'"((?:\\x[0-9a-f]{2})*)"')
_OPENED = re.compile(rb"(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
END = -1  # the offset of a write to a file that was opened for appending


class Operation(NamedTuple):
    """`kind`: make (a file), write, cut (to `offset` bytes), fsync, rename (to `other`), unlink, mkdir, or symlink (to
    `other`). Paths are absolute."""

    kind: str
    path: bytes
    other: bytes = b""
    offset: int = 0
    content: bytes = b""


def tracer(trace: Path) -> tuple[str, ...]:
    """Return the words in front of a command whose file operations are to be written to `trace`."""
    traced = f"trace={_CALLS},{_UNKNOWN}"
    return ("strace", "-f", "-y", "-xx", "-s", "1000000000", "-e", traced, "-e", "signal=none", "-o", str(trace))


def read_operations(trace: Path, root: Path) -> list[Operation]:
    """Return the operations below `root`. Raises ValueError for one that the replay does not know."""
    reader, begun = _Reader(os.fsencode(root)), dict[bytes, bytes]()
    escaped = b"".join(b"\\x%02x" % byte for byte in os.fsencode(root))
    operations: list[Operation] = []
    with trace.open("rb") as lines:
        for line in lines:
            if line.endswith(b"<unfinished ...>\n") and (match := _UNFINISHED.match(line)):
                begun[match[1]] = match[2]
                continue
            if b" resumed>" in line[:100] and (match := _RESUMED.match(line)):
                line = match[1] + b" " + begun.pop(match[1]) + match[2]
            if (escaped in line or b"sync()" in line) and (match := _LINE.match(line)):
                operations += reader.read(match[2].decode(), match[3], int(match[4]))
    return operations


class _Reader:
    def __init__(self, root: bytes) -> None:
        self._root = root
        self._offsets: Counter[tuple[bytes, int]] = Counter()  # of each open file, by its path and descriptor

    def read(self, call: str, arguments: bytes, result: int) -> Iterator[Operation]:
        if call in _ON_FILES:
            first = _OPENED.match(arguments)
            if first and self._is_below(path := _plain(first[2])):
                yield from self._on_file(call, path, int(first[1]), arguments, result)
            return
        opened = [(number, _plain(path)) for number, path in _OPENED.findall(arguments)]
        if call in _UNKNOWN.split(","):
            is_private = call == "mmap" and (b"MAP_PRIVATE" in arguments or b"PROT_WRITE" not in arguments)
            if not is_private and (call in ("sync", "syncfs") or any(self._is_below(path) for _, path in opened)):
                raise ValueError(f"the run used {call}, which the replay does not know: {arguments[:300]!r}")
            return
        texts = [_plain(text) for text in _TEXT.findall(arguments)]
        bases = [path for number, path in opened if number == b"AT_FDCWD" or call != "symlinkat"] or [os.getcwdb()]
        paths = [
            os.path.normpath(os.path.join(bases[min(place, len(bases) - 1)], one)) for place, one in enumerate(texts)
        ]
        if any(map(self._is_below, paths)):
            yield from self._on_name(call, paths, texts, arguments, result)

    def _is_below(self, path: bytes) -> bool:
        return path.startswith(self._root + b"/")

    def _on_file(self, call: str, path: bytes, descriptor: int, arguments: bytes, result: int) -> Iterator[Operation]:
        place = (path, descriptor)
        if call == "lseek":
            if self._offsets[place] != END:
                self._offsets[place] = result
        elif call in ("fsync", "fdatasync"):
            yield Operation("fsync", path)
        elif call == "ftruncate":
            yield Operation("cut", path, offset=int(arguments.rpartition(b",")[2]))
        elif call == "pwrite64":
            content = _plain(_TEXT.search(arguments)[1])[:result]  # type: ignore[index]
            yield Operation("write", path, offset=int(arguments.rpartition(b",")[2]), content=content)
        elif result:
            if call == "sendfile":  # of a file that is as it was then: a copy of code or of a tokenizer
                source = _plain(_OPENED.findall(arguments)[1][1])
                content = Path(os.fsdecode(source)).read_bytes()[self._offsets[place] :][:result]
            else:
                content = b"".join(map(_plain, _TEXT.findall(arguments)))[:result]
            yield Operation("write", path, offset=self._offsets[place], content=content)
            if self._offsets[place] != END:
                self._offsets[place] += result

    def _on_name(
        self, call: str, paths: list[bytes], texts: list[bytes], arguments: bytes, result: int
    ) -> Iterator[Operation]:
        if call in ("open", "openat", "creat"):
            self._offsets[(paths[0], result)] = END if b"O_APPEND" in arguments else 0
            if call == "creat" or b"O_CREAT" in arguments:
                yield Operation("make", paths[0])
            if call == "creat" or b"O_TRUNC" in arguments:
                yield Operation("cut", paths[0])
        elif call.startswith("rename"):
            yield Operation("rename", paths[0], paths[1])
            for path, descriptor in list(self._offsets):
                if path == paths[0] or path.startswith(paths[0] + b"/"):
                    renamed = paths[1] + path[len(paths[0]) :]
                    self._offsets[(renamed, descriptor)] = self._offsets[(path, descriptor)]
        elif call.startswith("symlink"):
            yield Operation("symlink", paths[1], texts[0])
        elif call.startswith("mkdir"):
            yield Operation("mkdir", paths[0])
        else:
            yield Operation("unlink", paths[0])


def _plain(escaped: bytes) -> bytes:
    return bytes.fromhex(escaped.replace(rb"\x", b"").decode())
