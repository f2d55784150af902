"""Every key a DeepSpeed JSON may hold, and what becomes of it here.

DeepSpeed itself accepts unknown keys in silence at the top level and in activation_checkpointing,
checkpoint, flops_profiler, aio and data_types (`gradient_cliping` trains unclipped, `zero_optimisation`
unsharded), so the keys are written down. Those of blocks that DeepSpeed has a pydantic class for are a snapshot of
these (deepspeed_keys.json, written by scripts/deepspeed_keys.py). The others are here by hand; their sources, all of
deepspeed 0.19.8: runtime/config.py, runtime/constants.py, runtime/activation_checkpointing/config.py,
runtime/model_checkpointing/constants.py, runtime/swap_tensor/constants.py, profiling/constants.py. Tests compare both
with the installed DeepSpeed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_encdec.config.settings import show, unknown_key

_SNAPSHOT: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
_BLOCKS_WITH_CLASS: dict[str, dict[str, str]] = _SNAPSHOT["blocks"]

SCHEMA_FIELDS = {
    "train_micro_batch_size_per_gpu": "training.per_device_train_batch_size",
    "train_batch_size": "data.num_lanes",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.max_grad_norm",
    "bf16.enabled": "training.bf16",
    "fp16.enabled": "training.fp16",
    "optimizer.params.lr": "training.learning_rate",
    "optimizer.params.betas": "training.adam_beta1",
    "optimizer.params.eps": "training.adam_epsilon",
    "optimizer.params.weight_decay": "training.weight_decay",
    "scheduler.type": "training.lr_scheduler_type",
    "scheduler.params.warmup_max_lr": "training.learning_rate",
    "scheduler.params.warmup_num_steps": "training.warmup_steps",
    "scheduler.params.warmup_type": "training.warmup_type",
    "scheduler.params.total_num_steps": "training.num_train_steps",
    "scheduler.params.cos_min_ratio": "training.min_lr_ratio",
    "zero_optimization.stage": "infra.sharding_stage",
    "zero_optimization.offload_optimizer.device": "infra.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "infra.nvme_path",
    "zero_optimization.offload_optimizer.pin_memory": "infra.pin_memory",
    "zero_optimization.offload_param.device": "infra.offload_params",
    "zero_optimization.offload_param.nvme_path": "infra.nvme_path",
    "zero_optimization.offload_param.pin_memory": "infra.pin_memory",
    "activation_checkpointing.cpu_checkpointing": "training.activation_offload",
}
"""Keys that a field of the schema stands for."""

_READ_BY_HAND = {
    "bool": "wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc prescale_gradients "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "optimizer.params.foreach optimizer.params.fused torch_autocast.enabled aio.single_submit aio.overlap_events "
    "aio.use_gds checkpoint.checkpoint_serialization checkpoint.parallel_write.pipeline_stage flops_profiler.enabled "
    "flops_profiler.detailed",
    "int": "steps_per_print vocabulary_size aio.block_size aio.queue_depth aio.intra_op_parallelism "
    "flops_profiler.profile_step flops_profiler.module_depth flops_profiler.top_modules",
    "float": "gradient_predivide_factor scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio "
    "flops_profiler.recompute_fwd_factor",
    "str": "communication_data_type log_level torch_autocast.dtype data_types.grad_accum_dtype data_types.param_dtype "
    "data_types.buffer_dtype checkpoint.tag_validation flops_profiler.output_file",
    "list": "torch_autocast.lower_precision_safe_modules data_types.keep_in_fp32_modules",
}
"""Keys that DeepSpeed looks up by themselves and that go to it unchanged, by the kind of their value."""

_TRACKERS = "trackers are chosen by training.report_to and the infra.wandb_* fields"
_CHECKPOINTING = "layers are checkpointed by training.activation_checkpointing, with PyTorch's own function"
_IGNORED_BLOCKS = {
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _TRACKERS),
    "compile": "DeepCompile is not used",
}

IGNORED = {
    "activation_checkpointing.partition_activations": (
        "DeepSpeed's function for it empties encoder outputs that later decoder layers need"
    ),
    "activation_checkpointing.contiguous_memory_optimization": "it needs partition_activations, which is not used",
    "dataloader_drop_last": "batches are packed by ds_encdec's own loader",
    "seq_parallel_communication_data_type": "sequences are not split over ranks",
    "optimizer.legacy_fusion": "it is for DeepSpeed's own fused Adam",
    "use_data_before_expert_parallelism": "the model has no experts",
    **{
        f"activation_checkpointing.{key}": _CHECKPOINTING
        for key in ("number_checkpoints", "synchronize_checkpoint_boundary", "profile")
    },
    **{f"{block}.{key}": reason for block, reason in _IGNORED_BLOCKS.items() for key in _BLOCKS_WITH_CLASS[block]},
}
"""Keys that are accepted and do nothing, each with the reason that the warning gives."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.type": (("AdamW", "Adam", "adamw", "adam"), "other optimizers are not supported"),
    "optimizer.params.amsgrad": ((False,), "checkpoints hold two moments of each weight, and AMSGrad has three"),
    "optimizer.params.adam_w_mode": ((True,), "weight decay is decoupled"),
    "optimizer.params.torch_adam": (
        (True,),
        "torch's fused AdamW is what steps: it needs no compiler, and resumes to the bit",
    ),
    "optimizer.params.bias_correction": ((True,), "torch's AdamW always corrects"),
    "optimizer.params.fp32_optimizer_states": ((True,), "moments have the dtype of the weights that are stepped"),
    "fp16.fp16_master_weights_and_grads": ((False,), "DeepSpeed has it for its own CPUAdam alone"),
    "scheduler.params.last_batch_iteration": ((-1,), "a resumed run continues by its checkpoint"),
    "gradient_allreduce_op": (("mean",), "the loss is normalised for an average over ranks"),
    "managed_gradient_accumulation": ((True,), "the engine accumulates"),
    "checkpoint.load_universal": ((False,), "checkpoints are loaded with --resume"),
    "checkpoint.use_node_local_storage": ((False,), "a checkpoint is one folder that all nodes share"),
    "checkpoint.writer": ((None,), "checkpoints are committed by ds_encdec, with DeepSpeed's plain writer"),
    "zero_optimization.compute_grad_norm": ((True,), "the gradient norm is reported and clipped"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed no longer has it"),
    "zero_optimization.offload_optimizer.ratio": (
        (1.0,),
        "DeepSpeed's checkpoints lack the Adam moments of what stays on the device; "
        "infra.offload_optimizer=none leaves all there",
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        (False,),
        "its Adam moments are in a process of their own, and DeepSpeed's checkpoints lack them",
    ),
    "zero_optimization.elastic_checkpoint": ((False,), "DeepSpeed no longer has it"),
}
"""Keys that may only have certain values, with the reason."""

_UNSUPPORTED = (
    "autotuning data_efficiency datastates_ckpt expert_parallel hybrid_engine pipeline sequence_parallel_size "
    "tensor_parallel weight_quantization"
)
REFUSED = {
    "bfloat16": "write `bf16`",
    "optimizer.params.max_grad_norm": "write `gradient_clipping`",
    "zero_optimization.zenflow": (
        "not supported by ds_encdec: ZenFlow keeps Adam states that DeepSpeed's checkpoints do not hold; remove it"
    ),
    "zero_optimization.cpu_offload": 'write `"offload_optimizer": {"device": "cpu"}`',
    "zero_optimization.cpu_offload_param": 'write `"offload_param": {"device": "cpu"}`',
    "zero_optimization.cpu_offload_use_pin_memory": "write `pin_memory` in the offload blocks",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "write `stage3_gather_16bit_weights_on_model_save`",
    **dict.fromkeys(_SNAPSHOT["removed"], "DeepSpeed 0.19 no longer has this; remove it"),
    **dict.fromkeys(_UNSUPPORTED.split(), "not supported by ds_encdec; remove it"),
}
"""Keys that are errors unless switched off, with what to do instead."""

_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "list": list}
_WITH_CLASS = {f"{block}.{key}": kind for block, keys in _BLOCKS_WITH_CLASS.items() for key, kind in keys.items()}
_DECIDED = {*SCHEMA_FIELDS, *IGNORED, *FIXED, *REFUSED}
PASSED_ON = {key: _TYPES[kind] for kind, keys in _READ_BY_HAND.items() for key in keys.split()}
PASSED_ON |= {key: _TYPES[kind] for key, kind in _WITH_CLASS.items() if key not in _DECIDED}
"""Keys that go to DeepSpeed unchanged (`infra.deepspeed_extra`), with the type of their value."""

KEYS = frozenset([*SCHEMA_FIELDS, *PASSED_ON, *IGNORED, *FIXED, *REFUSED])
"""Every known key, dotted."""
_BLOCKS = frozenset(key[:end] for key in KEYS for end in range(len(key)) if key[end] == ".")

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "a list"}


def check_keys(block: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, str | None]]:
    """Every entry of a DeepSpeed configuration: its dotted key, its value, and what is wrong with it, if anything.

    Values of `SCHEMA_FIELDS` are left to the schema. `None` and "auto" are never wrong.
    """
    for key, value in block.items():
        here = f"{path}.{key}" if path else key
        known = "." not in key and (here in KEYS or here in _BLOCKS)
        if known and here in _BLOCKS and isinstance(value, dict):
            yield from check_keys(value, here)
        elif not known:
            yield here, value, _unknown(key, path)
        elif value is None or value == "auto":
            yield here, None, None
        elif here in _BLOCKS:
            yield here, value, "must be a block, { ... }"
        else:
            yield here, value, _wrong(here, value)


def check_extra(extra: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The entries of `infra.deepspeed_extra` that may not stand there: dotted key, and why."""
    for path, _, message in check_keys(extra):
        if message is not None:
            yield path, message
        elif path in SCHEMA_FIELDS:
            yield path, f"set `{SCHEMA_FIELDS[path]}` instead"
        elif path in IGNORED:
            yield path, f"does nothing here: {IGNORED[path]}"


def _unknown(key: str, path: str) -> str:
    siblings = {
        known[len(path) :].lstrip(".").split(".")[0] for known in KEYS if not path or known.startswith(path + ".")
    }
    elsewhere = sorted(known for known in KEYS | _BLOCKS if known.rpartition(".")[2] == key)
    message = unknown_key(key, siblings - REFUSED.keys(), elsewhere[:1])
    return message + " (DeepSpeed would ignore it silently)" if not path else message


def _wrong(path: str, value: Any) -> str | None:
    """Return what is wrong with a known key's value."""
    if path in REFUSED:
        switched_off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
        return None if switched_off else REFUSED[path]
    if path in FIXED:
        allowed, reason = FIXED[path]
        return None if value in allowed else f"only {' or '.join(map(show, allowed))} works here: {reason}"
    kind = PASSED_ON.get(path, object)
    fits = isinstance(value, kind)
    if kind in (int, float) and not isinstance(value, bool):
        fits = isinstance(value, int) or (isinstance(value, float) and (kind is float or value.is_integer()))
    return None if fits else f"must be {_TYPE_NAMES[kind]}"
