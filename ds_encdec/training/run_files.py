"""Write the files of a run beside the engine's: its configuration, its records, and the rest of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_encdec.base.types import TrainingState
from ds_encdec.checkpoint.folder import Checkpoint
from ds_encdec.checkpoint.manager import MAKE_ROOM
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import TrainingData
from ds_encdec.engine.deepspeed.json import run_json
from ds_encdec.exports.adapters import BASE_RECORD
from ds_encdec.launch.disk import Writing, write_atomically
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import World
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.gpus import peak_flops
from ds_encdec.model.parameter_count import trained_share, training_flops
from ds_encdec.monitor.metrics_file import EventLog
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.monitor.sinks import open_sinks
from ds_encdec.registry.engines import ENGINES, ByEngine
from ds_encdec.training.run_model import RunModel


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


def begin_recording(run: Run, state: TrainingState, expected: ExpectedMemory | None) -> Recorder:
    """Write the run's configuration and the event of this start, and return the recorder, with the checkpoint's windows
    if there is one. A collective. Raises DiskRefusedError."""
    config, folder, sizes = run.config, run.folder, run.model.config
    world, device = run.context.world, run.context.device
    share = trained_share(config, sizes)

    def last_report(run_dir: Path) -> Path:
        from ds_encdec.report.write import write_last_report  # matplotlib, which training does without

        return write_last_report(run_dir)

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
                sinks=open_sinks(config, folder.root, last_report, rank=world.rank, start_step=state.global_step),
                batch_flops=lambda batch: training_flops(sizes, batch.encoder_lengths, batch.decoder_lengths, share),
                peak_flops=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
                estimated_bytes=expected.peak_bytes if expected is not None else None,
                on_long_row=config.data.on_long_row,
            )

    recorder = run.context.collectives.on_every_rank(open_recorder)
    if run.checkpoint:
        recorder.load_state_dict(run.checkpoint.read_json("trainer.json")["recorder"])
    recorder.events.write(
        "start",
        step=state.global_step,
        data_step=state.data_step,
        resumed_from=str(run.checkpoint.path) if run.checkpoint else None,
        world_size=world.world_size,
        engine=run.context.engine,
    )
    return recorder


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
        for name, text in texts.items():
            (checkpoint / name).write_text(text, encoding="utf-8")
        run.model.config.save_pretrained(checkpoint / "model")
        run.model.tokenizer.save_pretrained(checkpoint / "model")
        if run.model.base is not None:
            (checkpoint / "model" / BASE_RECORD).write_text(json.dumps(run.model.base, indent=1) + "\n")

    return write


_ENGINE_FILES: ByEngine[Mapping[str, Callable[[FullConfig, World, torch.device, int], dict[str, Any]]]] = ByEngine(
    deepspeed={"ds_config.json": run_json}, fsdp={}
)
"""The JSON files of each engine in the run's folder, and the functions that make their content."""


def _write_run_configuration(run: Run) -> None:
    """Write config.yaml and the running engine's files; remove those of another engine, left by an earlier start."""
    world, device = run.context.world, run.context.device
    write_atomically(run.folder.config_yaml, run.config.dump_yaml())
    for row in ENGINES.values():
        for name, rendered in _ENGINE_FILES[row.name].items():
            if row is run.context.engine_spec:
                content = rendered(run.config, world, device, run.accumulation)
                write_atomically(run.folder.root / name, json.dumps(content, indent=2) + "\n")
            else:
                (run.folder.root / name).unlink(missing_ok=True)
