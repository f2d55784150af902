"""The run on the screen: a progress bar on a terminal, plain lines in a file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# Label, metric, format: what a line shows, in this order, of what it was given.
_SHOWN = (
    ("loss", "train/loss", "{:.4f}"),
    ("lr", "train/learning_rate", "{:.2e}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("skipped", "train/skipped_steps", "{:.0f}"),
    ("tokens/s", "perf/tokens_per_sec", "{:,.0f}"),
    ("MFU", "perf/mfu", "{:.1%}"),
    ("eval loss", "eval/loss", "{:.4f}"),
    ("perplexity", "eval/perplexity", "{:.2f}"),
)
_HIDDEN_AT_ZERO = {"train/skipped_steps"}


class ConsoleSink:
    """Shows each line of metrics, with the time that is left. Training moves the bar; evaluations are printed."""

    def __init__(self, total_steps: int, *, start_step: int = 0, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = console or Console()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("", total=total_steps, completed=start_step, status="")
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of `step` that a person watches."""
        if not (parts := self._describe(step, metrics)):
            return
        if self._progress is not None and "train/loss" in metrics:
            self._progress.update(self._task, completed=step, status=" | ".join(parts))
        else:
            line = " | ".join([f"step {step}/{self._total_steps}", *parts])
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def go_back(self, step: int, rollback: int) -> None:
        """Move the bar back."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self, exit_code: int = 0) -> None:
        """Leave the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()

    def _describe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        parts = [
            f"{label} {form.format(metrics[name])}"
            for label, name, form in _SHOWN
            if name in metrics and (metrics[name] or name not in _HIDDEN_AT_ZERO)
        ]
        if "perf/step_time_s" in metrics:
            seconds_left = round((self._total_steps - step) * metrics["perf/step_time_s"])
            parts.append(f"ETA {timedelta(seconds=max(seconds_left, 0))}")
        return parts
