"""The charts of a run: their contents and marks, and how they are drawn as SVG for a page, and as PNG."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from ds_encdec.registry.objectives import FIGURES, TASKS
from ds_encdec.report.page import number, power_of_ten
from ds_encdec.report.read_run import NO_CURVE, SMOOTHED_FROM, Curve, Run, back_to

# The colours of a light page by name, from its stylesheet: no two are the same.
COLOURS: dict[str, str] = dict(
    re.findall(r"--(\w+): (#[0-9a-f]{6})", Path(__file__).with_name("page.css").read_text().partition("@media")[0])
)
MAX_MARKS = 150  # most alerts marked in one chart, the newest ones; the table has the others too
FEW_POINTS = 60  # most points with which a curve that is not smoothed has a mark at each
LOG_SCALE_FROM = 20.0  # highest value over the median from which a curve with `log` is drawn on a logarithmic scale

Style = dict[str, Any]

_COLOURED = {
    "ink": ("text.color", "axes.titlecolor"),
    "grid": ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"),
    "muted": ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"),
}
_RC: dict[Any, Any] = {name: COLOURS[colour] for colour, names in _COLOURED.items() for name in names}
# A decorator that draws figures in the style of the page, and makes the same figure give the same bytes.
styled = matplotlib.rc_context({**_RC, "svg.hashsalt": "report"}, Path(__file__).with_name("drawing.mplstyle"))
_LINES = tuple(name for name in COLOURS if name.startswith("line"))
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_TAKEN_BACK: Style = {"label": "taken back", "color": COLOURS["abandoned"], "lw": 1, "alpha": 0.8, "ls": "--"}
_RESTART: Style = {"label": "restart", "color": COLOURS["muted"], "lw": 0.9, "ls": ":"}
_ROLLBACK: Style = {"label": "rollback", "color": COLOURS["rollback"], "lw": 1.1}
_ALERT: Style = {"label": "alert", "color": COLOURS["alert"], "ls": "none", "marker": "v", "markersize": 5.5,
                 "markeredgecolor": COLOURS["paper"], "markeredgewidth": 0.5, "zorder": 3}  # fmt: skip


class Chart(NamedTuple):
    """A finished chart: `caption` has its key figures, `svg` is an element coloured by the CSS variables `--NAME`."""

    caption: str
    svg: str


@dataclass(frozen=True)
class ChartPlan:
    """The contents of a chart. `key` names its file; `metrics` maps names to labels; `alerts` are the types marked on
    it. `smoothed`: many points are drawn faintly below a smoothed curve. `scale` multiplies the values. `from_zero`:
    the axis begins at 0. `log`: the axis may be logarithmic."""

    key: str
    title: str
    unit: str
    metrics: Mapping[str, str]
    alerts: tuple[str, ...] = ()
    smoothed: bool = False
    scale: float = 1.0
    from_zero: bool = False
    log: bool = False

    @property
    def heading(self) -> str:
        """Return title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def axes(self, over: str = "optimizer step") -> Axes:
        """Return the axes of a new figure for the chart, over the horizontal axis `over`."""
        return Figure().add_subplot(title=self.heading, xlabel=over)

    def curve(self, curves: Mapping[str, Curve], metric: str) -> Curve:
        """Return the metric's curve in the unit of the chart; empty if it was never logged."""
        found = curves.get(metric, NO_CURVE)
        return Curve(found.steps, found.values * self.scale)


_NATS = "nats per token"
PLANS = {  # by key
    plan.key: plan
    for plan in (
        ChartPlan("loss", "Training loss", _NATS, {"train/loss": "loss"}, ("loss_spike", "loss_plateau", "non_finite"),
                  smoothed=True, log=True),
        ChartPlan("loss_by_denoiser", "Loss by denoiser", _NATS, {f"train/loss_{name}": name for name in TASKS},
                  smoothed=True, log=True),
        ChartPlan("eval_loss", "Evaluation loss", _NATS, {"eval/loss": "loss"}, log=True),
        ChartPlan("generation", "Generated texts", "of 100",
                  {"eval/exact_match": "exact match", "eval/rougeL": "ROUGE-L", "eval/chrf": "chrF",
                   "eval/bleu": "BLEU"}, from_zero=True),
        ChartPlan("grad_norm", "Gradient norm", "before clipping", {"train/grad_norm": "norm"},
                  ("grad_explosion", "non_finite"), smoothed=True, log=True),
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
                  ("straggler",)),
    )
}  # fmt: skip
_OF_OBJECTIVES = {
    key: ChartPlan(
        key,
        key.replace("_", " ").capitalize(),
        "",
        {f"{place}/{name}": f"{name}, {place}" for place in ("train", "eval") for name in names},
        smoothed=True,
    )
    for key in dict.fromkeys(figure.chart for figure in FIGURES.values())
    if (names := [name for name, figure in FIGURES.items() if figure.chart == key])
}


@styled
def charts_of(run: Run, pictures: Path | None = None) -> tuple[list[Chart], list[str]]:
    """Return every chart that the run has values for, and the titles of the others. `pictures` is a folder for KEY.png
    of each. The loss of a single denoiser or task is left out: it is that of the run."""
    sets = {name: name.split("/")[1] for name in run.curves if re.fullmatch(r"eval/[^/]+/loss", name)}  # data.eval_sets
    of_sets = {"eval_sets": ChartPlan("eval_sets", "Evaluation loss by set", _NATS, sets, log=True)} if sets else {}
    plans = {**PLANS, **_OF_OBJECTIVES, **of_sets}
    known = {key: sum(len(run.curve(metric).known) > 0 for metric in plan.metrics) for key, plan in plans.items()}
    repeats = {"loss_by_denoiser"} if known["loss"] and known["loss_by_denoiser"] == 1 else set()  # the loss itself
    charts = [_chart(run, plan, pictures) for key, plan in plans.items() if known[key] and key not in repeats]
    return charts, [plan.title for key, plan in plans.items() if not known[key] and key in PLANS]


def _chart(run: Run, plan: ChartPlan, pictures: Path | None) -> Chart:
    curves = {label: plan.curve(run.curves, metric) for metric, label in plan.metrics.items()}
    curves = {label: curve for label, curve in curves.items() if len(curve.known)}
    known = np.concatenate([curve.known for curve in curves.values()])
    axes, alone = plan.axes(), len(plan.metrics) == 1
    for taken_back in run.abandoned.values() if alone else ():
        branch = plan.curve(taken_back, next(iter(plan.metrics)))
        axes.plot(branch.steps, branch.values, **_TAKEN_BACK)
    for index, (label, curve) in enumerate(curves.items()):
        draw_curve(axes, curve, plan, label, index, alone=alone)
    for entry in run.entries("start"):
        if entry.get("resumed_from"):
            axes.axvline(entry["step"], **_RESTART)
    for entry in run.entries("rollback"):
        axes.axvline(entry["step"], **_ROLLBACK)
        axes.axvspan(back_to(entry), entry["step"], color=COLOURS["rollback"], alpha=0.09, linewidth=0)
    if len((marks := alert_marks(run, plan)).known):
        axes.plot(marks.steps, marks.values, **_ALERT)
    return finish(axes, plan, describe(curves), known, pictures)


def describe(curves: Mapping[str, Curve]) -> str:
    """Return the key figures of a chart's curves in words."""
    if len(curves) > 1:
        return "last " + ", ".join(f"{label} {number(curve.known[-1])}" for label, curve in curves.items())
    (curve,) = curves.values()
    lowest, highest = int(np.nanargmin(curve.values)), int(np.nanargmax(curve.values))
    gaps = len(curve) - len(curve.known)
    return (
        f"first {number(curve.known[0])}, last {number(curve.known[-1])}, "
        f"lowest {number(curve.values[lowest])} at step {curve.steps[lowest]:,.0f}, "
        f"highest {number(curve.values[highest])} at step {curve.steps[highest]:,.0f}"
    ) + (f", {gaps} not finite" if gaps else "")


def draw_curve(axes: Axes, curve: Curve, plan: ChartPlan, label: str, index: int = 0, *, alone: bool) -> None:
    """Draw curve number `index` of a chart; with enough points in a `smoothed` plan, smoothed above the faint raw one.
    `alone`: the chart has no other curve, so the legend names the two lines and not the metric, which is the title."""
    colour = COLOURS[_LINES[index % len(_LINES)]]
    style: Style = {"color": colour, "linestyle": _DASHES[index % len(_DASHES)], "label": "" if alone else label}
    if not plan.smoothed or len(curve) < SMOOTHED_FROM:
        style |= {"marker": "o" if len(curve) <= FEW_POINTS else "." if plan.smoothed else None}
    else:
        if len(plan.metrics) == 1:
            faint: Style = {"color": colour, "alpha": 0.4, "linewidth": 0.8, "label": "as logged" if alone else ""}
            axes.plot(curve.steps, curve.values, **faint)
        curve = curve.smoothed()
        style |= {"label": "smoothed"} if alone else {}
    axes.plot(curve.steps, curve.values, **style)


def alert_marks(run: Run, plan: ChartPlan) -> Curve:
    """Return the newest steps with an alert that is marked on the chart, and their heights on its first curve."""
    marked = {entry["step"] for entry in run.entries("alert") if entry.get("type") in plan.alerts}
    steps = np.array(sorted(marked)[-MAX_MARKS:], dtype=np.float64)
    return Curve(steps, run.curve(next(iter(plan.metrics))).at(steps) * plan.scale)


def finish(axes: Axes, plan: ChartPlan, caption: str, known: np.ndarray, pictures: Path | None) -> Chart:
    """Turn the drawing into a chart, and write it to the folder `pictures`, if any, as KEY.png. `known` (float64 [n],
    finite) chooses the vertical scale; the plan's key is unique in the page."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    if plan.log and known.min() > 0 and known.max() > LOG_SCALE_FROM * float(np.median(known)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
    elif plan.from_zero:
        axes.set_ylim(bottom=0, top=None if known.max() > 0 else 1)
    written, large = power_of_ten if np.abs(known).max() < 0.01 else number, EngFormatter(sep="")
    axes.yaxis.set_major_formatter(large if known.max() >= 10_000 else lambda value, _: written(value))
    # More ticks than intervals would stand between points, where nothing was logged.
    intervals = max([4, *(np.size(line.get_xdata()) - 1 for line in axes.lines)])
    axes.xaxis.set_major_locator(MaxNLocator(min(6, intervals), steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(large)
    handles, labels = axes.get_legend_handles_labels()
    if entries := dict(zip(labels, handles, strict=True)):  # below the drawing, where it covers no curve
        columns = max(1, min(len(entries), int(figure.get_figwidth() * 14 / (max(map(len, entries)) + 6))))
        figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=columns)
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    if pictures is not None:
        figure.set_layout_engine("none")  # a second layout would take as long again
        figure.savefig(pictures / f"{plan.key}.png", dpi=160, facecolor="white", metadata={"Software": None})
    return Chart(caption, _for_page(svg.getvalue(), plan.key, f"{plan.heading}: {caption}"))


def _for_page(svg: str, key: str, label: str) -> str:
    """Return the `<svg>` element alone, with unique ids, variables for colours, and a description."""
    head, body = svg[svg.index("<svg") :].split(">", 1)
    view_box = head.split('viewBox="')[1].split('"')[0]
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\g<1>#{key}-", body)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{view_box}">{body.strip()}'
