"""Describe a run: in a few lines before its first step, and in its files beside the engine's, which are its
configuration, its records, and the rest of a checkpoint."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_encdec.base.quantities import count, gib
from ds_encdec.base.types import Batch, TrainingState
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import MAKE_ROOM
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import TrainingData
from ds_encdec.engine.deepspeed.json import run_json
from ds_encdec.engine.select import attention_kernel
from ds_encdec.exports.adapters import BASE_RECORD, TEACHER_RECORD
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.launch.host import triton_lacks
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import World
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.gpus import peak_flops
from ds_encdec.memory.job import Job
from ds_encdec.memory.library import device_capacity
from ds_encdec.memory.variants import HEADROOM, as_overrides, faster
from ds_encdec.model.parameter_count import trained_share, trained_summary, training_flops
from ds_encdec.monitor.metrics_file import EventLog, read_step_lines
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import open_sinks
from ds_encdec.registry.engines import ByEngine
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.training.run_model import RunModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """The facts of a run before its data and engine are built; its `config` has a numeric batch size by now.
    `checkpoint`: the one to resume from. `commits`: see `resolve_commits`. `epochs`: the configured ones; `config` has
    their steps once they are known."""

    config: FullConfig
    context: RunContext
    folder: RunFolder
    checkpoint: Checkpoint | None
    model: RunModel
    commits: Mapping[str, str]
    num_lanes: int
    accumulation: int
    epochs: float | None


def start_banner(
    job: Job, context: RunContext, expected: ExpectedMemory | None, *, start_step: int, epochs: float | None
) -> list[str]:
    """Return aligned lines about a run that begins after `start_step`; `epochs` is None if steps were configured."""
    config, world = job.config, context.world
    infra, training, steps = config.infra, config.training, config.training.num_train_steps
    lanes = job.gradient_accumulation_steps * world.world_size
    sequences, tokens = training.micro_batch_size * lanes, (job.encoder_tokens + job.decoder_tokens) * lanes
    epochs_text = f" ({epochs:g} epochs)" if epochs is not None else ""
    all_trained = job.trainable_parameters == job.parameters
    trained = "all trained" if all_trained else trained_summary(job.trainable_parameters, job.parameters)
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
            needs = gib(row.estimate.peak.total)
            parts["faster"] = f"{as_overrides(row.overrides)} fits by the estimate, in {needs} per GPU"
    width = max(map(len, parts))
    return [f"{label:{width}}  {text}" for label, text in parts.items()]


def begin_recording(run: Run, state: TrainingState, expected: ExpectedMemory | None) -> Recorder:
    """Write the run's configuration and the event of this start, and return the recorder, with the checkpoint's windows
    if there is one. A collective. Raises DiskRefusedError."""
    config, folder, sizes = run.config, run.folder, run.model.config
    world, device = run.context.world, run.context.device
    share, row = trained_share(config, sizes), OBJECTIVES[config.data.objective]
    on_encoder = row.encoder_only and row.has_head

    def batch_flops(batch: Batch) -> float:
        labels = batch.num_losses * on_encoder
        return training_flops(sizes, batch.encoder_lengths, batch.decoder_lengths, share, labels)

    def open_recorder() -> Recorder:
        with Writing(folder.root, "The run", MAKE_ROOM).explain_refusals():
            if world.is_main:
                _write_run_configuration(run)
            return Recorder(
                device=device,
                collectives=run.context.collectives,
                state=state,
                warmup_steps=config.training.warmup_steps,
                settings=config.monitor,
                monitor=TrainingMonitor.from_config(config),
                events=EventLog(folder.events if world.is_main else None),
                sinks=open_sinks(config, folder.root, rank=world.rank, start_step=state.global_step),
                batch_flops=batch_flops,
                peak_flops=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
                estimated_bytes=expected.peak_bytes if expected is not None else None,
                on_long_row=config.data.on_long_row,
            )

    recorder = run.context.collectives.on_every_rank(open_recorder)
    if run.checkpoint:
        recorder.load_state_dict(run.checkpoint.read_json("trainer.json")["recorder"])
        _compare_lines(run, recorder)
    recorder.events.write(
        "start",
        step=state.global_step,
        data_step=state.data_step,
        resumed_from=str(run.checkpoint.path) if run.checkpoint else None,
        world_size=world.world_size,
        engine=run.context.engine,
    )
    return recorder


def _compare_lines(run: Run, recorder: Recorder) -> None:
    """Log how many lines metrics.jsonl lacks of those before the run's own checkpoint, and count on from its lines."""
    if not run.context.world.is_main:
        return
    expected, lines = recorder.logged, read_step_lines(run.folder.metrics).lines
    recorder.logged = sum("train/tokens_seen" in line for line in lines)
    is_own = run.checkpoint is not None and run.checkpoint.path.parent == run.folder.checkpoints.resolve()
    if is_own and (missing := expected - recorder.logged) > 0:
        told = "%s has no line for %d of the %d logging steps before the checkpoint: it was cut or deleted."
        logger.warning(told, run.folder.metrics, missing, expected)


def checkpoint_files(
    run: Run,
    data: TrainingData,
    state: TrainingState,
    recorder: dict[str, Any],
    lanes: list[dict[str, Any]],
    saved: dict[str, Any],
) -> Callable[[Path], None]:
    """Return a function that writes a checkpoint's files beside the engine's; see docs/checkpoints.md."""
    trainer = {
        "saved": saved,
        "state": state.to_dict(),
        "num_lanes": run.num_lanes,
        "data": data.saved(),
        "recorder": recorder,
        **({} if run.epochs is None else {"num_train_epochs": run.epochs}),
    }
    # Text now: by the time it is written, training may have gone on.
    texts = {
        "trainer.json": json.dumps(trainer, indent=1) + "\n",
        "data.json": json.dumps({"lanes": lanes}, indent=1) + "\n",
        "config.yaml": run.config.dump_yaml(),
    }

    def write(checkpoint: Path) -> None:
        run.folder.flush_record()  # no checkpoint is durable before the lines about its steps
        for name, text in texts.items():
            (checkpoint / name).write_text(text, encoding="utf-8")
        run.model.config.save_pretrained(checkpoint / "model")
        run.model.tokenizer.save_pretrained(checkpoint / "model")
        if run.model.base is not None:
            (checkpoint / "model" / BASE_RECORD).write_text(json.dumps(run.model.base, indent=1) + "\n")
        if run.model.taught_by is not None:
            (checkpoint / "model" / TEACHER_RECORD).write_text(json.dumps(run.model.taught_by, indent=1) + "\n")

    return write


# The function that makes the content of `ds_config.json`; None for an engine that has none.
_ENGINE_JSON: ByEngine[Callable[[FullConfig, World, torch.device, int], dict[str, Any]] | None] = ByEngine(
    deepspeed=run_json, fsdp=None
)


def _write_run_configuration(run: Run) -> None:
    context, path = run.context, run.folder.root / "ds_config.json"
    write_atomically(run.folder.config_yaml, run.config.dump_yaml())
    if (rendered := _ENGINE_JSON[context.engine]) is None:
        path.unlink(missing_ok=True)  # of another engine, left by an earlier start
    else:
        content = rendered(run.config, context.world, context.device, run.accumulation)
        write_atomically(path, json.dumps(content, indent=2) + "\n")
