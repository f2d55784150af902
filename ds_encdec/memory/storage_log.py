"""A log of the sizes of storages: what tensors hold, by what it is for, at every moment that was noted.

A dispatch mode notes the storages that operators make (trace.py, scripts/bench/tracked.py). The log hears of their
deaths and resizes itself. What a storage is for may be known only when it has been filled, and storages also die in
other threads, gloo's above all: so nothing is added up before the log is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
    """Follows the storages that it is told of, without keeping them alive.

    `purposes`: all that storages may be for. Sizes are in bytes.
    """

    def __init__(self, purposes: Iterable[Purpose]) -> None:
        self.moment = ""
        """The name of changes from now on: what is in work."""
        self._purposes = tuple(purposes)
        self._alive: dict[int, _Entry[Purpose]] = {}
        self._changes: list[tuple[_Entry[Purpose], int, str]] = []

    def __len__(self) -> int:
        """The changes of sizes so far: a position in the log."""
        return len(self._changes)

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

    def held(self, position: int) -> dict[Purpose, int]:
        """Bytes by purpose after the first `position` changes."""
        held = dict.fromkeys(self._purposes, 0)
        for entry, change, _ in self._changes[:position]:
            held[entry.purpose] += change
        return held

    def peak(
        self, begin: int = 0, end: int | None = None, *, counted: Collection[Purpose] | None = None
    ) -> tuple[dict[Purpose, int], str]:
        """The bytes of `counted` (None: of every purpose) when they were most, and what was in work then.

        From the position `begin` to the position `end` (None: to the last); of equals the first, and "" for `begin`.
        """
        held = self.held(begin)
        held = {purpose: held[purpose] for purpose in (self._purposes if counted is None else counted)}
        at_peak, moment = dict(held), ""
        for entry, change, when in self._changes[begin:end]:
            if entry.purpose in held:
                held[entry.purpose] += change
                if sum(held.values()) > sum(at_peak.values()):
                    at_peak, moment = dict(held), when
        return at_peak, moment

    def changes(self) -> Iterator[tuple[str, Purpose, int]]:
        """Every change so far: what was in work, what the storage is for, and the bytes that came or, below 0, went."""
        return ((when, entry.purpose, change) for entry, change, when in self._changes)

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
