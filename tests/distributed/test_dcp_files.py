"""Ranges of tensors out of what `torch.distributed.checkpoint` wrote on real ranks, bit for bit."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ds_encdec.base.types import CheckpointError
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.engine.protocol import DCP_FOLDER, EngineRecord, write_record

pytestmark = pytest.mark.distributed

SHAPES = {"even": (16, 4), "uneven": (7, 3), "fewer_rows_than_ranks": (1, 5), "vector": (3,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
LAYOUTS = {"sharded": ((4,), (0,)), "hybrid": ((2, 2), (None, 0)), "columns": ((4,), (-1,))}


def tensors() -> dict[str, Tensor]:
    """The full state, the same in every process."""
    draw = torch.Generator().manual_seed(5)
    return {f"{kind}.{name}": torch.randn(shape, generator=draw) for kind in KINDS for name, shape in SHAPES.items()}


def save(folder: str) -> None:
    """Write `tensors()` to folder/LAYOUT/dcp, distributed as each (mesh, sharded dimension or None) says."""
    for layout, (mesh_shape, dimensions) in LAYOUTS.items():
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a checkpoint of each layout."""
    folder: Path = tmp_path_factory.mktemp("dcp")
    run_ranks("test_dcp_files.py:save", 4, {"folder": str(folder)})
    return folder


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
def test_every_range_is_what_was_saved(written: Path, layout: str) -> None:
    saved = DcpState(written / layout)
    assert (list(saved.shapes.items()), saved.applied_steps) == (list(SHAPES.items()), 11)
    full = tensors()
    draw = random.Random(0)
    for kind in KINDS:
        for name in SHAPES:
            expected = full[f"{kind}.{name}"].flatten()
            assert torch.equal(saved.read(kind, name), expected)
            for _ in range(20):
                start, stop = sorted(draw.choices(range(len(expected) + 1), k=2))
                assert torch.equal(saved.read(kind, name, start, stop), expected[start:stop])


def test_shards_of_columns_are_refused(written: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weight\.even is cut along other dimensions"):
        DcpState(written / "columns")
