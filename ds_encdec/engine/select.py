"""Which engine runs: the one place that knows there is more than one."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.ds_json import accumulates_in_bf16, render_deepspeed_json
from ds_encdec.engine.layout import check_layout, layout_of
from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.world import World
from ds_encdec.types import ConfigError, WeightSource

if TYPE_CHECKING:
    import torch

    from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

logger = logging.getLogger(__name__)


def create_engine(
    config: FullConfig,
    world: World,
    device: torch.device,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource | None,
    gradient_accumulation_steps: int,
) -> Engine:
    """Build the model and its engine. Collective; the process group exists (launch/process_group.py).

    `weights` is asked on rank 0 only; None for a run that loads a checkpoint at once, and so needs none. Raises
    ConfigError as `check_engine` does, and CheckpointError, on every rank, for weights that cannot be read.
    """
    check_engine(config)
    from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine  # takes seconds, and only this engine needs it

    ds_json = render_deepspeed_json(
        config,
        world_size=world.world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        device=device.type,
        ranks_per_node=world.local_world_size,
    )
    if world.is_main and accumulates_in_bf16(ds_json):
        logger.warning(
            "%s adds the gradients of %d micro-batches up in bfloat16, which costs precision (with 8: 0.3 %%); "
            "infra.sharding_stage=zero2 and zero3 use float32.",
            config.infra.sharding_stage,
            gradient_accumulation_steps,
        )
    return DeepSpeedEngine(config, model_config, weights, ds_json, device)


def check_checkpoint(config: FullConfig, world: World, directory: Path) -> None:
    """Raise CheckpointError where this run's engine could not load the checkpoint `directory`; imports none.

    Compares what the files are bound to (stage, dtype, number of ranks); does not read them.
    """
    check_layout(directory, layout_of(config, world.world_size))


def check_engine(config: FullConfig) -> None:
    """Raise ConfigError where `infra.distributed_type` names an engine that is not there; imports none."""
    kind = config.infra.distributed_type
    if kind not in ("deepspeed", "auto"):
        raise ConfigError(f"infra.distributed_type={kind}: this engine is not available yet; use deepspeed")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"infra.distributed_type={kind}: deepspeed is not installed (pip install deepspeed)")
