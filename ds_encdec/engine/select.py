"""Which engine runs: the one place that knows there is more than one."""

from __future__ import annotations

import importlib.util
import logging
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_encdec.config.batch_size import with_micro_batch_size
from ds_encdec.config.rules import engine_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.ds_json import accumulates_in_bf16, render_deepspeed_json
from ds_encdec.engine.protocol import Engine
from ds_encdec.engines import EngineName
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import World
from ds_encdec.types import ConfigError, WeightSource

if TYPE_CHECKING:
    import torch

    from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

logger = logging.getLogger(__name__)


def resolve_engine(config: FullConfig) -> EngineName:
    """The engine that `infra.distributed_type` means on this machine, as far as can be told without importing one.

    `auto` is DeepSpeed where it is installed and can do what is asked, else FSDP2. Raises ConfigError where DeepSpeed
    is needed and not installed.
    """
    kind = config.infra.distributed_type
    if kind in ("fsdp", "ddp") or (kind == "auto" and engine_conflicts(config, "deepspeed")):
        return "fsdp"
    if importlib.util.find_spec("deepspeed") is not None:
        return "deepspeed"
    if kind == "deepspeed":
        raise ConfigError(
            "infra.distributed_type=deepspeed, but deepspeed is not installed: pip install deepspeed, or set "
            "infra.distributed_type=fsdp (or auto), which trains the same with torch alone"
        )
    if conflicts := engine_conflicts(config, "fsdp"):
        fields = "; ".join(f"{', '.join(conflict.fields)}: {conflict.message}" for conflict in conflicts)
        raise ConfigError(
            f"infra.distributed_type=auto: deepspeed is not installed, and FSDP2 cannot do this ({fields})"
        )
    return "fsdp"


def fallback_engine(config: FullConfig) -> EngineName | None:
    """What takes the place of a DeepSpeed that turns out not to work here: FSDP2, if `auto` leaves the choice to us."""
    replaceable = config.infra.distributed_type == "auto" and not engine_conflicts(config, "fsdp")
    return "fsdp" if replaceable else None


def check_engine(engine: EngineName, config: FullConfig, world: World) -> None:
    """Raise ConfigError for what `engine` cannot do on these ranks: before any time is spent on data."""
    if engine == "fsdp":
        from ds_encdec.engine.fsdp_sharding import mesh_shape  # half a second, and only this engine needs it

        mesh_shape(config.infra, world)
    else:
        # Neither the device nor the batch decides what is refused.
        sized = with_micro_batch_size(config, 1, world.world_size)
        _deepspeed_json(sized, world, config.infra.device, 1)


def create_engine(
    engine: EngineName,
    config: FullConfig,
    world: World,
    device: torch.device,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource | None,
    gradient_accumulation_steps: int,
) -> Engine:
    """Build the model and `engine` for it. Collective; the process group exists (launch/process_group.py).

    `weights` is None for a run that loads a checkpoint at once, and so needs none. Raises ConfigError for a number of
    ranks that does not fit the sharding, and CheckpointError, on every rank, for weights that cannot be read.
    """
    if world.is_main:
        _say_attention(config, device)
    if config.infra.sharding_stage.endswith("_hybrid"):
        _warn_of_shards_across_nodes(config, world)
    if engine == "fsdp":
        return _fsdp2(config, world, device, model_config, weights)
    return _deepspeed(config, world, device, model_config, weights, gradient_accumulation_steps)


def _say_attention(config: FullConfig, device: torch.device) -> None:
    """What attention runs in. On a GPU one call per document is many times slower, and nobody would know why."""
    from ds_encdec.engine.forward import compute_dtype  # both need torch
    from ds_encdec.model.attention import choose_kernel

    kernel, name = choose_kernel(device, compute_dtype(config.training))
    if not config.model.use_flash_attention:
        logger.info("attention: one call per document (model.use_flash_attention=false)")
    elif kernel is not None:
        logger.info("attention: %s", name)
    else:
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(level, "attention: one call per document (%s)", name)


def _warn_of_shards_across_nodes(config: FullConfig, world: World) -> None:
    """Hybrids shard over consecutive ranks, taken to be neighbours. Collective."""
    size = config.infra.hybrid_shard_size or world.local_world_size
    collectives = HostCollectives(timedelta(minutes=config.infra.distributed_timeout_minutes))
    hosts = collectives.gather(socket.gethostname())
    if world.is_main and (ranks := first_scattered(hosts, size)):
        logger.warning(
            "infra.sharding_stage=%s shards over ranks %d to %d, which are on different nodes (%s), although %d ranks "
            "of one node could: place ranks node by node (Slurm: --distribution=block).",
            config.infra.sharding_stage,
            ranks[0],
            ranks[-1],
            ", ".join(dict.fromkeys(hosts[rank] for rank in ranks)),
            size,
        )


def first_scattered(hosts: Sequence[str], size: int) -> range | None:
    """The first `size` consecutive ranks that shard together on several of the `hosts` (of each rank).

    None where there are none, and where no host has as many ranks: then it is meant so.
    """
    if size > max(hosts.count(host) for host in set(hosts)):
        return None
    groups = (range(start, start + size) for start in range(0, len(hosts), size))
    return next((ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1), None)


def _fsdp2(
    config: FullConfig,
    world: World,
    device: torch.device,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource | None,
) -> Engine:
    from ds_encdec.engine.fsdp2 import FSDP2Engine

    if world.is_main and config.infra.distributed_type == "auto":
        logger.warning("infra.distributed_type=auto: %s; training with FSDP2.", _why_not_deepspeed(config))
    if world.is_main and config.infra.deepspeed_extra:
        logger.warning("infra.deepspeed_extra does nothing under FSDP2: %s", ", ".join(config.infra.deepspeed_extra))
    return FSDP2Engine(config, world, device, model_config, weights)


def _why_not_deepspeed(config: FullConfig) -> str:
    if lacks := [conflict.fields[0] for conflict in engine_conflicts(config, "deepspeed")]:
        return f"DeepSpeed does not do what {', '.join(lacks)} asks for"
    is_installed = importlib.util.find_spec("deepspeed") is not None
    return "deepspeed cannot be imported" if is_installed else "deepspeed is not installed"


def _deepspeed(
    config: FullConfig,
    world: World,
    device: torch.device,
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource | None,
    gradient_accumulation_steps: int,
) -> Engine:
    from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine  # takes seconds, and only this engine needs it

    ds_json = _deepspeed_json(config, world, device.type, gradient_accumulation_steps)
    if world.is_main and accumulates_in_bf16(ds_json):
        logger.warning(
            "%s adds the gradients of %d micro-batches up in bfloat16, which costs precision (with 8: 0.3 %%); "
            "infra.sharding_stage=zero2 and zero3 use float32.",
            config.infra.sharding_stage,
            gradient_accumulation_steps,
        )
    return DeepSpeedEngine(config, model_config, weights, ds_json, device)


def _deepspeed_json(config: FullConfig, world: World, device: str, gradient_accumulation_steps: int) -> dict[str, Any]:
    return render_deepspeed_json(
        config,
        world_size=world.world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        device=device,
        ranks_per_node=world.local_world_size,
    )
