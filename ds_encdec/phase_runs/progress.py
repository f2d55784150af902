"""Says how far the run of a phase has come, from its metrics.jsonl; what the run itself prints is in its log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_encdec.monitor.console import shown, time_left
from ds_encdec.monitor.metrics_file import is_number, step_lines_behind
from ds_encdec.phases import PlannedPhase

LINES_PER_EVALUATION = 10


class Progress:
    """Says each evaluation of the run of `planned`, and ten times as often its steps, tokens and loss.

    What an earlier start of the run has written is not said again.
    """

    def __init__(self, metrics: Path, planned: PlannedPhase, say: Callable[[str], None]) -> None:
        self._metrics, self._num_steps, self._say = metrics, planned.num_steps, say
        self._best = planned.config.training.metric_for_best_model
        self._every = max(1, planned.config.training.eval_steps // LINES_PER_EVALUATION)
        _, self._read_bytes = step_lines_behind(metrics, 0)
        self._said: int | None = None

    def look(self) -> None:
        """Say what has been logged since the last look."""
        lines, self._read_bytes = step_lines_behind(self._metrics, self._read_bytes)
        for line in lines:
            number = line["step"] // self._every
            if "eval/loss" in line or ("train/loss" in line and number != self._said):
                self._say(self._in_words(line))
            self._said = number if "train/loss" in line else self._said

    def _in_words(self, line: Mapping[str, Any]) -> str:
        metrics = {name: value if is_number(value) else math.nan for name, value in line.items()}
        parts = [f"step {metrics['step']:,}/{self._num_steps:,}"]
        if "train/tokens_seen" in metrics:
            parts.append(f"{metrics['train/tokens_seen']:,} tokens")
        parts += shown(metrics, self._best)
        if "perf/step_time_s" in metrics:
            parts.append(f"ETA {time_left((self._num_steps - metrics['step']) * metrics['perf/step_time_s'])}")
        return " | ".join(parts)
