"""The events of a run: what happened to it, and what it did about it; and the alerts among them (docs/monitor.md).

`ledger.jsonl` in the run's folder, one strict JSON object a line, in the order of time and never taken back:

    time       ISO 8601 with its zone
    kind       start | alert | rollback | no_rollback | early_stop | stop
    step       applied optimizer steps, `data_step` consumed ones, when it happened

    start      resumed_from (a path, or null), world_size, engine
    alert      type, value, threshold, message (`make_alert`), action: warn | skip_step | rollback | stop;
               those that are only warned of once per type and logging interval
    rollback   type and message of the alert; to_step, to_data_step: of the checkpoint; number: of the run's rollbacks
    no_rollback, early_stop   message
    stop       message and exit_code, where the run ended before its end

A rollback trains on nothing of the data steps after `to_data_step` up to `data_step` again. A run that is resumed
meets what came after its checkpoint once more, so an entry may come twice.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Literal

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.metrics_file import append_line, strict_json

logger = logging.getLogger(__name__)

TRAINING_ALERTS = ("non_finite", "loss_spike", "grad_explosion", "loss_plateau", "learning_rate_off")
"""Alerts about the training itself: raised by `TrainingMonitor`, saved with its windows."""
MACHINE_ALERTS = ("throughput_drop", "straggler", "memory_growth", "data_wait")
"""Alerts about the machines that it runs on: raised by `MachineWatch`."""

Kind = Literal["start", "alert", "rollback", "no_rollback", "early_stop", "stop"]


def make_alert(kind: str, step: int, value: float, threshold: float, message: str) -> dict[str, Any]:
    """An alert: plain data. `value` is what was seen and `threshold` its limit, in the same unit."""
    return {"type": kind, "step": step, "value": value, "threshold": threshold, "message": f"step {step}: {message}"}


def answer(alert_type: str, settings: MonitorConfig) -> str:
    """The action that the configuration asks for: `warn`, `skip_step`, `rollback` or `stop`."""
    return str(getattr(settings, f"on_{alert_type}"))


class EventLog:
    """Appends to the file; does nothing where `path` is None, as on all ranks but 0."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, kind: Kind, *, step: int, data_step: int, **facts: Any) -> None:
        """Append an entry. A disk that refuses costs an error in the log, never the run."""
        if self._path is None:
            return
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, "step": step, "data_step": data_step}
        try:
            with self._path.open("ab", buffering=0) as file:
                append_line(file, entry | strict_json(facts))
        except OSError as error:
            logger.error("%s: an entry could not be written: %s", self._path, error)
