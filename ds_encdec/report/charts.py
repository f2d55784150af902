"""The charts of one run: which metrics belong together, and what happened to the run marked on their curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from ds_encdec.monitor.metrics_file import is_number
from ds_encdec.report.drawing import COLOURS, LINES, Chart, draw
from ds_encdec.report.page import number
from ds_encdec.report.read_run import NO_CURVE, SMOOTHED_FROM, Curve, Entry, Run, back_to
from ds_encdec.types import DENOISERS

NUM_BUCKETS = 400
"""Runs of points that a curve is reduced to: more than a drawing has pixels to tell apart on a phone."""
MAX_MARKS = 150
"""Alerts marked in one chart, those with the highest values; the table has the others too."""
FEW_POINTS = 60
"""Points up to which a curve that is not smoothed has a mark at each."""
LOG_SCALE_FROM = 20.0
"""Highest value over the median from which a curve is drawn on a logarithmic scale, where that makes sense."""
LIMIT_WITHIN = 1.0
"""Distance from the data, in heights of the data, up to which a limit is drawn: one further away would make the axis
more than twice as high, and the curve flat."""
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


class AlertMark(NamedTuple):
    """The place where a chart marks `times` alerts: at the highest of their values, in the unit of the chart."""

    step: float
    value: float
    times: int


@dataclass(frozen=True)
class ChartPlan:
    """The contents of a chart. `key` names its file; `metrics`: name → label; `alerts`: the types marked on it.

    `measured_alert`: the one of these types whose `value` is the metric at its step; others are marked on the curve.

    `smoothed`: where there are many points, the raw curve is drawn faint below a smoothed one. `scale`: factor of the
    values. `from_zero`: the axis begins at 0. `log`: the axis may be logarithmic.
    `limits`: label → dotted name of the configuration's field that is drawn across, or noted if it is far away.
    """

    key: str
    title: str
    unit: str
    metrics: Mapping[str, str]
    alerts: tuple[str, ...] = ()
    measured_alert: str = ""
    smoothed: bool = False
    scale: float = 1.0
    from_zero: bool = False
    log: bool = False
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


_NATS = "nats per token"
LOSS_PLAN = ChartPlan(
    "loss", "Training loss", _NATS, {"train/loss": "loss"}, ("loss_spike", "loss_plateau", "non_finite"),
    measured_alert="loss_spike", smoothed=True, log=True,
)  # fmt: skip
GRAD_NORM_PLAN = ChartPlan(
    "grad_norm", "Gradient norm", "before clipping", {"train/grad_norm": "norm"}, ("grad_explosion", "non_finite"),
    measured_alert="grad_explosion", smoothed=True, log=True,
    limits={"clipped above": "training.max_grad_norm", "alert above": "monitor.grad_norm_threshold"},
)  # fmt: skip
EVAL_PLAN = ChartPlan("eval_loss", "Evaluation loss", _NATS, {"eval/loss": "loss"}, log=True)
RATE_PLAN = ChartPlan(
    "learning_rate", "Learning rate", "", {"train/learning_rate": "rate"}, ("learning_rate_off",), from_zero=True
)
THROUGHPUT_PLAN = ChartPlan(
    "tokens_per_sec", "Throughput", "tokens/s", {"perf/tokens_per_sec": "throughput"}, ("throughput_drop",),
    smoothed=True, from_zero=True,
)  # fmt: skip
PLANS = (
    LOSS_PLAN,
    ChartPlan(
        "loss_by_denoiser", "Loss by denoiser", _NATS, {f"train/loss_{d}": d for d in DENOISERS},
        smoothed=True, log=True,
    ),
    EVAL_PLAN,
    GRAD_NORM_PLAN,
    RATE_PLAN,
    THROUGHPUT_PLAN,
    ChartPlan("mfu", "MFU", "% of the peak FLOP/s", {"perf/mfu": "MFU"}, smoothed=True, scale=100, from_zero=True),
    ChartPlan(
        "step_time", "Time of an optimizer step", "s", {"perf/step_time_s": "time"}, ("straggler",),
        smoothed=True, from_zero=True, log=True,
    ),
    ChartPlan(
        "memory", "Memory of the largest rank", "GiB",
        {"mem/peak_bytes": "peak", "mem/host_bytes": "host", "mem/device_bytes": "device"},
        ("memory_growth",), scale=2**-30, from_zero=True,
    ),
    ChartPlan(
        "data_wait", "Waiting for data", "% of the time", {"perf/data_wait_frac": "share"}, ("data_wait",),
        smoothed=True, scale=100, from_zero=True,
    ),
    ChartPlan(
        "checkpoint", "Time of a checkpoint", "s",
        {"ckpt/blocked_s": "training paused", "ckpt/total_s": "copy to commit"}, from_zero=True,
    ),
    ChartPlan(
        "slowest_rank", "Slowest rank over the median rank", "", {"health/slowest_rank_ratio": "time ratio"},
        ("straggler",), limits={"alert above": "monitor.straggler_threshold"},
    ),
)  # fmt: skip
_MARKED = {kind for plan in PLANS for kind in plan.alerts}


def charts_of(run: Run, pictures: Path | None = None) -> tuple[list[Chart], list[str]]:
    """Every chart that the run has values for, and the titles of those that it has none for.

    `pictures`: a folder that gets each chart as KEY.png.
    """
    shown = [plan for plan in PLANS if any(len(run.curve(metric).known) for metric in plan.metrics)]
    return [_chart(run, plan, pictures) for plan in shown], [plan.title for plan in PLANS if plan not in shown]


def _chart(run: Run, plan: ChartPlan, pictures: Path | None) -> Chart:
    logged = {label: run.curve(metric).scaled(plan.scale) for metric, label in plan.metrics.items()}
    curves = {label: curve for label, curve in logged.items() if len(curve.known)}
    marks = alert_marks(run, plan)
    known = np.concatenate([[mark.value for mark in marks], *(curve.known for curve in curves.values())])
    limits = {f"{label} {number(v)}": v for label, path in plan.limits.items() if (v := run.number(path)) is not None}
    reach = LIMIT_WITHIN * np.ptp(known)
    far = [label for label, limit in limits.items() if not known.min() - reach <= limit <= known.max() + reach]

    def paint(axes: Axes) -> None:
        if len(plan.metrics) == 1:
            _paint_abandoned(axes, run, plan)
        for index, (label, curve) in enumerate(curves.items()):
            paint_line(axes, curve, plan, label, index, alone=len(plan.metrics) == 1)
        if plan is EVAL_PLAN:
            lowest = int(np.nanargmin(curve.values))
            at = (curve.steps[lowest], curve.values[lowest])
            axes.plot(*at, "*", color=COLOURS["line2"], markersize=10, label="lowest")
        for (label, limit), colour, dashes in zip(limits.items(), ("line3", "alert"), (":", "--"), strict=False):
            if label not in far:
                axes.axhline(limit, color=COLOURS[colour], linewidth=1.1, linestyle=dashes, label=label)
        _paint_events(axes, run)
        _paint_alerts(axes, marks)
        set_scale(axes, plan, known)

    return draw(plan.key, plan.heading, "; ".join([describe(curves, marks), *far]), paint, pictures)


def describe(curves: Mapping[str, Curve], marks: Sequence[AlertMark] = ()) -> str:
    """The key figures of a chart's curves, by label, in words; an alert may be higher than all that was logged."""
    if len(curves) > 1:
        return "last " + ", ".join(f"{label} {number(curve.known[-1])}" for label, curve in curves.items())
    (curve,) = curves.values()
    lowest, highest = int(np.nanargmin(curve.values)), int(np.nanargmax(curve.values))
    top, at, remark = curve.values[highest], curve.steps[highest], ""
    if marks and marks[0].value > top:
        top, at, remark = marks[0].value, marks[0].step, " (alert)"
    return (
        f"first {number(curve.known[0])}, last {number(curve.known[-1])}, "
        f"lowest {number(curve.values[lowest])} at step {curve.steps[lowest]:,.0f}, "
        f"highest {number(top)} at step {at:,.0f}{remark}"
    ) + (f", {curve.gaps} not finite" if curve.gaps else "")


def paint_line(axes: Axes, curve: Curve, plan: ChartPlan, label: str, index: int = 0, *, alone: bool) -> None:
    """Draw one curve; one of a `smoothed` plan with points enough as a smoothed line above the faint raw one.

    `index`: of the curve in its chart. `alone`: it is the only one, so that the legend does not repeat the title, but
    names its two lines. If a chart has several metrics, only the smoothed lines are drawn.
    """
    colour = COLOURS[LINES[index % len(LINES)]]
    style: dict[str, Any] = {"color": colour, "linestyle": _STYLES[index % len(_STYLES)]}
    points = curve.decimated(NUM_BUCKETS)
    if not plan.smoothed or len(curve) < SMOOTHED_FROM:
        marker = "o" if len(curve) <= FEW_POINTS else "." if plan.smoothed else None
        axes.plot(points.steps, points.values, label="" if alone else label, marker=marker, **style)
        return
    if len(plan.metrics) == 1:
        name = "as logged" if alone else ""
        axes.plot(points.steps, points.values, color=colour, alpha=0.4, linewidth=0.8, label=name)
    line = curve.smoothed().decimated(NUM_BUCKETS)
    axes.plot(line.steps, line.values, label="smoothed" if alone else label, **style)


def _paint_abandoned(axes: Axes, run: Run, plan: ChartPlan) -> None:
    (metric,) = plan.metrics
    style: dict[str, Any] = {"color": COLOURS["abandoned"], "linewidth": 1, "alpha": 0.8, "linestyle": "--"}
    for branch in run.abandoned.values():
        points = branch.get(metric, NO_CURVE).scaled(plan.scale).decimated(NUM_BUCKETS)
        if len(points):
            axes.plot(points.steps, points.values, label="taken back", **style)


def _paint_events(axes: Axes, run: Run) -> None:
    """Restarts, and rollbacks with the steps they took back."""
    for entry in run.entries("start"):
        if entry.get("resumed_from"):
            axes.axvline(entry["step"], color=COLOURS["muted"], linewidth=0.9, linestyle=":", label="restart")
    for entry in run.entries("rollback"):
        axes.axvline(entry["step"], color=COLOURS["rollback"], linewidth=1.1, label="rollback")
        axes.axvspan(back_to(entry), entry["step"], color=COLOURS["rollback"], alpha=0.09, linewidth=0)


def _paint_alerts(axes: Axes, marks: Sequence[AlertMark]) -> None:
    """A triangle a mark, with the number of its alerts where it stands for several."""
    steps, values, times = zip(*marks[:MAX_MARKS], strict=True) if marks else ((), (), ())
    if marks:
        axes.plot(steps, values, linestyle="none", marker="v", markersize=5.5, color=COLOURS["alert"],
                  markeredgecolor=COLOURS["paper"], markeredgewidth=0.5, label="alert", zorder=3)  # fmt: skip
    for step, value, count in zip(steps, values, times, strict=True):
        if count > 1:
            axes.annotate(f"×{count}", (step, value), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize=8.5, color=COLOURS["alert"])  # fmt: skip


def alert_marks(run: Run, plan: ChartPlan) -> list[AlertMark]:
    """The marks of a chart, the highest first.

    Alerts of one step and branch have one mark together: they would hide each other, as those of skipped steps do,
    which are all at the applied step before.
    """
    heights: dict[tuple[float, int | None], list[float]] = defaultdict(list)
    for index, entry in enumerate(run.events):
        kind = str(entry.get("type"))
        if entry["kind"] == "alert" and (kind in plan.alerts or (plan is LOSS_PLAN and kind not in _MARKED)):
            branch = _branch_of(run, index)
            height = _height(run, entry, plan, branch)
            if height is not None:
                heights[entry["step"], branch].append(height * plan.scale)
    marks = [AlertMark(step, max(values), len(values)) for (step, _), values in heights.items()]
    return sorted(marks, key=lambda mark: -mark.value)


def _height(run: Run, alert: Entry, plan: ChartPlan, branch: int | None) -> float | None:
    """The alert's own value where it is the metric; else that of the branch's curve at its step, if it has one."""
    value = alert.get("value")
    if alert.get("type") == plan.measured_alert and is_number(value):
        return value
    metric = next(iter(plan.metrics))
    taken_back = NO_CURVE if branch is None else run.abandoned.get(branch, {}).get(metric, NO_CURVE)
    curve = taken_back if len(taken_back.known) else run.curve(metric)
    finite = np.isfinite(curve.values)
    return float(np.interp(alert["step"], curve.steps[finite], curve.values[finite])) if finite.any() else None


def _branch_of(run: Run, index: int) -> int | None:
    """The rollback that took back what the event at `index` lies on; None where none did."""
    step = run.events[index]["step"]
    rollbacks = (later for later in run.events[index:] if later["kind"] == "rollback" and back_to(later) < step)
    number = next(rollbacks, {}).get("number")
    return number if isinstance(number, int) else None


def set_scale(axes: Axes, plan: ChartPlan, known: np.ndarray) -> None:
    """Choose the vertical scale by the values (float64 [n], finite), and label it as other numbers are written."""
    if plan.log and known.min() > 0 and known.max() > LOG_SCALE_FROM * float(np.median(known)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
    elif plan.from_zero:
        axes.set_ylim(bottom=0, top=None if known.max() > 0 else 1)
    plain = FuncFormatter(lambda value, _: number(value))
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if known.max() >= 10_000 else plain)
