"""What runs inside the ranks of test_nvme_offload.py: a model of which DeepSpeed swaps several sub-groups."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_cases import adam_steps
from engine_cases import full_weights, make_engine, save
from engine_steps import train_step
from small_run import run_config, small_model

from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.engine.deepspeed.zero import DeepSpeedEngine
from ds_encdec.model.parameter_count import parameter_shapes

MODEL = small_model(vocab_size=4096, hidden_size=128, intermediate_size=384, head_dim=32)
"""Each of two ranks has 1 MiB of the embedding, the least that is swapped, and of the layers more than that."""
ACCUMULATION = 2
SUB_GROUPS = {"zero_optimization": {"sub_group_size": 263_000, "stage3_param_persistence_threshold": 0}}
SHAPES = dict(parameter_shapes(MODEL))


def weights(name: str, rows: slice = slice(None), /) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(SHAPES[name], generator=draw) * 0.05 + (len(SHAPES[name]) == 1))[rows]


def engine_of(source: Any, **overrides: Any) -> DeepSpeedEngine:
    config = run_config(bf16=True, gradient_accumulation_steps=ACCUMULATION, deepspeed_extra=SUB_GROUPS, **overrides)
    return make_engine(config, source, MODEL)


def step(engine: DeepSpeedEngine, number: int, **how: Any) -> dict[str, Any]:
    return train_step(engine, number, ACCUMULATION, **how)


def on_disk(engine: DeepSpeedEngine) -> dict[str, int]:
    """Bytes by name of the files that this rank's optimizer swaps to, and elements that it has in memory."""
    swapper = getattr(engine._engine.optimizer, "optimizer_swapper", None)
    files = {} if swapper is None else {file.name: file.stat().st_size for file in Path(swapper.swap_folder).iterdir()}
    held = sum(flat.numel() for flat in engine._engine.optimizer.fp32_partitioned_groups_flat)
    return files | {"in memory": held}


def going_on(directory: str, **overrides: Any) -> dict[str, Any]:
    """Train, with steps that are skipped, save, train on; go back and repeat it; and again with a new engine."""
    folder = Path(directory)
    first = engine_of(weights, **overrides)
    untrained = full_weights(first)
    begun = [step(first, 0), step(first, 98, veto=lambda norm: True), step(first, 99, poison=True), step(first, 1)]
    files = save(first, folder)
    staged = first.stage(folder / "later", copy=True)
    saved = full_weights(first)
    swapped = on_disk(first)
    straight, straight_weights = [step(first, number) for number in (2, 3)], full_weights(first)
    if dist.get_rank() == 0:
        (folder / "later").mkdir()
    dist.barrier()
    staged.write()
    dist.barrier()
    first.load(ZeroState(folder / "later"))
    repeated, repeated_weights = [step(first, number) for number in (2, 3)], full_weights(first)
    first.close()
    dist.barrier()  # each rank deletes its own
    left = sum(1 for _ in Path(overrides.get("nvme_path", directory)).rglob("*.swp"))
    dist.barrier()
    second = engine_of(None, **overrides)
    second.load(ZeroState(folder))
    counted = adam_steps(second)
    resumed, resumed_weights = [step(second, number) for number in (2, 3)], full_weights(second)
    second.close()
    return {
        "untrained": untrained,
        "begun": begun,
        "files": files,
        "saved": saved,
        "swapped": swapped,
        "left": left,
        "adam steps": counted,
        "straight": (straight, straight_weights),
        "repeated": (repeated, repeated_weights),
        "resumed": (resumed, resumed_weights),
    }


def run(folder: str) -> dict[str, Any]:
    """The same run with its optimizer's states in host memory and on a disk."""
    return {
        place: going_on(f"{folder}/{place}", offload_optimizer=place, **given)
        for place, given in {"cpu": {}, "nvme": {"nvme_path": folder, "output_dir": f"{folder}/run"}}.items()
    }
