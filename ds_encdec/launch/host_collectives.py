"""The place of a run, and collectives of its ranks outside the engine: small exchanges on the host, over gloo.

They never touch the accelerator, so none of them waits for a kernel. All are no-ops for one process.

Sums, minima and broadcasts take about as long as the logarithm of the number of ranks. An all-gather takes as long as
the number itself (some 0.1 s at a thousand, BENCHMARKS.md), so there is none.
"""

import logging
import pickle
import resource
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

ENOUGH_OPEN_FILES = 1 << 16
GLOO_GROUPS = 3
"""At most so many groups connect every rank with every other: ours, their background, and DeepSpeed's on CPUs."""
OWN_OPEN_FILES = 512
"""At most so many files of a rank are open beside its connections."""


class Reduction:
    """Numbers of all ranks on their way to be combined, element by element, since this was made.

    `waited_seconds`: how long this rank was there before the last one; 0.0 before that one came.
    """

    def __init__(self, values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
        """Collective; returns at once. `group`: None for the training's own."""
        self._values, self.waited_seconds = values, 0.0
        self._work: dist.Work | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            began = time.monotonic()

            def note(_: object) -> None:
                self.waited_seconds = time.monotonic() - began

            self._work = dist.all_reduce(values, op, group, async_op=True)
            self._work.get_future().add_done_callback(note)

    def result(self) -> Tensor:
        """The combined numbers, the same on every rank. Waits for them."""
        if self._work is not None:
            self._work.wait()
        return self._values


class HostCollectives:
    """A gloo group over all ranks for decisions and small records. Create it once, on every rank.

    `group` is None where it is the training's own.
    """

    def __init__(self, timeout: timedelta | None = None, *, own_group: bool = False) -> None:
        """`timeout`: of an exchange, where a group of its own is needed; None is torch's default.

        `own_group`: never share the training's group, so that one other thread of every rank may use it meanwhile.
        """
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.timeout = timeout
        # NCCL cannot move host objects without a device synchronisation. A group that has gloo for the CPU can: every
        # further one costs each rank a connection to each other.
        needs_own = own_group or (self.world_size > 1 and "cpu:gloo" not in dist.get_backend_config())
        self.group = dist.new_group(backend="gloo", timeout=timeout) if needs_own and dist.is_initialized() else None

    @cached_property
    def background(self) -> "HostCollectives":
        """The same over a second group, for one thread of every rank beside the main one: that of the save under way.

        It is made where it is asked for first, which is a collective.
        """
        return HostCollectives(self.timeout, own_group=True)

    def sum(self, *values: int) -> list[int]:
        """The sums of every rank's integers, in the order given."""
        return self.begin_sum(*values).result().tolist()

    def lowest(self, *values: int) -> list[int]:
        """The smallest of every rank's integers, each in its place."""
        return self.begin_lowest(*values).result().tolist()

    def begin_sum(self, *values: int) -> Reduction:
        """`sum` without the wait."""
        return Reduction(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.SUM, self.group)

    def begin_lowest(self, *values: int) -> Reduction:
        """`lowest` without the wait."""
        return Reduction(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MIN, self.group)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """The sum of every rank's tensor, the same on all to the bit; on the host."""
        return Reduction(values.cpu().clone(), dist.ReduceOp.SUM, self.group).result()

    def gather_to_zero(self, record: Any) -> list[Any]:
        """Every rank's picklable record, in rank order, on rank 0; no records on the others."""
        if self.world_size == 1:
            return [record]
        pickled = torch.frombuffer(bytearray(pickle.dumps(record)), dtype=torch.uint8)
        longest = -self.lowest(-len(pickled))[0]
        # What follows the end of a pickle is not read.
        padded = torch.nn.functional.pad(pickled, (0, longest - len(pickled)))
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(padded, everyone, dst=0, group=self.group)
        return [pickle.loads(row.numpy().tobytes()) for row in everyone or ()]

    def broadcast(self, record: Any, source: int = 0) -> Any:
        """Rank `source`'s picklable record; what the others bring is not looked at."""
        if self.world_size == 1:
            return record
        records = [record]
        dist.broadcast_object_list(records, src=source, group=self.group, device=torch.device("cpu"))
        return records[0]

    def gather(self, record: Any) -> list[Any]:
        """Every rank's picklable record, in rank order, on every rank; none goes on before all have come."""
        return self.broadcast(self.gather_to_zero(record))

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if any raised, all raise the same error (the lowest rank's).

        Only for actions without collectives inside, or whose collectives all ranks reach.
        """
        result, error = attempt(action)
        self.raise_first(error)
        return result  # type: ignore[return-value]  # no error on any rank, so the action returned

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and hand its (picklable) result, or its error, to every rank."""
        result, error = self.broadcast(attempt(action) if self.rank == 0 else None)
        if error is not None:
            raise error
        return result

    def rank_zero_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, then on the others, which find what it left in a cache.

        If any raised, all raise the same error.
        """
        first, error = attempt(action) if self.rank == 0 else (None, None)
        error = self.broadcast(error)
        if error is not None:
            raise error
        return self.on_every_rank(lambda: first if self.rank == 0 else action())  # type: ignore[return-value]

    def raise_first(self, error: Exception | None) -> None:
        """Raise the lowest rank's error on every rank, each bringing its own or None; with rank and host, but for 0."""
        first = self.lowest(self.world_size if error is None else self.rank)[0]
        if first < self.world_size:
            named = str(error).startswith((f"rank {first}:", f"rank {first} "))
            if error is not None and first == self.rank > 0 and not named:
                error.args = (f"rank {first} ({socket.gethostname()}): {error}",)
            raise self.broadcast(error, first)


@dataclass(frozen=True, slots=True)
class RunContext:
    """This rank among the others, its device, its engine, and how the ranks' main threads talk to each other.

    Another thread needs the `background` of `collectives`. `undo` takes back what the run changes process-wide.
    """

    world: World
    device: torch.device
    engine: EngineName
    collectives: HostCollectives
    undo: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)

    @property
    def engine_spec(self) -> EngineSpec:
        """The row of the engine."""
        return ENGINES[self.engine]


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `action` returns, or the error it raises, which must reach the other ranks before it is raised."""
    try:
        return action(), None
    except DsEncDecError as error:
        return None, error
    except Exception as error:
        logger.debug("on this rank alone:", exc_info=True)
        if is_out_of_memory(error):
            return None, out_of_memory(error, dist.get_rank() if dist.is_initialized() else 0)
        return None, DsEncDecError(whose_fault(error, or_library=False))


def allow_connections(world: World) -> None:
    """Raise this process's limit of open files for the ranks' connections, and warn where it stays too low.

    Beyond it connections fail, and errors call them closed by the peer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, min(hard, ENOUGH_OPEN_FILES))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    needed = OWN_OPEN_FILES + GLOO_GROUPS * world.world_size
    if needed > allowed and world.local_rank == 0:
        logger.warning(
            f"{world.world_size} ranks need about {needed} open files each, and this machine allows {allowed}: set the "
            f"hard limit to {needed} or more there (`ulimit -Hn`, /etc/security/limits.conf, docker --ulimit nofile)."
        )
