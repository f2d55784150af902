"""The charts of one run: which metrics belong together, and what happened to the run marked on their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from ds_encdec.monitor.metrics_file import is_number
from ds_encdec.report.curve import Curve
from ds_encdec.report.drawing import LIGHT, LINES, NARROW, WIDE, Drawing, draw
from ds_encdec.report.read_run import NO_CURVE, Entry, Run
from ds_encdec.types import DENOISERS

NUM_BUCKETS = 400
"""Runs of points that a curve is reduced to: more than a drawing has pixels to tell apart on a phone."""
MAX_MARKS = 150
"""Alerts marked in one chart, those with the highest values; the table has the others too."""
LOG_SCALE_FROM = 20.0
"""Highest value over the median from which a curve is drawn on a logarithmic scale, where that makes sense."""
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Chart:
    """A finished chart: `key` names its files, `caption` has its key figures; `wide` is for large screens."""

    key: str
    title: str
    caption: str
    narrow: Drawing
    wide: Drawing | None = None


@dataclass(frozen=True)
class ChartPlan:
    """What a chart shows. `metrics`: name → label; `alerts`: the types that are marked on it.

    `smoothed`: the raw curve is drawn faint below a smoothed one. `sparse`: each value has a mark. `scale`: factor of
    the values. `from_zero`: the axis begins at 0. `log`: the axis may be logarithmic. `limits`: label → dotted name
    of the configuration's field that is drawn across.
    """

    key: str
    title: str
    metrics: Mapping[str, str]
    alerts: tuple[str, ...] = ()
    smoothed: bool = False
    sparse: bool = False
    scale: float = 1.0
    from_zero: bool = False
    log: bool = False
    limits: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False


_NATS = "nats per token"
LOSS_PLAN = ChartPlan(
    "loss", f"Training loss, {_NATS}", {"train/loss": "loss"}, ("loss_spike", "loss_plateau", "non_finite"),
    smoothed=True, log=True, wide=True,
)  # fmt: skip
GRAD_NORM_PLAN = ChartPlan(
    "grad_norm", "Gradient norm, before clipping", {"train/grad_norm": "norm"}, ("grad_explosion", "non_finite"),
    smoothed=True, log=True,
    limits={"clipped above": "training.max_grad_norm", "alert above": "monitor.grad_norm_threshold"},
)  # fmt: skip
EVAL_PLAN = ChartPlan("eval_loss", f"Evaluation loss, {_NATS}", {"eval/loss": "loss"}, sparse=True, log=True)
RATE_PLAN = ChartPlan(
    "learning_rate", "Learning rate", {"train/learning_rate": "rate"}, ("learning_rate_off",), from_zero=True
)
THROUGHPUT_PLAN = ChartPlan(
    "tokens_per_sec", "Throughput, tokens/s", {"perf/tokens_per_sec": "tokens/s"}, ("throughput_drop",),
    smoothed=True, from_zero=True,
)  # fmt: skip
PLANS = (
    LOSS_PLAN,
    ChartPlan(
        "loss_by_denoiser", f"Loss by denoiser, {_NATS}", {f"train/loss_{d}": d for d in DENOISERS},
        smoothed=True, log=True,
    ),
    EVAL_PLAN,
    GRAD_NORM_PLAN,
    RATE_PLAN,
    THROUGHPUT_PLAN,
    ChartPlan("mfu", "MFU, % of the peak FLOP/s", {"perf/mfu": "MFU"}, smoothed=True, scale=100, from_zero=True),
    ChartPlan(
        "step_time", "Time of an optimizer step, s", {"perf/step_time_s": "time"}, ("straggler",),
        smoothed=True, from_zero=True, log=True,
    ),
    ChartPlan(
        "memory", "Memory of the largest rank, GiB", {"mem/peak_bytes": "peak", "mem/host_bytes": "host",
                                  "mem/device_bytes": "device"},
        ("memory_growth",), scale=2**-30, from_zero=True,
    ),
    ChartPlan(
        "data_wait", "Waiting for data, % of the time", {"perf/data_wait_frac": "share"}, ("data_wait",),
        smoothed=True, scale=100, from_zero=True,
    ),
    ChartPlan(
        "checkpoint", "Time of a checkpoint, s",
        {"ckpt/blocked_s": "training held up", "ckpt/total_s": "copy to commit"}, sparse=True, from_zero=True,
    ),
    ChartPlan(
        "slowest_rank", "Slowest rank over the median rank", {"health/slowest_rank_ratio": "time ratio"},
        ("straggler",), limits={"alert above": "monitor.straggler_threshold"},
    ),
)  # fmt: skip
_MARKED = {kind for plan in PLANS for kind in plan.alerts}


def charts_of(run: Run) -> tuple[list[Chart], list[str]]:
    """Every chart that the run has values for, and the titles of those that it has none for."""
    charts, empty = [], []
    for plan in PLANS:
        if any(len(run.curve(metric).known) for metric in plan.metrics):
            charts.append(_chart(run, plan))
        else:
            empty.append(plan.title.split(",")[0])
    return charts, empty


def _chart(run: Run, plan: ChartPlan) -> Chart:
    caption = describe({label: scaled(run.curve(metric), plan) for metric, label in plan.metrics.items()})
    label = f"{plan.title}: {caption}"

    def paint(axes: Axes) -> None:
        axes.set_title(plan.title)
        _paint_curves(axes, run, plan)
        _paint_limits(axes, run, plan)
        _paint_events(axes, run, plan)
        set_scale(axes, plan, [scaled(run.curve(metric), plan) for metric in plan.metrics])

    wide = draw(f"{plan.key}-wide", paint, size=WIDE, label=label) if plan.wide else None
    return Chart(plan.key, plan.title, caption, draw(plan.key, paint, size=NARROW, label=label), wide)


def scaled(curve: Curve, plan: ChartPlan) -> Curve:
    """The curve in the unit of the chart."""
    return Curve(curve.steps, curve.values * plan.scale)


def describe(curves: Mapping[str, Curve]) -> str:
    """The key figures of a chart's curves, by label, in words."""
    told = {label: curve for label, curve in curves.items() if len(curve.known)}
    if len(told) == 1:
        return _describe_one(next(iter(told.values())))
    return "last " + ", ".join(f"{label} {number(curve.known[-1])}" for label, curve in told.items())


def _describe_one(curve: Curve) -> str:
    known = curve.known
    lowest, highest = int(np.nanargmin(curve.values)), int(np.nanargmax(curve.values))
    parts = [
        f"first {number(known[0])}",
        f"last {number(known[-1])}",
        f"lowest {number(curve.values[lowest])} at step {curve.steps[lowest]:,.0f}",
        f"highest {number(curve.values[highest])} at step {curve.steps[highest]:,.0f}",
    ]
    return ", ".join([*parts, f"{curve.gaps} not finite"] if curve.gaps else parts)


def number(value: float) -> str:
    """A number with four digits that tell something, and no exponent where it can be read without."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def paint_line(axes: Axes, curve: Curve, *, colour: str, label: str, plan: ChartPlan, index: int, faint: bool) -> None:
    """Draw one curve. `index`: of the curve in its chart; `faint`: with the raw one below a smoothed one."""
    points = curve.decimated(NUM_BUCKETS)
    marker = "o" if plan.sparse and len(curve) <= 60 else "." if len(curve) <= 3 else None
    style = {"color": colour, "linestyle": _STYLES[index % len(_STYLES)], "marker": marker, "markersize": 3.5}
    if not plan.smoothed or len(curve) <= 3:
        axes.plot(points.steps, points.values, label=label, **style)  # type: ignore[arg-type]
        return
    if faint:
        axes.plot(points.steps, points.values, color=colour, alpha=0.3, linewidth=0.8, label="as logged")
    line = curve.smoothed().decimated(NUM_BUCKETS)
    axes.plot(line.steps, line.values, label="smoothed" if faint else label, **style)  # type: ignore[arg-type]


def _paint_curves(axes: Axes, run: Run, plan: ChartPlan) -> None:
    shown = [(metric, label) for metric, label in plan.metrics.items() if len(run.curve(metric).known)]
    for branch in run.abandoned.values() if len(shown) == 1 else ():
        points = scaled(branch.get(shown[0][0], NO_CURVE), plan).decimated(NUM_BUCKETS)
        if len(points):
            axes.plot(points.steps, points.values, color=LIGHT["abandoned"], linewidth=1, alpha=0.8,
                      linestyle="--", label="taken back")  # fmt: skip
    for index, (metric, label) in enumerate(shown):
        colour = LIGHT[LINES[index % len(LINES)]]
        curve = scaled(run.curve(metric), plan)
        paint_line(axes, curve, colour=colour, label=label, plan=plan, index=index, faint=len(shown) == 1)
    if plan is EVAL_PLAN:
        _paint_lowest(axes, run.curve(shown[0][0]))


def _paint_lowest(axes: Axes, curve: Curve) -> None:
    lowest = int(np.nanargmin(curve.values))
    axes.plot(curve.steps[lowest], curve.values[lowest], "*", color=LIGHT["line2"], markersize=10, label="lowest")


def _paint_limits(axes: Axes, run: Run, plan: ChartPlan) -> None:
    for index, (label, path) in enumerate(plan.limits.items()):
        value = run.number(path)
        if value is not None:
            axes.axhline(value, color=LIGHT[("line3", "alert")[index % 2]], linewidth=1.1,
                         linestyle=(":", "--")[index % 2], label=f"{label} {value:g}")  # fmt: skip


def _paint_events(axes: Axes, run: Run, plan: ChartPlan) -> None:
    """Restarts, rollbacks with the steps they took back, and the alerts that are about this chart's metrics."""
    for entry in run.entries("start"):
        if entry.get("resumed_from"):
            axes.axvline(entry["step"], color=LIGHT["muted"], linewidth=0.9, linestyle=":", label="restart")
    for entry in run.entries("rollback"):
        axes.axvline(entry["step"], color=LIGHT["rollback"], linewidth=1.1, label="rollback")
        axes.axvspan(back_to(entry), entry["step"], color=LIGHT["rollback"], alpha=0.09, linewidth=0)
    marks = [place for place in _alert_places(run, plan) if np.isfinite(place[1])]
    marks = sorted(marks, key=lambda place: -place[1])[:MAX_MARKS]
    if marks:
        steps, values = zip(*marks, strict=True)
        axes.plot(steps, values, linestyle="none", marker="v", markersize=5.5, color=LIGHT["alert"],
                  markeredgecolor=LIGHT["paper"], markeredgewidth=0.5, label="alert", zorder=3)  # fmt: skip


def back_to(rollback: Entry) -> float:
    """The step that a rollback of the ledger went back to."""
    target = rollback.get("to_step")
    return float(target) if is_number(target) else float(rollback["step"])


def _alert_places(run: Run, plan: ChartPlan) -> Iterator[tuple[float, float]]:
    """Step and curve's value of every alert of the chart, on the branch that it happened on."""
    metric = next(iter(plan.metrics))
    for index, entry in enumerate(run.ledger):
        kind = str(entry.get("type"))
        if entry["kind"] != "alert" or not (kind in plan.alerts or (plan is LOSS_PLAN and kind not in _MARKED)):
            continue
        branch = _branch_of(run, index).get(metric, NO_CURVE)
        curve = scaled(branch if len(branch.known) else run.curve(metric), plan)
        finite = np.isfinite(curve.values)
        if finite.any():
            yield entry["step"], float(np.interp(entry["step"], curve.steps[finite], curve.values[finite]))


def _branch_of(run: Run, index: int) -> Mapping[str, Curve]:
    """The curves that the ledger's entry at `index` lies on: those taken back by the next rollback to before it."""
    step = run.ledger[index]["step"]
    for later in run.ledger[index:]:
        if later["kind"] == "rollback" and back_to(later) < step:
            branch = later.get("number")
            return run.abandoned.get(branch, run.curves) if isinstance(branch, int) else run.curves
    return run.curves


def set_scale(axes: Axes, plan: ChartPlan, curves: Sequence[Curve]) -> None:
    """Choose the vertical scale by the values, and label it without exponents that nobody reads."""
    known = np.concatenate([curve.known for curve in curves])
    if plan.log and known.min() > 0 and known.max() > LOG_SCALE_FROM * float(np.median(known)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
    elif plan.from_zero:
        axes.set_ylim(bottom=0, top=None if known.max() > 0 else 1)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if known.max() >= 10_000 else plain)
    axes.set_xlabel("optimizer step")
