"""Several runs beside each other: their curves in one chart, and what differed in the config beside what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import Mark, marked
from ds_encdec.report.charts import (
    EVAL_PLAN,
    GRAD_NORM_PLAN,
    LOSS_PLAN,
    RATE_PLAN,
    THROUGHPUT_PLAN,
    Chart,
    ChartPlan,
    number,
    paint_line,
    set_scale,
)
from ds_encdec.report.config_table import NOT_SET, differences
from ds_encdec.report.curve import Curve
from ds_encdec.report.drawing import LIGHT, LINES, draw
from ds_encdec.report.markup import Html, element, field_name, items, join, paragraph, section, table
from ds_encdec.report.read_run import Run
from ds_encdec.report.run_page import figure, median, show_seconds, wall_seconds
from ds_encdec.types import DataError

COMPARED = (LOSS_PLAN, EVAL_PLAN, GRAD_NORM_PLAN, THROUGHPUT_PLAN, RATE_PLAN)
"""What is drawn of all runs together."""
_SMOOTHING = "Training losses, gradient norms and throughput of long runs are smoothed; the faint lines are as logged."
_LOSSES = ("train/loss", "eval/loss")
_TOKENS = "losses per token of different tokenizers or vocabularies cannot be compared"
_TEXTS = "evaluation losses are of different texts"
_EXAMPLES = "evaluation losses are over different examples"
_MIXTURE = "losses are of different mixtures of denoisers"
_MEANINGS = {Mark.TOKENS: _TOKENS, Mark.TEXTS: _TEXTS, Mark.EXAMPLES: _EXAMPLES, Mark.MIXTURE: _MIXTURE}
_FIELDS = {path: meaning for mark, meaning in _MEANINGS.items() for path in marked(mark)}
"""What it means where runs without checkpoints differ in these fields of the configuration."""
_DATA_FACTS = {
    **{"tokenizer": _TOKENS, "special tokens": _TOKENS, "sources": _TEXTS},
    **{path: _FIELDS[path] for path in marked(Mark.EXAMPLES, Mark.MIXTURE)},
}
"""The same by the facts that the checkpoints of comparable runs agree in (data/fingerprint.py)."""


def compare_section(runs: Sequence[Run]) -> tuple[Html, list[Chart], list[str]]:
    """The section, its charts, and the warnings in it.

    Raises DataError where two of the runs have no loss in common; runs whose losses mean different things are
    drawn, with a warning, since their throughput and stability can still be compared.
    """
    _require_common_loss(runs)
    names = distinct_names(runs)
    warnings = incomparable(runs, names)
    charts = [chart for plan in COMPARED for chart in _charts(plan, runs, names)]
    content = join(
        [
            items([element("span", f"! {warning}", class_="warn") for warning in warnings], class_="verdict"),
            element("h3", "What came out, and what differed"),
            _table(runs, names),
            element("h3", "Curves"),
            paragraph(_SMOOTHING, class_="muted"),
            element("div", join(figure(chart) for chart in charts), class_="charts pairs"),
        ]
    )
    return section(f"Comparison of {len(runs)} runs", content), charts, warnings


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs' folders, with folders above them where runs of one name are compared."""
    names = [run.name for run in runs]
    for depth in range(2, 1 + max(len(run.path.parts) for run in runs)):
        repeated = {name for name, times in Counter(names).items() if times > 1}
        names = [
            "/".join(run.path.parts[-depth:]) if name in repeated else name
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def _require_common_loss(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        if not any(len(first.curve(metric).known) and len(other.curve(metric).known) for metric in _LOSSES):
            raise DataError(
                f"{first.path} and {other.path} cannot be compared: "
                f"neither of {' and '.join(_LOSSES)} was logged by both."
            )


def incomparable(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Why losses of the first run and the others do not mean the same, in sentences."""
    warnings = []
    first = runs[0]
    for other, name in zip(runs[1:], names[1:], strict=True):
        meaning = _DATA_FACTS if first.data and other.data else _FIELDS
        differing = [what for what in meaning if _fact(first, what) != _fact(other, what)]
        for reason in dict.fromkeys(meaning[what] for what in differing):
            what = " and ".join(what for what in differing if meaning[what] == reason)
            warnings.append(f"{names[0]} and {name} differ in {what}: {reason}.")
    return warnings


def _fact(run: Run, what: str) -> object:
    """What the newest checkpoint says of the run's data, or else its configuration."""
    return run.data.get(what, run.setting(what))


def _charts(plan: ChartPlan, runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """The plan's metric of all runs over steps and over tokens; nothing where none has logged it."""
    (metric,) = plan.metrics
    over_steps = [(name, run.curve(metric)) for name, run in zip(names, runs, strict=True)]
    over_tokens = [
        (name, run.curve(metric).at(run.tokens_at(run.curve(metric).steps)))
        for name, run in zip(names, runs, strict=True)
    ]
    charts = []
    for over, curves in (("steps", over_steps), ("tokens", over_tokens)):
        drawn = {name: curve for name, curve in curves if len(curve.known) and np.isfinite(curve.steps).all()}
        if drawn:
            charts.append(_chart(plan, drawn, names, over))
    return charts


def _chart(plan: ChartPlan, curves: Mapping[str, Curve], names: Sequence[str], over: str) -> Chart:
    key, title = f"compare_{plan.key}_by_{over}", f"{plan.title.split(',')[0]} over {over}"
    caption = "last " + ", ".join(f"{name} {number(curve.known[-1])}" for name, curve in curves.items())
    paint = _painter(plan, title, curves, names, over)
    return Chart(key, title, caption, draw(key, paint, label=f"{title}: {caption}"))


def _painter(
    plan: ChartPlan, title: str, curves: Mapping[str, Curve], names: Sequence[str], over: str
) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.set_title(title)
        for name, curve in curves.items():
            index = names.index(name)  # a run has its colour in every chart
            colour = LIGHT[LINES[index % len(LINES)]]
            paint_line(axes, curve, colour=colour, label=name, plan=plan, index=index, alone=False)
        set_scale(axes, plan, list(curves.values()))
        axes.set_xlabel("optimizer step" if over == "steps" else "tokens seen")

    return paint


def _table(runs: Sequence[Run], names: Sequence[str]) -> Html:
    differing = differences([run.config for run in runs])
    rows: list[Sequence[object]] = [(label, *(tell(run) for run in runs)) for label, tell in _OUTCOMES.items()]
    rows += [(field_name(name), *values) for name, values in differing]
    note = [] if differing else [paragraph("Their configurations are the same.", class_="muted")]
    return join([*note, table("What came out, and what differed", ("", *names), rows)])


def _value(value: float | None, form: str) -> str:
    return NOT_SET if value is None else form.format(value)


_OUTCOMES: Mapping[str, Callable[[Run], str]] = {
    "state": lambda run: str(run.status.get("state", "unknown")),
    "steps": lambda run: f"{run.steps:,}",
    "tokens seen": lambda run: _value(run.last("train/tokens_seen"), "{:,.0f}"),
    "last loss": lambda run: _value(run.last("train/loss"), "{:.4f}"),
    "lowest loss": lambda run: _value(run.lowest("train/loss"), "{:.4f}"),
    "last eval loss": lambda run: _value(run.last("eval/loss"), "{:.4f}"),
    "lowest eval loss": lambda run: _value(run.lowest("eval/loss"), "{:.4f}"),
    "tokens/s, median": lambda run: _value(median(run, "perf/tokens_per_sec"), "{:,.0f}"),
    "alerts": lambda run: f"{len(run.entries('alert')):,}",
    "rollbacks": lambda run: f"{len(run.entries('rollback')):,}",
    "skipped steps": lambda run: f"{run.skipped_steps:,}",
    "time in training steps": lambda run: show_seconds(run.training_seconds),
    "from first start to end": lambda run: "no end" if (wall := wall_seconds(run)) is None else show_seconds(wall),
}
