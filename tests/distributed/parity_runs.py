"""Long runs of every engine on the same lanes, and of the oracle: the rows of docs/parity.md and their test.

A step is four micro-batches over all ranks, whatever their number, so one oracle run stands for all.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_run import LORA, MODEL, lane_batches, run_config, train_on, weights
from torch_oracle import TorchOracle

from ds_encdec.base.types import Batch
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover

LANES = 4
STEPS = 50

ENGINES: dict[str, dict[str, Any]] = {
    "DeepSpeed ZeRO-0": {"sharding_stage": "zero0"},
    "DeepSpeed ZeRO-1": {"sharding_stage": "zero1"},
    "DeepSpeed ZeRO-1, optimizer offload": {"sharding_stage": "zero1", "offload_optimizer": "cpu"},
    "DeepSpeed ZeRO-2": {"sharding_stage": "zero2"},
    "DeepSpeed ZeRO-2, optimizer offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu"},
    "DeepSpeed ZeRO-3": {"sharding_stage": "zero3"},
    "DeepSpeed ZeRO-3, optimizer offload": {"sharding_stage": "zero3", "offload_optimizer": "cpu"},
    "DDP": {"distributed_type": "ddp", "sharding_stage": "zero0"},
    "FSDP2 zero2": {"distributed_type": "fsdp", "sharding_stage": "zero2"},
    "FSDP2 zero3": {"distributed_type": "fsdp", "sharding_stage": "zero3"},
    "FSDP2 zero3, CPU offload": {"distributed_type": "fsdp", "sharding_stage": "zero3", "offload_optimizer": "cpu"},
    "FSDP2 zero2_hybrid": {"distributed_type": "fsdp", "sharding_stage": "zero2_hybrid"},
    "FSDP2 zero3_hybrid": {"distributed_type": "fsdp", "sharding_stage": "zero3_hybrid"},
}
"""Engines by the name they have in the table, as settings of `infra`."""

SETTINGS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "num_train_steps": STEPS,
    "warmup_steps": 5,
    "lr_scheduler_type": "WarmupDecayLR",
}


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "LoRA, float32": {"lora": LORA["lora"]},
    "Muon, float32": {"optimizer": "muon"},
    "bf16": {"bf16": True},
}
"""What is trained, as further settings: columns of the table. The oracle has those of float32."""


def engines_of(kind: str) -> list[str]:
    """The engines that have a figure in the column: Muon is torch's, and not DeepSpeed's."""
    return [name for name, infra in ENGINES.items() if "optimizer" not in KINDS[kind] or "distributed_type" in infra]


def settings(engine: str, world_size: int, **kind: Any) -> dict[str, Any]:
    """The fields that `small_run.run_config` is given for a row of the table."""
    hybrid = {"hybrid_shard_size": max(1, world_size // 2)} if "hybrid" in engine else {}
    return {**SETTINGS, "gradient_accumulation_steps": LANES // world_size, **ENGINES[engine], **hybrid, **kind}


def step_lanes(step: int) -> list[Batch]:
    """The micro-batches of one optimizer step, in lane order."""
    return lane_batches(step, 1, LANES, empty=(3, 1))


def oracle_losses(**kind: Any) -> list[float]:
    """Loss per target token of every step, from plain torch in one process, float32; adapters are peft's."""
    kind = {"distributed_type": "fsdp", **kind, "bf16": False}  # Muon is not every engine's
    config = run_config(**SETTINGS, **kind)
    return _train(TorchOracle(config, MODEL, weights), 0, 1, sum_over_ranks=lambda total: total)


def engine_losses(names: list[str], **kind: Any) -> dict[str, list[float]]:
    """The same from each engine in `names`, on the ranks this runs on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names:
        config = run_config(**settings(name, world_size, **kind))
        accumulation = config.training.gradient_accumulation_steps
        context = RunContext(discover(os.environ), torch.device("cpu"), resolve_engine(config), HostCollectives())
        engine = create_engine(config, context, MODEL, weights, accumulation)
        found[name] = _train(engine, rank, world_size, sum_over_ranks=_sum_over_ranks)
        engine.close()
    return found


def _train(engine: Any, rank: int, world_size: int, sum_over_ranks: Callable[[float], float]) -> list[float]:
    losses = []
    for step in range(STEPS):
        lanes = step_lanes(step)
        target_tokens = sum(batch.target_tokens for batch in lanes)
        total, result = train_on(engine, lanes[rank::world_size], target_tokens)
        assert result.applied
        losses.append(sum_over_ranks(total) / target_tokens)
    return losses


def _sum_over_ranks(total: float) -> float:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, total)
    return sum(gathered)
