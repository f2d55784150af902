"""What the ranks of test_dcp_files.py write."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ds_encdec.engine.protocol import DCP_FOLDER, EngineRecord, write_record

SHAPES = {"even": (16, 4), "uneven": (7, 3), "fewer_rows_than_ranks": (1, 5), "vector": (3,), "large": (301, 257)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def tensors() -> dict[str, Tensor]:
    """The full state, the same in every process."""
    draw = torch.Generator().manual_seed(5)
    return {f"{kind}.{name}": torch.randn(shape, generator=draw) for kind in KINDS for name, shape in SHAPES.items()}


def save(folder: str, layouts: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]]) -> None:
    """Write `tensors()` to folder/LAYOUT/dcp, distributed as each (mesh, sharded dimension or None) says."""
    for layout, (mesh_shape, dimensions) in layouts.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        placements = [Replicate() if dimension is None else Shard(dimension) for dimension in dimensions]
        state = {key: _distributed(full, mesh, placements) for key, full in tensors().items()}
        checkpoint = Path(folder) / layout
        if dist.get_rank() == 0:
            checkpoint.mkdir(parents=True)
            write_record(EngineRecord("dcp", "zero3", dist.get_world_size(), 11, ((*SHAPES,),)), checkpoint)
        dist.barrier()
        dcp.save(state, checkpoint_id=checkpoint / DCP_FOLDER)


def _distributed(full: Tensor, mesh: dist.DeviceMesh, placements: list[Placement]) -> DTensor:
    """`full` in shards that are pieces of larger buffers, as FSDP2's padded ones are."""
    shard = distribute_tensor(full, mesh, placements)
    local = shard.to_local()
    padded = torch.full((len(local) + 2, *local.shape[1:]), torch.nan)
    padded[: len(local)] = local
    return DTensor.from_local(
        padded[: len(local)], mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
