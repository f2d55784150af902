"""A part that looks for frozen parameters which ZeRO-3 leaves gathered: layers that are recomputed gather them again.

Gathered for good, they take the memory that sharding saves, and no loss shows it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from kit import QWEN, SHORT, TINY, Kit, make_engine, run_config, web_like_batches
from torch import nn

from ds_encdec.launch.process_group import shutdown
from ds_encdec.launch.world import free_port

STEPS, ACCUMULATION, LAYERS = 3, 2, 4
"""DeepSpeed traces the first step, and releases in later ones by what it has traced."""


def frozen(kit: Kit) -> None:
    """Steps of adapters under ZeRO-3 with recomputed layers: on one rank, and on two where there are two GPUs.

    Without peft the layers' matrices are frozen instead, which are gathered and released in the same way.
    """
    if kit.dry_run or torch.cuda.device_count() > 1:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, __file__, str(kit.folder), str(kit.shared), *["--dry-run"] * kit.dry_run]
        environments = [os.environ | place | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        processes = [subprocess.Popen(command, env=environment) for environment in environments]
        if any(codes := [process.wait() for process in processes]):
            raise RuntimeError(f"the ranks ended with exit codes {codes}")
    else:
        kit.omit("two ranks", "there is one GPU")
    train(kit, "one rank")


def train(kit: Kit, name: str) -> None:
    """Keep a row: how many frozen parameters are sharded, and which of them are whole after a pass or a step."""
    rank = int(os.environ.get("RANK", "0"))
    sizes = {**(TINY if kit.dry_run else QWEN), "num_hidden_layers": LAYERS}
    small = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if kit.dry_run else {}
    has_peft = importlib.util.find_spec("peft") is not None
    config = run_config(
        kit,
        sizes,
        model={"lora": {"r": 8} if has_peft else None},
        data=SHORT,
        training={
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            "activation_checkpointing": "full",
            "freeze": [] if has_peft else ["*_proj.weight"],
            "torch_compile": False,
        },
        infra={
            "distributed_type": "deepspeed",
            "sharding_stage": "zero3",
            "offload_optimizer": "none",
            "deepspeed_extra": small,
            "output_dir": str(kit.folder / f"frozen-{rank}"),
        },
    )
    batches, _ = web_like_batches(config, sizes["vocab_size"], ACCUMULATION)
    engine, _ = make_engine(kit, config, ACCUMULATION)
    left: dict[str, str] = {}
    target_tokens = sum(batch.target_tokens for batch in batches) * int(os.environ.get("WORLD_SIZE", "1"))
    for step in range(STEPS):
        for number, batch in zip(range(ACCUMULATION), cycle(batches), strict=False):
            loss = next(engine.losses([batch]))
            engine.backward(loss, num_losses=target_tokens, last=number == ACCUMULATION - 1)
            left = gathered(engine.model, f"backward pass {number + 1} of step {step + 1}") | left
        engine.step()
        left = gathered(engine.model, f"step {step + 1}") | left
    sharded = [parameter for parameter in engine.model.parameters() if is_frozen_shard(parameter)]
    shown = {"left": dict(list(left.items())[:20]), "one": next(map(" is ".join, left.items()), "none")}
    kit.row(f"{name}, rank {rank}", ok=bool(sharded) and not left, sharded=len(sharded), gathered=len(left), **shown)
    engine.close()
    shutdown()


def is_frozen_shard(parameter: Any) -> bool:
    """Return whether nobody trains `parameter` and DeepSpeed keeps a shard of it alone: small ones stay whole."""
    return not parameter.requires_grad and not parameter.ds_persist


def gathered(model: nn.Module, moment: str) -> dict[str, str]:
    """The frozen parameters that should be shards and are not, each with its status and the moment it was seen."""
    named: dict[str, Any] = dict(model.named_parameters())
    return {
        name: f"{parameter.ds_status.name} after {moment}"
        for name, parameter in named.items()
        if is_frozen_shard(parameter) and parameter.ds_status.name != "NOT_AVAILABLE"
    }


if __name__ == "__main__":
    train(Kit("--dry-run" in sys.argv, Path(sys.argv[1]), Path(sys.argv[2])), "two ranks")
