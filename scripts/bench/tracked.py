"""Measures what the steps of an engine hold: the peak in bytes, phase by phase, split by what it is spent on.

    with tracking(engine.model, optimizer, device) as tracked:
        loss_sum = next(engine.losses([batch]))
        tracked.end_phase("forward")
        ...
    tracked.peak_bytes, tracked.phases["forward"].at_peak

On a GPU torch's allocator counts by itself. On a CPU nothing does, so every operator is watched, as
`torch.distributed._tools.mem_tracker.MemTracker` watches them, and the storages alive after each are added up. Beside
MemTracker this sees what was there before and what DeepSpeed does behind modules and optimizers, which MemTracker
does not attribute. What operators allocate inside and give back before they return escapes both.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["parameters", "optimizer", "gradients", "engine", "rest"]
"""`parameters`: of the model, as its layers compute with them, or this rank's shards of them. `optimizer`: its master
weights where it has any, and its states. `gradients`: of either. `engine`: what else was alive when tracking began,
buffers above all. `rest`: activations and temporaries, gathered parameters and gradients on their way included."""

KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "gradients", "engine", "rest")


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step. Bytes: `peak_bytes` at most, split in `at_peak`; `held_bytes` at its end."""

    peak_bytes: int
    at_peak: Mapping[Kind, int]
    held_bytes: int


@dataclass
class _Entry:
    purpose: str
    num_bytes: int = 0


class StorageLog:
    """A log of storage sizes by purpose at every moment, in bytes; it keeps no storage alive.

    Sums wait until it is read: a purpose may be known late, and storages also die in other threads (gloo's).
    """

    def __init__(self) -> None:
        self.moment = ""
        """Name of what runs, which later changes carry."""
        self._alive: dict[int, _Entry] = {}
        self._changes: list[tuple[_Entry, int, str]] = []

    def note(self, storages: Iterable[UntypedStorage], purpose: str) -> None:
        """Follow `storages`; those that are new are for `purpose`."""
        for storage in storages:
            if (key := storage._cdata) not in self._alive:
                self._alive[key] = _Entry(purpose)
                finalize(storage, lambda key: self._log_size(self._alive.pop(key), 0), key).atexit = False
            self._log_size(self._alive[key], storage.nbytes())

    def claim(self, storages: Iterable[UntypedStorage], purpose: str) -> None:
        """Follow `storages` and set their purpose, for their earlier changes too."""
        for storage in storages:
            self.note([storage], purpose)
            self._alive[storage._cdata].purpose = purpose

    def changes(self) -> Iterator[tuple[str, str, int]]:
        """Every change so far: moment, purpose, and the bytes added or (below 0) freed."""
        return ((when, entry.purpose, change) for entry, change, when in self._changes)

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
    """The storages of the dense tensors among `leaves`; other objects are skipped."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield from get_untyped_storages(leaf)


class Tracked:
    """Measures while tracking lasts; read it afterwards. A phase that ended several times has its highest peak."""

    def __init__(self) -> None:
        self.resting_bytes = 0
        """Bytes held when tracking began."""
        self.phases: dict[str, Phase] = {}

    def end_phase(self, name: str) -> None:
        """Call what was done since the last end, or since tracking began, the phase `name`."""
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all phases."""
        return max(phase.peak_bytes for phase in self.phases.values())

    def _add_phase(self, name: str, phase: Phase) -> None:
        earlier = self.phases.get(name, phase)
        highest = max(earlier, phase, key=lambda phase: phase.peak_bytes)
        self.phases[name] = Phase(highest.peak_bytes, highest.at_peak, phase.held_bytes)


@contextmanager
def tracking(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[Tracked]:
    """Track this process's tensors on `device`. `optimizer`: torch's own, not an engine's wrapper of it.

    Where the optimizer has not stepped yet, its states come as `rest`.
    """
    if device.type == "cuda":
        yield _AllocatorPeaks(device)
        return
    watched = _StorageWatch(model, optimizer, device)
    with watched.log.watched_resizes(), watched:
        yield watched
    watched.evaluate()


class _AllocatorPeaks(Tracked):
    """Peaks by CUDA's caching allocator, in bytes that tensors asked for; all of it counts as `rest`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.resting_bytes = self._begin()

    def end_phase(self, name: str) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        self._add_phase(name, Phase(peak, {"rest": peak}, self._begin()))

    def _begin(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


class _StorageWatch(TorchDispatchMode, Tracked):
    """Logs every storage on one type of device from operator to operator. The log is read when tracking is over."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        Tracked.__init__(self)
        self._model, self._optimizer, self._device_type = model, optimizer, device.type
        self.log: StorageLog = StorageLog()
        self._names: list[str] = []
        self.log.note(_storages(_all_tensors(), self._device_type), "engine")
        self._name_kinds()
        self.log.moment = "0"  # the number of the phase

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Arguments: tensors made without an operator, by numpy or in C++, are first seen when they are used.
        self.log.note(_storages(tree_leaves((result, args, kwargs)), self._device_type), "rest")
        return result

    def end_phase(self, name: str) -> None:
        self._name_kinds()
        self._names.append(name)
        self.log.moment = str(len(self._names))

    def evaluate(self) -> None:
        """Turn the log into phases."""
        held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        changes = list(self.log.changes())
        for when, kind, change in changes:
            held[kind] += change if when == "" else 0
        self.resting_bytes = sum(held.values())
        for number, name in enumerate(self._names):
            at_peak = dict(held)
            for _, kind, change in (change for change in changes if change[0] == str(number)):
                held[kind] += change
                if sum(held.values()) > sum(at_peak.values()):
                    at_peak = dict(held)
            self._add_phase(name, Phase(sum(at_peak.values()), at_peak, sum(held.values())))

    def _name_kinds(self) -> None:
        """Say of the storages that model and optimizer hold now what they are for."""
        for kind, tensors in reversed(_owned(self._model, self._optimizer).items()):
            self.log.claim(_storages(tensors, self._device_type), kind)


def _owned(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[Kind, list[Tensor]]:
    """The tensors that model and optimizer hold now. What is found under several kinds is of the first."""
    parameters = list(model.parameters())
    masters: list[Tensor] = []
    states: list[Tensor] = []
    if optimizer is not None:
        masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        masters += [key for key in optimizer.state if isinstance(key, Tensor)]
        states = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    # ZeRO-3 leaves nothing in the parameter itself: `ds_tensor` is this rank's part of it.
    shards = [shard for parameter in parameters if (shard := getattr(parameter, "ds_tensor", None)) is not None]
    gradients = [tensor.grad for tensor in (*parameters, *masters) if tensor.grad is not None]
    return {
        "parameters": [*parameters, *shards, *model.buffers()],
        "optimizer": [*masters, *states],
        "gradients": gradients,
    }


def _storages(leaves: Iterable[object], device_type: str) -> Iterator[UntypedStorage]:
    return (storage for storage in storages_of(leaves) if storage.device.type == device_type)


def _all_tensors() -> list[Tensor]:
    """Every tensor that Python knows of, and their gradients, which it may not have met yet."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
