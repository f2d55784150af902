"""The events of a run: what happened to it, and what it did about it.

`ledger.jsonl` in the run's folder, one strict JSON object a line, in the order of time and never taken back:

    time       ISO 8601 with its zone
    kind       start | alert | rollback | no_rollback | early_stop | stop
    step       applied optimizer steps, `data_step` consumed ones, when it happened

    start      resumed_from (a path, or null), world_size, engine
    alert      type, value, threshold, message (monitor/alerts.py), action: warn | skip_step | rollback | stop;
               those that are only warned of once per type and logging interval
    rollback   type and message of the alert; to_step, to_data_step: of the checkpoint; number: of the run's rollbacks
    no_rollback, early_stop   message
    stop       message and exit_code, where the run ended before its end

A rollback trains on nothing of the data steps after `to_data_step` up to `data_step` again. A run that is resumed
meets what came after its checkpoint once more, so an entry may come twice.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, Literal

from ds_encdec.monitor.metrics import encode_float

logger = logging.getLogger(__name__)

Kind = Literal["start", "alert", "rollback", "no_rollback", "early_stop", "stop"]


class EventLog:
    """Appends to the file; does nothing where `path` is None, as on all ranks but 0."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, kind: Kind, *, step: int, data_step: int, **facts: Any) -> None:
        """Append an entry. A disk that refuses costs an error in the log, never the run."""
        if self._path is None:
            return
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "kind": kind,
            "step": step,
            "data_step": data_step,
            **{name: encode_float(value) if isinstance(value, float) else value for name, value in facts.items()},
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            logger.error("%s: an entry could not be written: %s", self._path, error)
