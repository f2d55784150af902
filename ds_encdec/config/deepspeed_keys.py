"""Every key a DeepSpeed JSON may hold, and what becomes of it here.

DeepSpeed itself accepts unknown keys in silence at the top level and in activation_checkpointing,
checkpoint, flops_profiler, aio and data_types (`gradient_cliping` trains unclipped, `zero_optimisation`
unsharded), so the keys are written down. Sources, all of deepspeed 0.19.8: runtime/config.py,
runtime/constants.py, runtime/precision_config.py, runtime/zero/{config,offload_config,leaf_module_config}.py,
runtime/zenflow/zenflow_config.py, runtime/activation_checkpointing/config.py,
runtime/model_checkpointing/constants.py, runtime/swap_tensor/constants.py, profiling/constants.py,
comm/config.py, utils/config.py, monitor/config.py, compile/config.py. A test compares them with the
installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_encdec.config.errors import show, unknown_key


def _block(name: str, **types: type) -> dict[str, type]:
    return {f"{name}.{key}": kind for key, kind in types.items()}


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
    "optimizer.params.torch_adam": "training.torch_adam",
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

PASSED_ON: dict[str, type] = {
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_allgather": bool,
    "disable_python_gc": bool,
    "communication_data_type": str,
    "prescale_gradients": bool,
    "gradient_predivide_factor": float,
    "zero_allow_untested_optimizer": bool,
    "zero_force_ds_cpu_optimizer": bool,
    "log_level": str,
    "vocabulary_size": int,
    "optimizer.legacy_fusion": bool,
    **_block("optimizer.params", bias_correction=bool, foreach=bool, fused=bool),
    **_block("optimizer.params", fp32_optimizer_states=bool),
    **_block("scheduler.params", warmup_min_lr=float, warmup_min_ratio=float),
    **_block("bf16", immediate_grad_update=bool, check_grad_overflow=bool, bf16_master_weights_and_grads=bool),
    **_block("bf16", bf16_optimizer_states=bool),
    **_block("fp16", loss_scale=float, initial_scale_power=int, loss_scale_window=int, hysteresis=int),
    **_block("fp16", consecutive_hysteresis=bool, min_loss_scale=int, auto_cast=bool),
    **_block("fp16", fp16_master_weights_and_grads=bool),
    **_block("torch_autocast", enabled=bool, dtype=str, lower_precision_safe_modules=list),
    **_block("data_types", grad_accum_dtype=str, param_dtype=str, buffer_dtype=str, keep_in_fp32_modules=list),
    **_block("zero_optimization", contiguous_gradients=bool, reduce_scatter=bool, reduce_bucket_size=int),
    **_block("zero_optimization", use_multi_rank_bucket_allreduce=bool, allgather_partitions=bool),
    **_block("zero_optimization", allgather_bucket_size=int, overlap_comm=bool, load_from_fp32_weights=bool),
    **_block("zero_optimization", sub_group_size=int, stage3_prefetch_bucket_size=int),
    **_block("zero_optimization", stage3_param_persistence_threshold=int, stage3_model_persistence_threshold=int),
    **_block("zero_optimization", stage3_max_live_parameters=int, stage3_max_reuse_distance=int),
    **_block("zero_optimization", stage3_gather_16bit_weights_on_model_save=bool),
    **_block("zero_optimization", stage3_module_granularity_threshold=int, stage3_allgather_sequential=bool),
    **_block("zero_optimization", stage3_use_all_reduce_for_fetch_params=bool, ignore_unused_parameters=bool),
    **_block("zero_optimization", round_robin_gradients=bool, parameter_alignment=bool),
    **_block("zero_optimization", zero_hpz_partition_size=int, zero_quantized_weights=bool),
    **_block("zero_optimization", zero_quantized_nontrainable_weights=bool, zero_quantized_gradients=bool),
    **_block("zero_optimization", memory_efficient_linear=bool, pipeline_loading_checkpoint=bool),
    **_block("zero_optimization", override_module_apply=bool, log_trace_cache_warnings=bool),
    **_block("zero_optimization", enable_sanity_checks=bool, save_muon_momentum_buffer_in_memory=bool),
    **_block("zero_optimization.leaf_module", classes=list, names=list, name_suffixes=list),
    **_block("zero_optimization.offload_param", buffer_count=int, buffer_size=int, max_in_cpu=int),
    **_block("zero_optimization.offload_optimizer", buffer_count=int, pipeline_read=bool, pipeline_write=bool),
    **_block("zero_optimization.offload_optimizer", fast_init=bool, super_offload=bool),
    **_block("zero_optimization.offload_optimizer", cpuadam_cores_perc=float),
    **_block("aio", block_size=int, queue_depth=int, intra_op_parallelism=int, single_submit=bool),
    **_block("aio", overlap_events=bool, use_gds=bool),
    **_block("checkpoint", tag_validation=str, checkpoint_serialization=bool),
    **_block("checkpoint.parallel_write", pipeline_stage=bool),
    **_block("comms_logger", enabled=bool, prof_all=bool, prof_ops=list, verbose=bool, debug=bool),
    **_block("flops_profiler", enabled=bool, recompute_fwd_factor=float, profile_step=int, module_depth=int),
    **_block("flops_profiler", top_modules=int, detailed=bool, output_file=str),
    **_block("timers.throughput", enabled=bool, synchronized=bool),
}
"""Keys that go to DeepSpeed unchanged (`infra.deepspeed_extra`), with the type of their value."""

_TRACKERS = "trackers are chosen by training.report_to and the infra.wandb_* fields"
_CHECKPOINTING = "layers are checkpointed by training.activation_checkpointing, with PyTorch's own function"
_COMPILE = "DeepCompile is not used"
_IGNORED_BLOCKS = (
    ("activation_checkpointing", _CHECKPOINTING, "number_checkpoints synchronize_checkpoint_boundary profile"),
    ("tensorboard", _TRACKERS, "enabled output_path job_name"),
    ("wandb", _TRACKERS, "enabled group team project"),
    ("csv_monitor", _TRACKERS, "enabled output_path job_name"),
    ("comet", _TRACKERS, "enabled samples_log_interval project workspace api_key experiment_name experiment_key"),
    ("comet", _TRACKERS, "online mode"),
    ("compile", _COMPILE, "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation"),
    ("compile", _COMPILE, "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log"),
    ("compile", _COMPILE, "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather"),
    ("compile", _COMPILE, "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"),
)

IGNORED = {
    "activation_checkpointing.partition_activations": (
        "DeepSpeed's function for it empties encoder outputs that later decoder layers need"
    ),
    "activation_checkpointing.contiguous_memory_optimization": "it needs partition_activations, which is not used",
    "dataloader_drop_last": "batches are packed by ds_encdec's own loader",
    "seq_parallel_communication_data_type": "sequences are not split over ranks",
    "use_data_before_expert_parallelism": "the model has no experts",
    **{f"{block}.{key}": reason for block, reason, keys in _IGNORED_BLOCKS for key in keys.split()},
}
"""Keys that are accepted and do nothing, each with the reason that the warning gives."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.type": (("AdamW", "Adam", "adamw", "adam"), "other optimizers are not supported"),
    "optimizer.params.amsgrad": ((False,), "checkpoints hold two moments of each weight, and AMSGrad has three"),
    "optimizer.params.adam_w_mode": ((True,), "weight decay is decoupled"),
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
    "zero_optimization.elastic_checkpoint": ((False,), "DeepSpeed no longer has it"),
}
"""Keys that may only have certain values, with the reason."""

_REMOVED = "DeepSpeed 0.19 no longer has this; remove it"
_UNSUPPORTED = "not supported by ds_encdec; remove it"
_REFUSED_KEYS = (
    (_REMOVED, "amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula"),
    (_REMOVED, "progressive_layer_drop quantize_training sparse_attention sparse_gradients"),
    (_REMOVED, "zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather"),
    (_REMOVED, "zero_optimization.zeropp_loco_param"),
    (_UNSUPPORTED, "autotuning data_efficiency datastates_ckpt expert_parallel hybrid_engine pipeline"),
    (_UNSUPPORTED, "sequence_parallel_size tensor_parallel weight_quantization"),
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
    **{key: reason for reason, keys in _REFUSED_KEYS for key in keys.split()},
}
"""Keys that are errors unless switched off, with what to do instead."""

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
    """What is wrong with a known key's value."""
    if path in REFUSED:
        switched_off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
        return None if switched_off else REFUSED[path]
    if path in FIXED:
        allowed, reason = FIXED[path]
        return None if value in allowed else f"only {' or '.join(map(show, allowed))} works here: {reason}"
    kind = PASSED_ON.get(path)
    if kind is None or _has_type(value, kind):
        return None
    return f"must be {_TYPE_NAMES[kind]}"


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind not in (int, float):
        return isinstance(value, kind)
    return isinstance(value, int) or (isinstance(value, float) and (kind is float or value.is_integer()))
