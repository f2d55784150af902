"""A log of the sizes of storages: what tensors hold, by what it is for, at every moment that was noted.

A dispatch mode notes the storages that operators make (trace.py, scripts/bench/tracked.py). The log hears of their
deaths and resizes itself. What a storage is for may be known only when it has been filled, and storages also die in
other threads, gloo's above all: so nothing is added up before the log is read.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage
from torch.distributed._tools.common_utils import get_untyped_storages

Purpose = TypeVar("Purpose", bound=str)


@dataclass
class _Entry(Generic[Purpose]):
    """One storage: what it is for, and its bytes now, or at last."""

    purpose: Purpose
    num_bytes: int = 0


class StorageLog(Generic[Purpose]):
    """Follows the storages that it is told of, without keeping them alive. Sizes are in bytes."""

    def __init__(self) -> None:
        self.moment = ""
        """The name of changes from now on: what is in work."""
        self._alive: dict[int, _Entry[Purpose]] = {}
        self._changes: list[tuple[_Entry[Purpose], int, str]] = []

    def note(self, storages: Iterable[UntypedStorage], purpose: Purpose) -> None:
        """`storages` are there; those that are new are for `purpose`."""
        for storage in storages:
            self._follow(storage, purpose)

    def claim(self, storages: Iterable[UntypedStorage], purpose: Purpose) -> None:
        """`storages` are there and for `purpose`, as they have been from their beginning."""
        for storage in storages:
            self._follow(storage, purpose).purpose = purpose

    def purpose_of(self, storage: UntypedStorage) -> Purpose | None:
        """Return what `storage` is for; None if it was never noted."""
        entry = self._alive.get(storage._cdata)
        return None if entry is None else entry.purpose

    def changes(self) -> Iterator[tuple[str, Purpose, int]]:
        """Every change so far: what was in work, what the storage is for, and the bytes that came or, below 0, went."""
        return ((when, entry.purpose, change) for entry, change, when in self._changes)

    def peak(self, counted: Iterable[Purpose]) -> tuple[dict[Purpose, int], str]:
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

    def _follow(self, storage: UntypedStorage, purpose: Purpose) -> _Entry[Purpose]:
        if (key := storage._cdata) not in self._alive:
            self._alive[key] = _Entry(purpose)
            finalize(storage, lambda: self._log_size(self._alive.pop(key), 0)).atexit = False
        self._log_size(self._alive[key], storage.nbytes())
        return self._alive[key]

    def _log_size(self, entry: _Entry[Purpose], num_bytes: int) -> None:
        if num_bytes != entry.num_bytes:
            self._changes.append((entry, num_bytes - entry.num_bytes, self.moment))
            entry.num_bytes = num_bytes


def storages_of(leaves: Iterable[object]) -> Iterator[UntypedStorage]:
    """The storages of the dense tensors among `leaves`; what is no tensor is passed over."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield from get_untyped_storages(leaf)
