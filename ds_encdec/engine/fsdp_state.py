"""The state of the FSDP2 engine, written out into torch.distributed.checkpoint's files.

CHECKPOINT/
  engine.json                      what wrote it (record.py)
  dcp/.metadata, __RANK_0.distcp   float32 tensors weight.NAME, exp_avg.NAME, exp_avg_sq.NAME

Names are FQNs: those of `named_parameters()`, a tied one's first. Where parameters are replicated, each tensor is
written by one replica alone, so all replicas share the work, and the host memory of the copies.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ds_encdec.engine.protocol import StagedSave
from ds_encdec.engine.record import DCP_FOLDER, EngineRecord, write_record
from ds_encdec.launch.disk import disk_error
from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.types import MOMENTS, CheckpointError


def state_tensors(parameters: Mapping[str, DTensor], optimizer: torch.optim.Optimizer) -> dict[str, DTensor]:
    """`KIND.NAME` → the sharded tensor itself, for every weight and moment."""
    tensors: dict[str, Tensor] = {f"weight.{name}": parameter.detach() for name, parameter in parameters.items()}
    for kind in MOMENTS:
        tensors |= {f"{kind}.{name}": optimizer.state[parameter][kind] for name, parameter in parameters.items()}
    return cast(dict[str, DTensor], tensors)  # what DTensor's operations return is typed as Tensor


def keys_to_write(tensors: Mapping[str, DTensor]) -> list[str]:
    """The tensors that this rank's replica writes: each goes to the replica that has the fewest elements by then."""
    mesh = next(iter(tensors.values())).device_mesh
    replicas, mine = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
    elements = [0] * replicas
    keys = []
    for key, tensor in tensors.items():
        replica = elements.index(min(elements))
        elements[replica] += tensor.numel()
        if replica == mine:
            keys.append(key)
    return keys


class HostCopies:
    """A copy of the state in host memory, made into the same buffers every time."""

    def __init__(self, *, pin_memory: bool) -> None:
        """`pin_memory`: an accelerator then copies several times faster."""
        self._pin_memory = pin_memory
        self._buffers: dict[str, DTensor] = {}

    @property
    def exist(self) -> bool:
        """True once a copy was made, and its memory is held."""
        return bool(self._buffers)

    def take(self, tensors: Mapping[str, DTensor]) -> dict[str, DTensor]:
        """The buffers, holding `tensors` as they are now. Waits for the device once."""
        on_device = any(tensor.to_local().is_cuda for tensor in tensors.values())
        if not self._buffers:
            buffers: dict[str, Tensor] = {
                key: torch.empty_like(tensor, device="cpu", pin_memory=self._pin_memory)
                for key, tensor in tensors.items()
            }
            self._buffers = cast(dict[str, DTensor], buffers)
        for key, tensor in tensors.items():
            self._buffers[key].to_local().copy_(tensor.to_local(), non_blocking=True)
        if on_device:
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)


_COPY_AHEAD_BYTES = 10_000_000
"""Bytes that a writer fetches from the GPU beside what it writes; DCP's default."""


class _DiskWriter(dcp.FileSystemWriter):
    """DCP's writer, whose errors still say that the disk refused once they have travelled to another rank."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal = disk_error(error)
            if refusal is None:
                raise
            raise refusal from error


class StateWriter:
    """Writes states, possibly from a background thread: over a gloo group that nothing else uses."""

    def __init__(self, timeout: timedelta | None) -> None:
        """Collective. `timeout`: of each exchange between the writing ranks; None is torch's default."""
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def staged(
        self, tensors: Mapping[str, DTensor], keys: Sequence[str], record: EngineRecord, directory: Path
    ) -> StagedSave:
        """`record` and all `tensors`, to be written under `directory`; of those this rank writes `keys`."""
        num_bytes = sum(tensors[key].to_local().nbytes for key in keys)
        return StagedSave(num_bytes, partial(self._write, dict(tensors), frozenset(keys), record, directory))

    def close(self) -> None:
        """Collective, when nothing is being written."""
        dist.destroy_process_group(self._group)

    def _write(
        self, tensors: dict[str, DTensor], keys: frozenset[str], record: EngineRecord, directory: Path
    ) -> list[Path]:
        folder = directory / DCP_FOLDER
        # Copying ahead, as DCP does where there is a GPU, is for tensors there. For copies on the host it would only
        # make a background thread of every rank open a context on GPU 0, which is that thread's device.
        ahead = _COPY_AHEAD_BYTES if any(tensors[key].to_local().is_cuda for key in keys) else 0
        # Not synced: flushing to disk is the checkpoint manager's, file by file with the hashes.
        writer = _DiskWriter(folder, sync_files=False, overwrite=False, per_thread_copy_ahead=ahead)
        try:
            dcp.save(tensors, storage_writer=writer, planner=_PlanOf(keys), process_group=self._group)
        except CheckpointException as failure:  # a BaseException, with every rank's error
            raise _plain_error(failure, folder) from failure
        rank = dist.get_rank()
        files = sorted(folder.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            files += [folder / ".metadata", write_record(record, directory)]
        return files


class _PlanOf(DefaultSavePlanner):
    """Plans to write `keys` alone. Every rank names all tensors, so that the files list them in the model's order."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__()
        self._keys = keys

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if item.index.fqn in self._keys])
        return self.plan


def _plain_error(failure: CheckpointException, folder: Path) -> Exception:
    """The first rank's error, as OSError where the disk refused, and OutOfMemoryError where memory ran out."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, f"rank {rank}: {error.strerror or error}", str(folder))
    if is_out_of_memory(error):
        return out_of_memory(error, rank)
    return CheckpointError(f"{folder} could not be written: rank {rank}: {type(error).__name__}: {error}")
