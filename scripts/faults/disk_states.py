"""Lists the disks that a power loss may leave of the file operations that a run has made until then.

A file's content is sure once the file was flushed, and a folder's names once the folder was. Of what was written since,
the content of files is all there, lost, or of the right size and zeros; of the names that were made, moved and removed
in any folder, those up to any moment are there, all but one, or only one."""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from disk_record import END, Operation

DATA = ("kept", "lost", "zeros")


class Leaf(NamedTuple):
    """A file's content, or a link's target, and its digest."""

    content: bytes
    is_link: bool
    digest: bytes


class State(NamedTuple):
    """A disk that a power loss may leave: `how` in words, and what is at each path; a folder (None) comes before what
    it holds."""

    how: str
    paths: list[tuple[bytes, Leaf | None]]

    def digest(self) -> bytes:
        parts = (path + b"\0" + (leaf.digest if leaf else bytes(20)) for path, leaf in self.paths)
        return hashlib.sha1(b"".join(parts)).digest()

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for path, leaf in self.paths:
            there = os.fsencode(folder) + path
            if leaf is None:
                os.mkdir(there)
            elif leaf.is_link:
                os.symlink(leaf.content, there)
            else:
                with open(there, "wb") as file:
                    file.write(leaf.content)


@dataclass(eq=False, slots=True)
class Node:
    """A file, a link (its content is the target) or a folder (it has no content), and what of it is sure."""

    content: bytearray | None = None
    durable: bytes = b""
    is_link: bool = False
    names: "dict[bytes, Node]" = field(default_factory=dict)
    durable_names: "dict[bytes, Node]" = field(default_factory=dict)
    pending: "list[Change]" = field(default_factory=list)
    leaves: dict[str, Leaf] = field(default_factory=dict)  # by what became of the data, until the file is changed

    def leaf(self, data: str) -> Leaf | None:
        """Return what is at the path of a file or a link; None for a folder."""
        if self.content is not None and data not in self.leaves:
            content = bytes(self.content) if data == "kept" else self.durable
            content += bytes(max(0, len(self.content) - len(content)) if data == "zeros" else 0)
            digest = hashlib.sha1(bytes([self.is_link]) + content).digest()
            self.leaves[data] = Leaf(content, self.is_link, digest)
        return self.leaves.get(data)

    def paths(self, kept: Collection[int], data: str, above: bytes = b"") -> Iterator[tuple[bytes, Leaf | None]]:
        """Yield what is below this folder if of the pending changes the `kept` numbers have reached the disk."""
        names = dict(self.durable_names)
        for change in self.pending:
            if change.number in kept:
                change.apply(names)
        for name, node in sorted(names.items()):
            yield above + b"/" + name, node.leaf(data)
            yield from node.paths(kept, data, above + b"/" + name)


class Change(NamedTuple):
    """A change of a folder's names: `removed` goes, and `added` is `node`."""

    number: int
    removed: bytes | None
    added: bytes | None
    node: Node

    def apply(self, names: dict[bytes, Node]) -> None:
        if self.removed is not None and names.get(self.removed) is self.node:
            del names[self.removed]
        if self.added is not None:
            names[self.added] = self.node


class Disk:
    """The folder `root` as a process sees it, with what of it is sure."""

    def __init__(self, root: Path) -> None:
        self._root, self._top, self._numbers = os.fsencode(root), Node(), count()

    def apply(self, done: Operation) -> None:
        folder, name = self._parent(done.path)
        node = folder.names.get(name) if name else self._top
        if done.kind == "make":
            if node is None:
                self._change(folder, None, name, Node(bytearray()))
        elif done.kind == "mkdir":
            self._change(folder, None, name, Node())
        elif done.kind == "symlink":
            self._change(folder, None, name, Node(bytearray(done.other), done.other, is_link=True))
        elif done.kind == "unlink":
            self._change(folder, name, None, folder.names[name])
        elif done.kind == "rename":
            there, new = self._parent(done.other)
            if there is not folder:
                raise ValueError(f"renamed into another folder, which the replay does not know: {done}")
            self._change(folder, name, new, folder.names[name])
        elif node is None:  # written, cut or flushed after it was removed
            return
        elif node.content is None:
            node.durable_names, node.pending = dict(node.names), []
        elif done.kind == "fsync":
            node.durable = bytes(node.content)
            node.leaves.clear()
        else:
            node.leaves.clear()
            offset = len(node.content) if done.offset == END else done.offset
            node.content.extend(bytes(max(0, offset - len(node.content))))
            end = offset + len(done.content) if done.kind == "write" else len(node.content)
            node.content[offset:end] = done.content

    def states(self) -> Iterator[State]:
        """Yield every disk that a power loss may leave now; many are the same."""
        numbers = sorted(change.number for folder in self._folders() for change in folder.pending)
        for data in DATA:
            for length in range(len(numbers) + 1):
                yield self._state(f"the first {length} of {len(numbers)} names", numbers[:length], data)
        for data in DATA[:2]:
            for number in numbers:
                yield self._state("all names but one", {*numbers} - {number}, data)
                yield self._state("one name alone", {number}, data)

    def now(self) -> State:
        """Return the folder as a process sees it."""
        return self._state("all", [one.number for folder in self._folders() for one in folder.pending], "kept")

    def _state(self, how: str, kept: Collection[int], data: str) -> State:
        return State(f"{how}, data {data}", list(self._top.paths(frozenset(kept), data)))

    def _parent(self, path: bytes) -> tuple[Node, bytes]:
        *folders, name = path[len(self._root) :].split(b"/")[1:] or [b""]
        node = self._top
        for one in folders:
            node = node.names[one]
        return node, name

    def _change(self, folder: Node, removed: bytes | None, added: bytes | None, node: Node) -> None:
        folder.pending.append(Change(next(self._numbers), removed, added, node))
        folder.pending[-1].apply(folder.names)

    def _folders(self) -> Iterable[Node]:
        found, queue = dict[int, Node](), [self._top]
        while queue:
            node = queue.pop()
            if id(node) not in found and node.content is None:
                found[id(node)] = node
                queue += [*node.names.values(), *node.durable_names.values()]
        return found.values()
