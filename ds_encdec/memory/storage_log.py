"""A log of storage sizes by purpose at every moment, noted by a dispatch mode (trace.py, scripts/bench/tracked.py).

Sums wait until it is read: a purpose may be known late, and storages also die in other threads (gloo's).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch
from weakref import finalize

from torch import Tensor, UntypedStorage, strided
from torch.distributed._tools.common_utils import get_untyped_storages


@dataclass
class _Entry:
    purpose: str
    num_bytes: int = 0


class StorageLog:
    """Follows storages without keeping them alive. Sizes are in bytes."""

    def __init__(self) -> None:
        # Name of the running part of the step, which later changes carry.
        self.moment = ""
        self._alive: dict[int, _Entry] = {}
        self._changes: list[tuple[_Entry, int, str]] = []

    def note(self, storages: Iterable[UntypedStorage], purpose: str) -> None:
        """Follow `storages`; those that are new are for `purpose`."""
        for storage in storages:
            if (key := storage._cdata) not in self._alive:
                self._alive[key] = _Entry(purpose)
                finalize(storage, lambda key: self._log_size(self._alive.pop(key), 0), key).atexit = False
            self._log_size(self._alive[key], storage.nbytes())

    def claim(self, storages: Iterable[UntypedStorage], purpose: str, *, instead_of: str | None = None) -> None:
        """Follow `storages` and set their purpose (`instead_of` a certain one), for their earlier changes too."""
        for storage in storages:
            self.note([storage], purpose)
            entry = self._alive[storage._cdata]
            entry.purpose = purpose if instead_of in (None, entry.purpose) else entry.purpose

    def changes(self) -> Iterator[tuple[str, str, int]]:
        """Return every change so far: moment, purpose, and the bytes added or (below 0) freed."""
        return ((when, entry.purpose, change) for entry, change, when in self._changes)

    def peak(self, counted: Iterable[str]) -> tuple[dict[str, int], str]:
        """Return the bytes by purpose in `counted` at the first moment of their largest sum, and that moment's name."""
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
        """Log `UntypedStorage.resize_`, no operator, by which FSDP2 makes and frees gathered parameters."""
        original = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> UntypedStorage:
            resized = original(storage, size)
            if (entry := self._alive.get(storage._cdata)) is not None:
                self._log_size(entry, storage.nbytes())
            return resized

        with patch.object(UntypedStorage, "resize_", resize_):
            yield

    def _log_size(self, entry: _Entry, num_bytes: int) -> None:
        if num_bytes != entry.num_bytes:
            self._changes.append((entry, num_bytes - entry.num_bytes, self.moment))
            entry.num_bytes = num_bytes


def storages_of(leaves: Iterable[object]) -> Iterator[UntypedStorage]:
    """Yield the storages of the dense tensors among `leaves`; other objects are skipped."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == strided:
            yield from get_untyped_storages(leaf)
