"""The charts of a run: what each shows and marks, and how it is drawn.

A chart is SVG to stand in a page, whose light or dark colours it takes, and PNG for everywhere else.
"""

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from ds_encdec.monitor.metrics_file import PERSISTENT_INTERVALS, is_number
from ds_encdec.report.page import number, power_of_ten
from ds_encdec.report.read_run import NO_CURVE, SMOOTHED_FROM, Curve, Run, back_to
from ds_encdec.types import TASKS

COLOURS: dict[str, str] = dict(
    re.findall(r"--(\w+): (#[0-9a-f]{6})", Path(__file__).with_name("page.css").read_text().partition("@media")[0])
)
"""The colours of a light page by name, as its stylesheet has them: no two are the same."""
MAX_HOVERED = 60
"""Steps of a chart whose values a pointer over it is told."""
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

Style = Mapping[str, Any]
Stroke = tuple[Callable[..., Any], tuple[Any, ...], Style]
"""One thing that is drawn: a method of matplotlib's Axes, its positional arguments, and those by name."""

_COLOURED = {
    "ink": ("text.color", "axes.titlecolor"),
    "grid": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "muted": ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
}
_LINES = tuple(name for name in COLOURS if name.startswith("line"))
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_STYLES: Mapping[str, Style] = {
    label: {"label": label, **style}
    for label, style in {
        "taken back": {"color": COLOURS["abandoned"], "linewidth": 1, "alpha": 0.8, "linestyle": "--"},
        "lowest": {"color": COLOURS["line2"], "linestyle": "none", "marker": "*", "markersize": 10},
        "restart": {"color": COLOURS["muted"], "linewidth": 0.9, "linestyle": ":"},
        "rollback": {"color": COLOURS["rollback"], "linewidth": 1.1},
        "steps of the rollback": {"color": COLOURS["rollback"], "alpha": 0.09, "linewidth": 0},
        "alert": {
            "color": COLOURS["alert"], "linestyle": "none", "marker": "v", "markersize": 5.5,
            "markeredgecolor": COLOURS["paper"], "markeredgewidth": 0.5, "zorder": 3,
        },
        "alerts": {
            "xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": COLOURS["alert"],
        },
    }.items()
}  # fmt: skip
"""How the marks of a chart are drawn, by their labels in the legend, which names lines only."""
_LIMITS = ({"color": COLOURS["line3"], "linestyle": ":"}, {"color": COLOURS["alert"], "linestyle": "--"})


class Chart(NamedTuple):
    """A finished chart: `caption` has its key figures, `svg` is an element coloured by the CSS variables `--NAME`."""

    caption: str
    svg: str


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
    `limits`: label, with {} for the value → dotted name of the field that is drawn across, or noted if it is far away.
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
PLANS = {
    plan.key: plan
    for plan in (
        ChartPlan("loss", "Training loss", _NATS, {"train/loss": "loss"}, ("loss_spike", "loss_plateau", "non_finite"),
                  measured_alert="loss_spike", smoothed=True, log=True),
        ChartPlan("loss_by_denoiser", "Loss by denoiser", _NATS, {f"train/loss_{name}": name for name in TASKS},
                  smoothed=True, log=True),
        ChartPlan("eval_loss", "Evaluation loss", _NATS, {"eval/loss": "loss"}, log=True),
        ChartPlan("generation", "Generated texts", "of 100",
                  {"eval/exact_match": "exact match", "eval/rougeL": "ROUGE-L", "eval/chrf": "chrF",
                   "eval/bleu": "BLEU"}, from_zero=True),
        ChartPlan("grad_norm", "Gradient norm", "before clipping", {"train/grad_norm": "norm"},
                  ("grad_explosion", "non_finite"), measured_alert="grad_explosion", smoothed=True, log=True,
                  limits={"clipped above {}": "training.max_grad_norm",
                          "alert above {}": "monitor.grad_norm_threshold"}),
        ChartPlan("learning_rate", "Learning rate", "", {"train/learning_rate": "rate"}, ("learning_rate_off",),
                  from_zero=True),
        ChartPlan("tokens_per_sec", "Throughput", "tokens/s", {"perf/tokens_per_sec": "throughput"},
                  ("throughput_drop",), smoothed=True, from_zero=True),
        ChartPlan("mfu", "MFU", "% of the peak FLOP/s", {"perf/mfu": "MFU"}, smoothed=True, scale=100, from_zero=True),
        ChartPlan("step_time", "Time of an optimizer step", "s", {"perf/step_time_s": "time"}, ("straggler",),
                  smoothed=True, from_zero=True, log=True),
        ChartPlan("memory", "Memory of the largest rank", "GiB",
                  {"mem/peak_bytes": "peak", "mem/host_bytes": "host", "mem/device_bytes": "device"},
                  ("memory_growth",), scale=2**-30, from_zero=True),
        ChartPlan("data_wait", "Waiting for data", "% of the time", {"perf/data_wait_frac": "share"}, ("data_wait",),
                  smoothed=True, scale=100, from_zero=True),
        ChartPlan("checkpoint", "Time of a checkpoint", "s",
                  {"ckpt/blocked_s": "training paused", "ckpt/total_s": "until it was complete"}, from_zero=True),
        ChartPlan("slowest_rank", "Slowest rank over the median rank", "", {"health/slowest_rank_ratio": "time ratio"},
                  ("straggler",),
                  limits={f"alert above {{}}, {PERSISTENT_INTERVALS} times in a row": "monitor.straggler_threshold"}),
    )
}  # fmt: skip
"""The charts of a run by their keys."""
_MARKED = {kind for plan in PLANS.values() for kind in plan.alerts}


def charts_of(run: Run, pictures: Path | None = None) -> tuple[list[Chart], list[str]]:
    """Every chart that the run has values for, and the titles of those that it has none for.

    The loss of a single denoiser or task is left out: it is that of the run.

    `pictures`: a folder that gets each chart as KEY.png.
    """
    sets = {name: name.split("/")[1] for name in run.curves if re.fullmatch(r"eval/[^/]+/loss", name)}  # data.eval_sets
    of_sets = {"eval_sets": ChartPlan("eval_sets", "Evaluation loss by set", _NATS, sets, log=True)} if sets else {}
    plans = {**PLANS, **of_sets}
    known = {key: sum(len(run.curve(metric).known) > 0 for metric in plan.metrics) for key, plan in plans.items()}
    repeats = {"loss_by_denoiser"} if known["loss"] and known["loss_by_denoiser"] == 1 else set()  # the loss itself
    charts = [_chart(run, plan, pictures) for key, plan in plans.items() if known[key] and key not in repeats]
    return charts, [plan.title for key, plan in plans.items() if not known[key]]


def _chart(run: Run, plan: ChartPlan, pictures: Path | None) -> Chart:
    logged = {label: run.curve(metric).scaled(plan.scale) for metric, label in plan.metrics.items()}
    curves = {label: curve for label, curve in logged.items() if len(curve.known)}
    if "peak" in curves and "device" not in curves:  # without a GPU it is the same memory as the host's
        curves = {"host, highest so far" if label == "peak" else label: curve for label, curve in curves.items()}
    first, *others = plan.metrics
    taken_back = [] if others else [branch.get(first, NO_CURVE).scaled(plan.scale) for branch in run.abandoned.values()]
    marks = alert_marks(run, plan)
    known = np.concatenate([[mark.value for mark in marks], *(curve.known for curve in curves.values())])
    limits = {form.format(number(v)): v for form, path in plan.limits.items() if (v := run.number(path)) is not None}
    reach = LIMIT_WITHIN * np.ptp(known)
    far = [label for label, limit in limits.items() if not known.min() - reach <= limit <= known.max() + reach]
    rollbacks = [(back_to(entry), entry["step"]) for entry in run.entries("rollback")]
    strokes: list[Stroke] = [
        *(_line(curve, _STYLES["taken back"]) for curve in taken_back if len(curve)),
        *(
            line
            for index, (label, curve) in enumerate(curves.items())
            for line in lines(curve, plan, label, index, alone=not others)
        ),
    ]
    if plan.key == "eval_loss":
        (curve,) = curves.values()
        lowest = int(np.nanargmin(curve.values))
        strokes.append((Axes.plot, (curve.steps[lowest], curve.values[lowest]), _STYLES["lowest"]))
    strokes += [
        *(
            (Axes.axhline, (limit,), {"label": label, "linewidth": 1.1, **style})
            for (label, limit), style in zip(limits.items(), _LIMITS, strict=False)
            if label not in far
        ),
        *((Axes.axvline, (e["step"],), _STYLES["restart"]) for e in run.entries("start") if e.get("resumed_from")),
        *((Axes.axvline, (end,), _STYLES["rollback"]) for _, end in rollbacks),
        *((Axes.axvspan, span, _STYLES["steps of the rollback"]) for span in rollbacks),
    ]
    # Each mark is a triangle, with the number of its alerts beside it where it stands for several.
    drawn = marks[:MAX_MARKS]
    if drawn:
        strokes.append((Axes.plot, ([mark.step for mark in drawn], [mark.value for mark in drawn]), _STYLES["alert"]))
    strokes += [
        (Axes.annotate, (f"×{mark.times}", (mark.step, mark.value)), _STYLES["alerts"])
        for mark in drawn
        if mark.times > 1
    ]
    return draw(plan, "; ".join([describe(curves, marks), *far]), strokes, known, pictures=pictures, hovered=curves)


def describe(curves: Mapping[str, Curve], marks: Sequence[AlertMark] = ()) -> str:
    """The key figures of a chart's curves, by label, in words; an alert may be higher than all that was logged."""
    if len(curves) > 1:
        return "last " + ", ".join(f"{label} {number(curve.known[-1])}" for label, curve in curves.items())
    (curve,) = curves.values()
    lowest, highest = int(np.nanargmin(curve.values)), int(np.nanargmax(curve.values))
    top, at, remark = curve.values[highest], curve.steps[highest], ""
    if marks and marks[0].value > top:
        top, at, remark = marks[0].value, marks[0].step, " (alert)"
    gaps = len(curve) - len(curve.known)
    return (
        f"first {number(curve.known[0])}, last {number(curve.known[-1])}, "
        f"lowest {number(curve.values[lowest])} at step {curve.steps[lowest]:,.0f}, "
        f"highest {number(top)} at step {at:,.0f}{remark}"
    ) + (f", {gaps} not finite" if gaps else "")


def lines(curve: Curve, plan: ChartPlan, label: str, index: int = 0, *, alone: bool) -> list[Stroke]:
    """One curve; one of a `smoothed` plan with points enough as a smoothed line above the faint raw one.

    `index`: of the curve in its chart. `alone`: it is the only one, so that the legend does not repeat the title, but
    names its two lines. If a chart has several metrics, only the smoothed lines are drawn.
    """
    colour = COLOURS[_LINES[index % len(_LINES)]]
    style: Style = {"color": colour, "linestyle": _DASHES[index % len(_DASHES)], "label": "" if alone else label}
    if not plan.smoothed or len(curve) < SMOOTHED_FROM:
        marker = "o" if len(curve) <= FEW_POINTS else "." if plan.smoothed else None
        return [_line(curve, {**style, "marker": marker})]
    smoothed = _line(curve.smoothed(), {**style, "label": "smoothed"} if alone else style)
    faint = {"color": colour, "alpha": 0.4, "linewidth": 0.8, "label": "as logged" if alone else ""}
    return [_line(curve, faint), smoothed] if len(plan.metrics) == 1 else [smoothed]


def _line(curve: Curve, style: Style) -> Stroke:
    points = curve.decimated(NUM_BUCKETS)
    return Axes.plot, (points.steps, points.values), style


def alert_marks(run: Run, plan: ChartPlan) -> list[AlertMark]:
    """The marks of a chart, the highest first.

    An alert is at its own value where that is the metric, or else on the curve, of the branch that it lies on if a
    rollback took that back. Alerts of one step and branch have one mark together, at the highest: they would hide each
    other, as those of skipped steps do, which are all at the applied step before.
    """
    heights: dict[tuple[float, int], list[float]] = defaultdict(list)
    metric = next(iter(plan.metrics))
    for index, alert in enumerate(run.events):
        kind, step, value = str(alert.get("type")), alert["step"], alert.get("value")
        is_marked = kind in plan.alerts or (plan.key == "loss" and kind not in _MARKED)
        if alert["kind"] != "alert" or not is_marked:
            continue
        later = (entry for entry in run.events[index:] if entry["kind"] == "rollback" and back_to(entry) < step)
        number = next(later, {}).get("number")
        branch = number if isinstance(number, int) else -1
        if kind != plan.measured_alert or not is_number(value):
            taken_back = run.abandoned.get(branch, {}).get(metric, NO_CURVE)
            value = float((taken_back if len(taken_back.known) else run.curve(metric)).at(np.array([step]))[0])
        if not np.isnan(value):
            heights[step, branch].append(value * plan.scale)
    marks = [AlertMark(step, max(values), len(values)) for (step, _), values in heights.items()]
    return sorted(marks, key=lambda mark: -mark.value)


def draw(
    plan: ChartPlan,
    caption: str,
    strokes: Iterable[Stroke],
    known: np.ndarray,
    over: str = "optimizer step",
    pictures: Path | None = None,
    hovered: Mapping[str, Curve] = MappingProxyType({}),
) -> Chart:
    """Draw `strokes` into one pair of axes over the horizontal axis `over`.

    `plan`: its key is unique in the page; its vertical scale is chosen by the values `known` (float64 [n], finite). A
    screen reader reads its heading and `caption`, a pointer over it the values of the curves `hovered`, by label.
    `pictures`: a folder that gets the drawing as KEY.png, too. The same strokes give the same bytes.
    """
    coloured: dict[Any, Any] = {name: COLOURS[colour] for colour, names in _COLOURED.items() for name in names}
    sheet = Path(__file__).with_name("drawing.mplstyle")
    with matplotlib.rc_context({**coloured, "svg.hashsalt": plan.key}, sheet), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run may be named in any script
        figure = Figure()
        axes = figure.add_subplot(title=plan.heading, xlabel=over)
        for method, values, style in strokes:
            method(axes, *values, **style)
        if plan.log and known.min() > 0 and known.max() > LOG_SCALE_FROM * float(np.median(known)):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
            axes.yaxis.set_minor_locator(NullLocator())
        elif plan.from_zero:
            axes.set_ylim(bottom=0, top=None if known.max() > 0 else 1)
        # The labels are written as other numbers of the page are, and all in one way.
        written = power_of_ten if np.abs(known).max() < 0.01 else number
        large = EngFormatter(sep="")
        axes.yaxis.set_major_formatter(large if known.max() >= 10_000 else lambda value, _: written(value))
        _add_legend(figure, axes)
        # More ticks than intervals between points would be where nothing was logged.
        intervals = max([4, *(np.size(line.get_xdata()) - 1 for line in axes.lines)])
        axes.xaxis.set_major_locator(MaxNLocator(min(6, intervals), steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        strips = "".join(_strips(figure, axes, hovered, over))
        if pictures is not None:
            figure.set_layout_engine("none")  # it is laid out; a second time would take as long again
            png = pictures / f"{plan.key}.png"
            figure.savefig(png, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    drawing = _for_page(svg.getvalue(), plan.key, f"{plan.heading}: {caption}")
    return Chart(caption, f"{drawing.removesuffix('</svg>')}{strips}</svg>")


def _strips(figure: Figure, axes: Axes, curves: Mapping[str, Curve], over: str) -> Iterator[str]:
    """Invisible strips over a drawing, each of which browsers show the values of the `curves` at its step for."""
    steps = np.unique(np.concatenate([[], *(curve.steps[np.isfinite(curve.values)] for curve in curves.values())]))
    steps = steps[:: -(-len(steps) // MAX_HOVERED) or 1]
    if not len(steps):
        return
    box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())  # in inches, from below
    top, height = 72 * (figure.get_figheight() - box.y1), 72 * box.height
    left, right = axes.get_xlim()
    middles = (steps[1:] + steps[:-1]) / 2
    edges = 72 * (box.x0 + box.width * (np.array([left, *middles, right]) - left) / (right - left))
    for i, step in enumerate(steps):
        values = ((label, curve.at(np.array([step]), beyond=np.nan)[0]) for label, curve in curves.items())
        told = "".join(f"\n{label} {number(value)}" for label, value in values if not np.isnan(value))
        yield (
            f'<rect x="{edges[i]:.1f}" y="{top:.1f}" width="{edges[i + 1] - edges[i]:.1f}" height="{height:.1f}" '
            f'fill="none" pointer-events="all"><title>{escape(f"{over} {step:,.0f}{told}")}</title></rect>'
        )


def _add_legend(figure: Figure, axes: Axes) -> None:
    """One entry a label, in a row or more below the drawing, where no curve can be under it."""
    named = {str(line.get_label()): line for line in axes.lines}
    # Not axes.get_legend_handles_labels(), which leaves out runs whose names begin with an underscore.
    entries = {label: line for label, line in named.items() if label and not re.fullmatch(r"_child\d+", label)}
    if entries:
        columns = max(1, min(len(entries), int(figure.get_figwidth() * 14 / (max(map(len, entries)) + 6))))
        figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=columns)


def _for_page(svg: str, key: str, label: str) -> str:
    """The `<svg>` element alone, with names of its own, variables for colours, and a description."""
    head, body = svg[svg.index("<svg") :].split(">", 1)
    view_box = head.split('viewBox="')[1].split('"')[0]
    rows = [
        (r'\bid="', f'id="{key}-'),
        (r'(url\(|href=")#', rf"\g<1>#{key}-"),
        (r" font-family: [^;\"]*;", ""),
        *((colour, f"var(--{name})") for name, colour in COLOURS.items()),
    ]
    for pattern, text in rows:
        body = re.sub(pattern, text, body)
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{view_box}">{body.strip()}'
