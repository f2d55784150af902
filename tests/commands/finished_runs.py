"""Folders like those of completed runs, written from a curve of losses by the objects that a run writes them with."""

import json
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.types import TrainingState
from ds_encdec.commands.phases.plan import PlannedPhase
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.sinks import JsonlSink

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
FALLING = [8.3 - 0.06 * step for step in range(40)]


def watch(losses: Sequence[float], *, warmup_steps: int) -> TrainingMonitor:
    monitor = TrainingMonitor()
    for step, loss in enumerate(losses, start=1):
        monitor.update(step, loss, 1.0, 1e-3, 1000.0, is_warmup=step <= warmup_steps)
    return monitor


def finish_run(planned: PlannedPhase, losses: Sequence[float], *, eval_loss: float | None = 5.0) -> None:
    """Leave in the phase's folder what its gate reads: `losses` by step, each logged, and one evaluation."""
    final = planned.folder / "checkpoints" / "final"
    final.mkdir(parents=True)
    monitor = watch(losses, warmup_steps=planned.config.training.warmup_steps)
    state = TrainingState(
        global_step=len(losses), data_step=len(losses), total_tokens_seen=1000, target_tokens_seen=300
    )
    trainer = {"state": state.to_dict(), "recorder": {"monitor": monitor.state_dict()}}
    (final / "trainer.json").write_text(json.dumps(trainer, allow_nan=False))
    (final / "manifest.json").write_text("{}")
    sink = JsonlSink(planned.folder / "metrics.jsonl")
    for step, loss in enumerate(losses, start=1):
        sink.log(step, {"train/loss": loss, "perf/tokens_per_sec": 100.0 * step})
    if eval_loss is not None:
        sink.log(len(losses), {"eval/loss": eval_loss, "eval/perplexity": 2.0})
    sink.close()
