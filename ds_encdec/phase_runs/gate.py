"""The gate of a phase: its completed run, judged from the files that the run left."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_encdec.config.plain_files import read_json
from ds_encdec.monitor.metrics_file import is_number, read_step_lines, strict_json
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.phases import PlannedPhase
from ds_encdec.types import CheckpointError, TrainingState

LOSSES = ("train/loss", "eval/loss")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a phase was judged. Losses in nats per target token.

    `checks`: `name`, `passed` and `message` of each. `summary`: `TrainingMonitor.get_summary()`; `eval`: the last
    evaluation's metrics. `checkpoint_sha256`: of the manifest of the checkpoint that was judged.
    """

    checks: tuple[dict[str, Any], ...]
    summary: dict[str, Any]
    eval: dict[str, float | None]
    pipeline_initial_loss: float | None
    steps: int
    tokens_seen: int
    checkpoint_sha256: str

    @property
    def passed(self) -> bool:
        """True if every check was passed."""
        return all(check["passed"] for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Strictly JSON-able, for result.json."""
        return {"passed": self.passed, **dataclasses.asdict(self)}


def judge(planned: PlannedPhase, pipeline_initial_loss: float | None) -> Verdict:
    """Hold the final checkpoint and the metrics of a completed run against its phase's limits.

    `pipeline_initial_loss`: the first loss of the first phase, which the decrease is measured from; None where this is
    the first phase. Raises CheckpointError where there is no final checkpoint.
    """
    final = planned.folder / "checkpoints" / "final"
    state, monitor_state = _read_trainer_json(final)
    monitor = TrainingMonitor(window_size=planned.config.monitor.window_size)
    monitor.load_state_dict(monitor_state)
    if pipeline_initial_loss is not None:
        monitor.initial_loss = pipeline_initial_loss
    metrics_check, evaluation = _look_at_metrics(planned.folder / "metrics.jsonl")
    checks = [*monitor.validate_phase(planned.settings)["checks"], metrics_check]
    if monitor.warmup_complete_loss is None:
        checks.append(_never_logged_after_warmup(planned, state.global_step))
    return Verdict(
        checks=tuple(checks),
        summary=strict_json(monitor.get_summary()),
        eval=evaluation,
        pipeline_initial_loss=monitor.initial_loss,
        steps=state.global_step,
        tokens_seen=state.total_tokens_seen,
        checkpoint_sha256=hashlib.sha256((final / "manifest.json").read_bytes()).hexdigest(),
    )


def _read_trainer_json(final: Path) -> tuple[TrainingState, dict[str, Any]]:
    """The counters and the monitor's state that the run ended with."""
    try:
        saved = read_json(final / "trainer.json", None)
        return TrainingState(**saved["state"]), saved["recorder"]["monitor"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{final}: the phase is complete, but its final checkpoint cannot be read to judge it: {error}. "
            "Restore it, or delete the phase's folder to train it anew."
        ) from error


def _look_at_metrics(path: Path) -> tuple[dict[str, Any], dict[str, float | None]]:
    """The check that every logged loss is finite, and the metrics of the last evaluation."""
    lines, problem, _ = read_step_lines(path)
    evaluations = [line for line in lines if "eval/loss" in line]
    last = evaluations[-1] if evaluations else {}
    evaluation = {name: value for name, value in last.items() if name.startswith("eval/")}
    bad = [(line["step"], name) for line in lines for name in LOSSES if name in line and not is_number(line[name])]
    logged = sum("train/loss" in line for line in lines)
    if problem:
        return _check(False, problem), evaluation
    if bad:
        step, name = bad[0]
        return _check(False, f"{name} is not finite at step {step} ({len(bad)} such values)"), evaluation
    if not logged:
        return _check(False, f"{path}: no line has train/loss"), evaluation
    return _check(True, f"{logged} logged losses and {len(evaluations)} evaluations, all finite"), evaluation


def _check(passed: bool, message: str) -> dict[str, Any]:
    return {"name": "logged_losses", "passed": passed, "message": message}


def _never_logged_after_warmup(planned: PlannedPhase, steps: int) -> dict[str, Any]:
    warmup = planned.config.training.warmup_steps
    reason = (
        f"the run ended at step {steps}, and its warm-up has {warmup}: set phases.{planned.phase}.warmup_steps"
        if steps <= warmup
        else f"none of the {steps - warmup} steps after the warm-up had a finite loss"
    )
    return {"name": "logged_after_warmup", "passed": False, "message": f"no loss after the warm-up: {reason}"}
