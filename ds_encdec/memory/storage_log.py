"""A log of the sizes of storages, by purpose, at every moment that was noted.

A dispatch mode notes the storages that operators make (trace.py, scripts/bench/tracked.py); the log follows their
deaths and resizes by itself. A purpose may be known only later, and storages also die in other threads (gloo's): so
nothing is added up before the log is read.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage
from torch.distributed._tools.common_utils import get_untyped_storages


@dataclass
class _Entry:
    """One storage: its purpose, and its bytes now, or at last."""

    purpose: str
    num_bytes: int = 0


class StorageLog:
    """Follows storages without keeping them alive. Sizes are in bytes."""

    def __init__(self) -> None:
        self.moment = ""
        """The name of changes from now on: the part of the step that runs."""
        self._alive: dict[int, _Entry] = {}
        self._changes: list[tuple[_Entry, int, str]] = []

    def note(self, storages: Iterable[UntypedStorage], purpose: str) -> None:
        """`storages` are there; those that are new are for `purpose`."""
        for storage in storages:
            self._follow(storage, purpose)

    def claim(self, storages: Iterable[UntypedStorage], purpose: str) -> None:
        """`storages` are there and for `purpose`, as they have been from their beginning."""
        for storage in storages:
            self._follow(storage, purpose).purpose = purpose

    def purpose_of(self, storage: UntypedStorage) -> str | None:
        """Return what `storage` is for; None if it was never noted."""
        entry = self._alive.get(storage._cdata)
        return None if entry is None else entry.purpose

    def changes(self) -> Iterator[tuple[str, str, int]]:
        """Every change so far: the moment, the purpose, and the bytes that came or, below 0, went."""
        return ((when, entry.purpose, change) for entry, change, when in self._changes)

    def peak(self, counted: Iterable[str]) -> tuple[dict[str, int], str]:
        """The bytes for the purposes of `counted` when they were most, of equals first, and what was in work then."""
        held = dict.fromkeys(counted, 0)
        at_peak, moment = dict(held), ""
        for when, purpose, change in self.changes():
            if purpose in held:
                held[purpose] += change
                if sum(held.values()) > sum(at_peak.values()):
                    at_peak, moment = dict(held), when
        return at_peak, moment

    @contextmanager
    def watched_resizes(self) -> Iterator[None]:
        """FSDP2 makes and frees gathered parameters by `UntypedStorage.resize_`, which is no operator."""
        original = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> UntypedStorage:
            resized = original(storage, size)
            if (entry := self._alive.get(storage._cdata)) is not None:
                self._log_size(entry, storage.nbytes())
            return resized

        with patch.object(UntypedStorage, "resize_", resize_):
            yield

    def _follow(self, storage: UntypedStorage, purpose: str) -> _Entry:
        if (key := storage._cdata) not in self._alive:
            self._alive[key] = _Entry(purpose)
            finalize(storage, lambda: self._log_size(self._alive.pop(key), 0)).atexit = False
        self._log_size(self._alive[key], storage.nbytes())
        return self._alive[key]

    def _log_size(self, entry: _Entry, num_bytes: int) -> None:
        if num_bytes != entry.num_bytes:
            self._changes.append((entry, num_bytes - entry.num_bytes, self.moment))
            entry.num_bytes = num_bytes


def storages_of(leaves: Iterable[object]) -> Iterator[UntypedStorage]:
    """The storages of the dense tensors among `leaves`; other objects are skipped."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield from get_untyped_storages(leaf)
