"""The place of a run, and collectives of its ranks outside the engine: small exchanges on the host, over gloo.

They never touch the accelerator, so none of them waits for a kernel. All are no-ops for one process.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_encdec.engines import ENGINES, EngineName, EngineSpec
from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.world import World
from ds_encdec.types import DsEncDecError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HostCollectives:
    """A gloo group over all ranks for decisions and small records. Create it once, on every rank."""

    def __init__(self, timeout: timedelta | None = None, *, own_group: bool = False) -> None:
        """`timeout`: of an exchange, where a group of its own is needed; None is torch's default.

        `own_group`: never share the training's group, so that one other thread of every rank may use it meanwhile.
        """
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.timeout = timeout
        # NCCL cannot move host objects without a device synchronisation; a second, gloo, group can.
        needs_own = self.world_size > 1 and (own_group or dist.get_backend() != "gloo")
        self._group = dist.new_group(backend="gloo", timeout=timeout) if needs_own else None

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, in rank order: one small all-gather."""
        if self.world_size == 1:
            return [[int(value) for value in values]]
        mine = torch.tensor(values, dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        return [row.tolist() for row in everyone]

    def gather(self, record: Any) -> list[Any]:
        """Every rank's picklable record, in rank order, on every rank."""
        if self.world_size == 1:
            return [record]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, record, group=self._group)
        return everyone

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if any raised, all raise the same error (the lowest rank's).

        Only for actions without collectives inside, or whose collectives all ranks reach.
        """
        result, error = attempt(action)
        self.raise_first(error)
        return result  # type: ignore[return-value]  # no error on any rank, so the action returned

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and hand its (picklable) result, or its error, to every rank."""
        result, error = self.gather(attempt(action) if self.rank == 0 else None)[0]
        if error is not None:
            raise error
        return result

    def rank_zero_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, then on the others, which find what it left in a cache.

        If any raised, all raise the same error.
        """
        first = self.on_every_rank(lambda: action() if self.rank == 0 else None)
        return self.on_every_rank(lambda: first if self.rank == 0 else action())  # type: ignore[return-value]

    def raise_first(self, error: Exception | None) -> None:
        """Raise the lowest rank's error on every rank, each bringing its own or None; or nothing.

        It is told with its rank and host where rank 0 does not have one, too: what is said may be true there alone.
        """
        told = [other for other in self.gather(error and (self.rank, socket.gethostname(), error)) if other]
        if told:
            rank, host, first = told[0]
            if rank and not str(first).startswith(f"rank {rank}"):
                first.args = (f"rank {rank} ({host}): {first}",)
            raise first


@dataclass(frozen=True, slots=True)
class RunContext:
    """This rank among the others, its device, its engine, and how the ranks' main threads talk to each other.

    It is handed down from the start of a run to everybody who asks. `collectives` has the one host-side group of a run:
    a thread beside the main one asks it for a group of its own.
    """

    world: World
    device: torch.device
    engine: EngineName
    collectives: HostCollectives

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
        return None, DsEncDecError(f"{type(error).__name__}: {error}")
