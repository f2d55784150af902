"""Format a run's metrics: the line of a step, and the line with the progress bar, which fits any terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Label, metric and format of all that a line may show, in this order.
_SHOWN = (
    ("loss", "train/loss", "{:.4f}"),
    ("lr", "train/learning_rate", "{:.2e}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("skipped", "train/skipped_steps", "{:.0f}"),
    ("tokens/s", "perf/tokens_per_sec", "{:,.0f}"),
    ("MFU", "perf/mfu", "{:.1%}"),
    ("eval loss", "eval/loss", "{:.4f}"),
    ("perplexity", "eval/perplexity", "{:.2f}"),
    ("exact match", "eval/exact_match", "{:.1f} %"),
    ("ROUGE-L", "eval/rougeL", "{:.1f}"),
    ("chrF", "eval/chrf", "{:.1f}"),
    ("BLEU", "eval/bleu", "{:.1f}"),
)
_HIDDEN_AT_ZERO = {"train/skipped_steps"}
_BAR_WIDTHS = (8, 40)
_SEPARATOR = " | "


def shown(metrics: Mapping[str, float], best: str = "loss") -> list[str]:
    """Return the metrics that a person watches, labelled, the most important first: `best`, then the others."""
    chosen = f"eval/{best}"
    of_sets = [name for name in metrics if name.startswith("eval/") and name.endswith("/loss") and name.count("/") > 1]
    sets = [(f"{name.split('/')[1]} loss", name, "{:.4f}") for name in of_sets]
    rows = sorted([*_SHOWN, *sets], key=lambda row: row[1] != chosen)
    if all(name != chosen for _, name, _ in rows):
        rows = [(best, chosen, "{:.4g}"), *rows]
    return [
        f"{label} {form.format(metrics[name])}"
        for label, name, form in rows
        if name in metrics and (metrics[name] or name not in _HIDDEN_AT_ZERO)
    ]


class ProgressLine:
    """The line at the bottom of a terminal: step, bar and ETA (empty at first), and as many `metrics` as fit."""

    def __init__(self, total_steps: int, step: int) -> None:
        self.total_steps, self.step = total_steps, step
        self.eta = ""
        self.metrics: Sequence[str] = ("waiting for the first metrics",)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield one line of the available width."""
        words = [f"step {self.step}/{self.total_steps}", *filter(None, [self.eta])]
        free = options.max_width - sum(len(word) + 1 for word in words)
        narrowest, widest = _BAR_WIDTHS
        bar = max(narrowest, min(widest, free // 4))
        line, free = "", free - bar - 1
        for part in self.metrics:
            if len(longer := line + _SEPARATOR * bool(line) + part) > free:
                break
            line = longer
        head, *eta = (Text(word, style="bold") for word in words)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(head, ProgressBar(self.total_steps, self.step, width=bar), *eta, line)
        yield grid
