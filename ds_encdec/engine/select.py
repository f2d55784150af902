"""Which engine runs: the one place that knows there is more than one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.world import World
from ds_encdec.types import ConfigError, WeightSource

if TYPE_CHECKING:
    import torch

    from ds_encdec.model.configuration import Qwen3Seq2SeqConfig


def create_engine(
    config: FullConfig,
    world: World,
    device: torch.device,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource,
    gradient_accumulation_steps: int,
) -> Engine:
    """Build the model and its engine. Collective; the process group exists (launch/process_group.py).

    `weights` is asked on rank 0 only. Raises ConfigError as `check_engine` does.
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
    return DeepSpeedEngine(config, model_config, weights, ds_json, device)


def check_engine(config: FullConfig) -> None:
    """Raise ConfigError where `infra.distributed_type` names an engine that is not there; imports none."""
    kind = config.infra.distributed_type
    if kind not in ("deepspeed", "auto"):
        raise ConfigError(f"infra.distributed_type={kind}: this engine is not available yet; use deepspeed")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"infra.distributed_type={kind}: deepspeed is not installed (pip install deepspeed)")
