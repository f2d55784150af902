"""Exchanges small records between the ranks of a run on the host, over gloo and outside the engine. The exchanges never
touch the accelerator, so none waits for a kernel; for one process all are no-ops. Sums, minima and broadcasts take time
with the logarithm of the number of ranks; an all-gather would take time with the number itself (some 0.1 s at a
thousand, BENCHMARKS.md), so none is used."""

import logging
import pickle
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_encdec.base.plugins import whose_fault
from ds_encdec.base.types import DsEncDecError
from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.world import World
from ds_encdec.registry.engines import ENGINES, EngineName, EngineSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reduction:
    """An all-reduce of numbers, element by element, under way since every rank made this. `group`: None for the
    training's own. `waited_seconds`: how long this rank has waited for the last one; 0.0 until that has come."""

    def __init__(self, values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
        self._values, self.waited_seconds = values, 0.0
        self._work: dist.Work | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            began = time.monotonic()

            def note(_: object) -> None:
                self.waited_seconds = time.monotonic() - began

            self._work = dist.all_reduce(values, op, group, async_op=True)
            self._work.get_future().add_done_callback(note)

    def result(self) -> Tensor:
        """Wait, and return the combined numbers, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return self._values


class HostCollectives:
    """A gloo group over all ranks for decisions and small records. Make it once, on every rank; every method is a
    collective. `timeout`: of an exchange in a new group; None is torch's default. `own_group`: never share the
    training's, so that another thread of every rank may use this one meanwhile. `group` is None if it is that."""

    def __init__(self, timeout: timedelta | None = None, *, own_group: bool = False) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.timeout = timeout
        # NCCL cannot move host objects without a device synchronisation; a group that has gloo for the CPU can. Every
        # further group costs each rank a connection to each other.
        needs_own = own_group or (self.world_size > 1 and "cpu:gloo" not in dist.get_backend_config())
        self.group = dist.new_group(backend="gloo", timeout=timeout) if needs_own and dist.is_initialized() else None

    @cached_property
    def background(self) -> "HostCollectives":
        """The same over a second group, for one thread of every rank besides the main one, such as that of a save. The
        first use makes the group, which is a collective."""
        return HostCollectives(self.timeout, own_group=True)

    def sum(self, *values: int) -> list[int]:
        """Return the sum of every rank's integers, each in its place."""
        return self.begin_sum(*values).result().tolist()

    def lowest(self, *values: int) -> list[int]:
        """Return the smallest of every rank's integers, each in its place."""
        return self.begin_lowest(*values).result().tolist()

    def begin_sum(self, *values: int) -> Reduction:
        """Begin `sum`, without the wait."""
        return Reduction(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.SUM, self.group)

    def begin_lowest(self, *values: int) -> Reduction:
        """Begin `lowest`, without the wait."""
        return Reduction(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MIN, self.group)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sum of every rank's tensor on the host, the same on all to the bit."""
        return Reduction(values.cpu().clone(), dist.ReduceOp.SUM, self.group).result()

    def gather_to_zero(self, record: Any) -> list[Any]:
        """Return every rank's picklable record in rank order on rank 0, and an empty list on the others."""
        if self.world_size == 1:
            return [record]
        pickled = torch.frombuffer(bytearray(pickle.dumps(record)), dtype=torch.uint8)
        longest = -self.lowest(-len(pickled))[0]
        # Unpickling ignores the padding.
        padded = torch.nn.functional.pad(pickled, (0, longest - len(pickled)))
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(padded, everyone, dst=0, group=self.group)
        return [pickle.loads(row.numpy().tobytes()) for row in everyone or ()]

    def broadcast(self, record: Any, source: int = 0) -> Any:
        """Return rank `source`'s picklable record; those of the others are ignored."""
        if self.world_size == 1:
            return record
        records = [record]
        dist.broadcast_object_list(records, src=source, group=self.group, device=torch.device("cpu"))
        return records[0]

    def gather(self, record: Any) -> list[Any]:
        """Return every rank's picklable record in rank order, on every rank; none returns before all have called."""
        return self.broadcast(self.gather_to_zero(record))

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if any raised, all raise the lowest rank's error. Use this only for actions
        without collectives, or whose collectives all ranks reach."""
        result, error = attempt(action)
        self.raise_first(error)
        return result  # type: ignore[return-value]  # no error on any rank, so the action returned

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its (picklable) result, or raise its error, on every rank."""
        result, error = self.broadcast(attempt(action) if self.rank == 0 else None)
        if error is not None:
            raise error
        return result

    def rank_zero_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, then on the others, which find its work in a cache; all raise the first error."""
        first, error = attempt(action) if self.rank == 0 else (None, None)
        self.raise_first(error)
        return self.on_every_rank(lambda: first if self.rank == 0 else action())  # type: ignore[return-value]

    def raise_first(self, error: Exception | None) -> None:
        """Raise the lowest rank's `error` (or None) on every rank, with rank and host unless it is rank 0's."""
        first = self.lowest(self.world_size if error is None else self.rank)[0]
        if first < self.world_size:
            named = str(error).startswith((f"rank {first}:", f"rank {first} "))
            if error is not None and first == self.rank > 0 and not named:
                error.args = (f"rank {first} ({socket.gethostname()}): {error}",)
            raise self.broadcast(error, first)


@dataclass(frozen=True, slots=True)
class RunContext:
    """This rank among the others: its device, its engine, and the collectives of the ranks' main threads. Another
    thread needs `collectives.background`. `undo` reverts the run's process-wide changes."""

    world: World
    device: torch.device
    engine: EngineName
    collectives: HostCollectives
    undo: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)

    @property
    def engine_spec(self) -> EngineSpec:
        """The registry's row of the engine."""
        return ENGINES[self.engine]


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `action`, or the error it raises, which must reach the other ranks before it is raised."""
    try:
        return action(), None
    except DsEncDecError as error:
        return None, error
    except Exception as error:
        logger.debug("on this rank alone:", exc_info=True)
        if is_out_of_memory(error):
            return None, out_of_memory(error, dist.get_rank() if dist.is_initialized() else 0)
        return None, DsEncDecError(whose_fault(error, or_library=False))
