"""Describe a run in a few lines before its first step: the model, the engine, the amount of work, and its memory."""

from __future__ import annotations

from pathlib import Path

from ds_encdec.base.quantities import count, gib
from ds_encdec.engine.select import attention_kernel
from ds_encdec.launch.host import triton_lacks
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.job import Job
from ds_encdec.memory.library import device_capacity
from ds_encdec.memory.variants import HEADROOM, as_overrides, faster
from ds_encdec.model.parameter_count import trained_summary


def start_banner(
    job: Job, context: RunContext, expected: ExpectedMemory | None, *, start_step: int, epochs: float | None
) -> list[str]:
    """Return aligned lines about a run that begins after `start_step`; `epochs` is None if steps were configured."""
    config, world = job.config, context.world
    infra, training, steps = config.infra, config.training, config.training.num_train_steps
    lanes = job.gradient_accumulation_steps * world.world_size
    sequences, tokens = training.micro_batch_size * lanes, (job.encoder_tokens + job.decoder_tokens) * lanes
    epochs_text = f" ({epochs:g} epochs)" if epochs is not None else ""
    trained = trained_summary(job.trainable_parameters, job.parameters)
    trained = "all trained" if job.trainable_parameters == job.parameters else trained
    offloaded = {"optimizer": infra.offload_optimizer, "parameters": infra.offload_params}
    settings = [
        context.engine_spec.title,
        infra.sharding_stage,
        *(f"{name} offloaded to {place}" for name, place in offloaded.items() if place != "none"),
        "bf16" if training.bf16 else "fp16" if training.fp16 else "float32",
        f"recompute {training.activation_checkpointing}",
        *([] if training.optimizer == "adamw" else [training.optimizer]),
        *(["compiled layers"] if training.torch_compile is True else []),
    ]
    parts = {
        "model": f"{config.model.model_name_or_path or 'from scratch'}: {job.parameters:,} parameters, {trained}",
        "engine": ", ".join(settings),
        "ranks": f"{world.world_size} on {count(world.num_nodes, 'node')}, {context.device.type}"
        + (f" (the configuration was planned for {infra.num_gpus})" if infra.num_gpus != world.world_size else ""),
        "attention": attention_kernel(config, context.device, job.sizes.head_dim)[0],
        "a step": f"{count(sequences, 'sequence')} in {count(lanes, 'micro-batch')}, {tokens:,} tokens with padding",
        "the run": f"steps {start_step:,} to {steps:,}{epochs_text}, {tokens * (steps - start_step):,} tokens, "
        f"into {Path(infra.output_dir).absolute()}",
        "memory": str(expected) if expected is not None else "not estimated",
    }
    if context.device.type == "cuda":
        if lacks := triton_lacks():
            parts["slower"] = "; ".join(lacks)
        limit = device_capacity(context.device).total_bytes * (1 - HEADROOM)
        if row := faster(job, lambda row: row.estimate.peak.total <= limit):
            needs = f"{gib(row.estimate.peak.total)} per GPU"
            parts["faster"] = f"{as_overrides(row.overrides)} fits by the estimate, in {needs}"
    width = max(map(len, parts))
    return [f"{label:{width}}  {text}" for label, text in parts.items()]
