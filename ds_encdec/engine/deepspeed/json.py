"""The JSON for `deepspeed.initialize`, rendered from the schema without torch and deepspeed.

DeepSpeed ignores some settings in silence: the configuration's rules check every key, nothing that matters here is left
to its defaults, and no "auto" remains."""

from __future__ import annotations

import hashlib
import os
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ds_encdec.base.types import ConfigError
from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.config.shares import replicas, with_micro_batch_size
from ds_encdec.launch.world import World
from ds_encdec.registry.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    import torch


def render_deepspeed_json(
    config: FullConfig,
    *,
    world_size: int,
    gradient_accumulation_steps: int,
    device: str,
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """Return the complete DeepSpeed configuration of a run, whose batch sizes count packed sequences.

    `gradient_accumulation_steps`: micro-batches of this rank in one optimizer step. `device`: "cpu" or an accelerator's
    name. `ranks_per_node` (None: all ranks are on one node): the size of zero3_hybrid's secondary partition (hpZ,
    ZeRO++, arXiv 2306.10209) unless `infra.hybrid_shard_size` names one. Raises ConfigError for a JSON file that has
    not been read, and for ranks that do not divide into hpZ partitions."""
    if config.infra.deepspeed_config is not None:
        raise ConfigError("infra.deepspeed_config has not been read. Use load_config or FullConfig.from_yaml")
    training = config.training
    rendered: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "train_batch_size": training.micro_batch_size * gradient_accumulation_steps * world_size,
        "gradient_clipping": training.max_grad_norm,
        "bf16": {"enabled": training.bf16},
        "fp16": {"enabled": training.fp16},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": training.learning_rate,
                "betas": [training.adam_beta1, training.adam_beta2],
                "eps": training.adam_epsilon,
                "weight_decay": training.weight_decay,  # parameter groups have their own, see sharded_engine.py
            },
        },
        "zero_optimization": _zero(config, device, ranks_per_node or world_size),
        # On by default, and waits for the device in every forward pass; nothing reads it.
        "timers": {"throughput": {"enabled": False}},
    }
    if training.bf16 and rendered["zero_optimization"]["stage"] >= 2:
        # DeepSpeed would accumulate in bfloat16, where 8 micro-batches already cost 0.3 % of the gradient (measured).
        # Not below: stage 0 refuses, and stage 1 takes an optimizer whose checkpoints zero_to_fp32.py cannot read.
        rendered["data_types"] = {"grad_accum_dtype": "fp32"}
    if training.lr_scheduler_type in NATIVE_SCHEDULES:
        rendered["scheduler"] = _scheduler(training)
    rendered = _merge(rendered, config.infra.deepspeed_extra)
    _set_optimizer(rendered, training)
    zero = rendered["zero_optimization"]
    # bfloat16 gradients are summed over ranks in float32, as over micro-batches. On one rank only stage 1 needs it,
    # which sums accumulated gradients. ZeRO++'s quantized sums take 16 bits alone.
    is_summed = world_size > 1 or zero["stage"] == 1
    if _accumulates_in(rendered, "float32") and is_summed and not zero.get("zero_quantized_gradients", False):
        rendered.setdefault("communication_data_type", "fp32")
    size = zero.get("zero_hpz_partition_size", 1)
    replicas(
        world_size,
        size,
        f"zero3_hybrid: partitions of {size} ranks (infra.hybrid_shard_size or zero_hpz_partition_size)",
    )
    return rendered


def _set_optimizer(rendered: dict[str, Any], training: TrainingConfig) -> None:
    if training.optimizer not in OPTIMIZERS:  # DeepSpeed gets it, and by default refuses one that it does not know
        del rendered["optimizer"]
        rendered |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return
    adam = rendered["optimizer"]["params"]
    adam["torch_adam"] = True
    adam.pop("bias_correction", None)  # torch has no such argument, and always corrects
    if not adam.keys() & {"fused", "foreach"}:
        adam["fused"] = True  # torch's own choice is a loop over single operations


def run_json(
    config: FullConfig, world: World, device: torch.device, gradient_accumulation_steps: int
) -> dict[str, Any]:
    """Return the complete DeepSpeed configuration of a run on these ranks, which is also its ds_config.json."""
    return render_deepspeed_json(
        config,
        world_size=world.world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        device=device.type,
        ranks_per_node=world.local_world_size,
    )


def check_deepspeed(config: FullConfig, world: World, device: torch.device) -> None:
    """Raise ConfigError for settings that DeepSpeed would refuse on these ranks, whatever the batch."""
    disk = config.infra.nvme_path or ""
    if config.infra.offload_optimizer == "nvme" and not os.path.isdir(os.path.expanduser(disk)):
        raise ConfigError(f"infra.nvme_path: {disk!r} is not a folder on this machine. Make it, or name another")
    if config.training.fp16 and device.type == "cpu":  # infra.device=auto; rules.py sees the other cases
        raise ConfigError("training.fp16=true needs an accelerator: DeepSpeed has no float16 on CPUs. Use bf16.")
    run_json(with_micro_batch_size(config, 1, world.world_size), world, device, 1)


def accumulates_in_bf16(rendered: dict[str, Any]) -> bool:
    """Return whether a run of this JSON adds several micro-batches' gradients in bfloat16."""
    return rendered["gradient_accumulation_steps"] > 1 and _accumulates_in(rendered, "bfloat16")


def _accumulates_in(rendered: dict[str, Any], dtype: str) -> bool:
    in_float32 = rendered.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")
    return bool(rendered["bf16"]["enabled"]) and in_float32 == (dtype == "float32")


def _scheduler(training: TrainingConfig) -> dict[str, Any]:
    params: dict[str, Any] = {
        "warmup_num_steps": training.warmup_steps,
        "warmup_type": training.warmup_type,  # DeepSpeed's default is a logarithmic warm-up
    }
    if training.lr_scheduler_type == "WarmupCosineLR":  # scales the optimizer's rate
        params |= {"warmup_min_ratio": 0.0, "cos_min_ratio": training.min_lr_ratio}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": training.learning_rate}
    if training.lr_scheduler_type != "WarmupLR":  # which has no end
        params["total_num_steps"] = training.num_train_steps
    return {"type": training.lr_scheduler_type, "params": params}


def _zero(config: FullConfig, device: str, ranks_per_node: int) -> dict[str, Any]:
    infra = config.infra
    stage = int(infra.sharding_stage.removeprefix("zero").removesuffix("_hybrid"))
    if stage == 0:
        return {"stage": 0}
    # Elements of the buffers for gradients and parameters. DeepSpeed's default of 5e8 takes 1 GB of each rank in bf16
    # (twice with overlap); beyond 5e7 the collectives gain nothing.
    bucket = 5_000_000 if device == "cpu" else 50_000_000
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": device != "cpu",  # a CPU has no streams to overlap on, and overlap doubles the buffers
        "reduce_bucket_size": bucket,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            # Elements that stay gathered after use, and the distance to the next use below which they do: DeepSpeed's
            # own, 2 GB in bf16. A 1 B model is then gathered once a step, which is faster.
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            # Smaller parameters stay whole on every rank: norms, whose gathering costs more than it saves.
            "stage3_param_persistence_threshold": 100_000,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
        if config.model.lora is None and not config.training.freeze:
            # The parameters of each layer are gathered at once and with one set of hooks, which halves the host time
            # of hooks (BENCHMARKS.md, Host time). Only if all is trained: see `engine_rules`.
            zero["leaf_module"] = {"classes": ["Qwen3EncoderLayer", "Qwen3DecoderLayer"]}
            # DeepSpeed's linear layers, slower than torch's, keep no gathered weights for the backward pass. A layer
            # that is recomputed keeps some only inside its own backward pass, while it is gathered.
            zero["memory_efficient_linear"] = config.training.activation_checkpointing != "full"
    else:
        zero["allgather_bucket_size"] = bucket
    if infra.sharding_stage == "zero3_hybrid":
        zero["zero_hpz_partition_size"] = infra.hybrid_shard_size or ranks_per_node
    for name, place in (("offload_optimizer", infra.offload_optimizer), ("offload_param", infra.offload_params)):
        if place != "none":
            zero[name] = {"device": place, "pin_memory": infra.pin_memory and device != "cpu"}
    if infra.offload_optimizer == "nvme":
        # Two runs may swap to one disk; DeepSpeed names files by rank alone.
        of_run = hashlib.sha256(os.path.abspath(infra.output_dir).encode()).hexdigest()[:16]
        zero["offload_optimizer"] |= {
            "nvme_path": os.path.join(os.path.expanduser(infra.nvme_path or ""), f"ds_encdec-{of_run}"),
            "buffer_count": 4,  # of the largest sub-group's size: weights, gradients and both moments
        }
        # Elements that are read, stepped and written at a time: reads of 100 MB are as fast as the disk allows, and a
        # rank holds four such buffers in host memory.
        zero["sub_group_size"] = 25_000_000
    return zero


def _merge(rendered: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return rendered | {
        key: _merge(rendered[key], value)
        if isinstance(value, dict) and isinstance(rendered.get(key), dict)
        else deepcopy(value)
        for key, value in extra.items()
    }
