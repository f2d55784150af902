"""The kinds of trouble that a run can see, and what it does about each (docs/monitor.md)."""

from __future__ import annotations

from typing import Any

from ds_encdec.config.schema import MonitorConfig

TRAINING_ALERTS = ("non_finite", "loss_spike", "grad_explosion", "loss_plateau", "learning_rate_off")
"""Of the training itself: raised by `TrainingMonitor`, saved with its windows."""
MACHINE_ALERTS = ("throughput_drop", "straggler", "memory_growth", "data_wait")
"""Of the machines that it runs on: raised by `MachineWatch`."""


def make_alert(kind: str, step: int, value: float, threshold: float, message: str) -> dict[str, Any]:
    """An alert: plain data. `value` is what was seen and `threshold` what it was held against, in the same unit."""
    return {"type": kind, "step": step, "value": value, "threshold": threshold, "message": f"step {step}: {message}"}


def answer(alert_type: str, settings: MonitorConfig) -> str:
    """What the configuration asks for: `warn`, `skip_step`, `rollback` or `stop`."""
    return str(getattr(settings, f"on_{alert_type}"))
