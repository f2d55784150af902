"""The gate of a phase: its completed run, judged from the files that the run left."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ds_encdec.config.plain_files import read_json
from ds_encdec.monitor.metrics_file import is_number, read_step_lines, strict_json
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.phases import PlannedPhase
from ds_encdec.types import CheckpointError, TrainingState

LOSSES = ("train/loss", "eval/loss")


def judge(planned: PlannedPhase, pipeline_initial_loss: float | None) -> dict[str, Any]:
    """Hold the final checkpoint and the metrics of a completed run against its phase's limits.

    `pipeline_initial_loss`: the first loss of the first phase, which the decrease is measured from; None where this is
    the first phase. Returns what result.json says of it, for strict JSON, with losses in nats per target token:
    `passed`, if every check was; `checks`: `name`, `passed` and `message` of each; `summary`:
    `TrainingMonitor.get_summary()`; `eval`: the last evaluation's metrics; `pipeline_initial_loss`, `steps`,
    `tokens_seen`; `checkpoint_sha256`: of the manifest of the checkpoint that was judged. Raises CheckpointError where
    there is no final checkpoint.
    """
    final = planned.folder / "checkpoints" / "final"
    monitor = TrainingMonitor(window_size=planned.config.monitor.window_size)
    try:
        saved = read_json(final / "trainer.json", None)
        state, monitor_state = TrainingState(**saved["state"]), saved["recorder"]["monitor"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{final}: the phase is complete, but its final checkpoint cannot be read to judge it: {error}. "
            "Restore it, or delete the phase's folder to train it anew."
        ) from error
    monitor.load_state_dict(monitor_state)
    if pipeline_initial_loss is not None:
        monitor.initial_loss = pipeline_initial_loss
    metrics_check, evaluation = _look_at_metrics(planned.folder / "metrics.jsonl")
    checks = [*monitor.validate_phase(planned.settings)["checks"], metrics_check]
    if monitor.warmup_complete_loss is None:
        warmup, steps = planned.config.training.warmup_steps, state.global_step
        reason = (
            f"the run ended at step {steps}, and its warm-up has {warmup}: set phases.{planned.phase}.warmup_steps"
            if steps <= warmup
            else f"none of the {steps - warmup} steps after the warm-up had a finite loss"
        )
        message = f"no loss after the warm-up: {reason}"
        checks.append({"name": "logged_after_warmup", "passed": False, "message": message})
    return {
        "passed": all(check["passed"] for check in checks),
        "checks": checks,
        "summary": strict_json(monitor.get_summary()),
        "eval": evaluation,
        "pipeline_initial_loss": monitor.initial_loss,
        "steps": state.global_step,
        "tokens_seen": state.total_tokens_seen,
        "checkpoint_sha256": hashlib.sha256((final / "manifest.json").read_bytes()).hexdigest(),
    }


def _look_at_metrics(path: Path) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The check that every logged loss is finite, and the metrics of the last evaluation."""
    lines, problem, _ = read_step_lines(path)
    evaluations = [line for line in lines if "eval/loss" in line]
    logged = sum("train/loss" in line for line in lines)
    bad = [
        f"{name} is not finite at step {line['step']}"
        for line in lines
        for name in LOSSES
        if name in line and not is_number(line[name])
    ]
    wrong = problem or (f"{bad[0]} ({len(bad)} such values)" if bad else "")
    wrong = wrong or ("" if logged else f"{path}: no line has train/loss")
    message = wrong or f"{logged} logged losses and {len(evaluations)} evaluations, all finite"
    last = evaluations[-1] if evaluations else {}
    check = {"name": "logged_losses", "passed": not wrong, "message": message}
    return check, {name: value for name, value in last.items() if name.startswith("eval/")}
