"""The page of a pipeline of phases: their losses one behind the other, and each one's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import PhasesConfig
from ds_encdec.report.charts import EVAL_PLAN, LOSS_PLAN, Chart, ChartPlan, describe, paint_line, set_scale
from ds_encdec.report.curve import SMOOTHED_FROM, Curve
from ds_encdec.report.drawing import LIGHT, WIDE, draw
from ds_encdec.report.markup import Html, element, items, join, paragraph, section
from ds_encdec.report.read_run import Entry, Run, read_json, read_run
from ds_encdec.report.run_page import figure, gate, verdict_table
from ds_encdec.types import ConfigError, DataError


@dataclass(frozen=True)
class Phase:
    """One phase that was begun. `run`: None where it has logged nothing; `verdict`: None where it was not judged."""

    name: str
    run: Run | None
    verdict: Entry | None


def phase_folders(root: Path) -> list[Path]:
    """The folders of the phases in `root`, in their order; empty where it holds no pipeline."""
    order = list(PhasesConfig.model_fields)
    found = [path for path in (root / "phases").glob("*") if path.is_dir()]
    return sorted(found, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name))


def read_phases(root: Path, notes: list[str]) -> list[Phase]:
    """The phases in `root`. Raises DataError where none of them has logged anything."""
    phases = []
    for folder in phase_folders(root):
        run = None
        try:
            run = read_run(folder)
        except (ConfigError, DataError) as error:
            notes.append(str(error))
        phases.append(Phase(folder.name, run, run.verdict if run else read_json(folder / "result.json", notes)))
    if not any(phase.run for phase in phases):
        raise DataError(f"{root / 'phases'}: none of the phases has logged metrics, so there is nothing to draw.")
    return phases


def phases_body(root: Path, phases: Sequence[Phase], notes: Sequence[str]) -> tuple[Html, list[Chart]]:
    """The page's content and its charts. Each phase's own page is expected in a folder of its name beside it."""
    charts = [_chart(plan, phases) for plan in (LOSS_PLAN, EVAL_PLAN) if _has_values(plan, phases)]
    judged = [phase.verdict for phase in phases if phase.verdict is not None]
    open_phases = [phase.name for phase in phases if phase.verdict is None]
    verdicts = [element("span", words, class_=level) for level, words in map(gate, judged)]
    waiting = [element("span", f"! {name} was begun and not judged.", class_="warn") for name in open_phases]
    links = [element("a", f"Report of {phase.name}", href=f"{phase.name}/index.html") for phase in phases if phase.run]
    return join(
        [
            element("h1", f"{root.name}: phases"),
            paragraph(element("code", str(root)), class_="muted"),
            items([*verdicts, *waiting], class_="verdict"),
            items(links),
            items([element("span", note, class_="muted") for note in notes]),
            section("Charts", element("div", join(figure(chart) for chart in charts), class_="charts")),
            section("Gates", verdict_table(judged) if judged else paragraph("No phase was judged yet.")),
        ]
    ), charts


def _has_values(plan: ChartPlan, phases: Sequence[Phase]) -> bool:
    return any(len(phase.run.curve(metric).known) for phase in phases if phase.run for metric in plan.metrics)


def _chart(plan: ChartPlan, phases: Sequence[Phase]) -> Chart:
    """The plan's metric over the steps of all phases together, each phase behind the one before."""
    (metric,) = plan.metrics
    ran = [(phase, phase.run) for phase in phases if phase.run]
    ends = np.cumsum([run.steps for _, run in ran])
    starts = [0, *ends[:-1]]
    curves = [
        run.curve(metric).at(run.curve(metric).steps + start) for (_, run), start in zip(ran, starts, strict=True)
    ]
    whole = Curve(np.concatenate([c.steps for c in curves]), np.concatenate([c.values for c in curves]))

    any_smoothed = plan.smoothed and any(len(curve) >= SMOOTHED_FROM for curve in curves)
    label = "not smoothed" if any_smoothed else "loss"

    def paint(axes: Axes) -> None:
        axes.set_title(plan.title)
        for curve in curves:
            if len(curve.known):
                paint_line(axes, curve, colour=LIGHT["line1"], label=label, plan=plan, index=0, alone=True)
        set_scale(axes, plan, [whole])
        axes.set_xlim(left=0)
        axes.set_xlabel("optimizer step, all phases")
        for (phase, _), start, end in zip(ran, starts, ends, strict=True):
            _mark_phase(axes, phase, start, end)

    key, title, caption = f"phases_{plan.key}", f"{plan.title}, all phases", describe({"loss": whole})
    told = f"{title}: {caption}"
    return Chart(key, title, caption, draw(key, paint, label=told), draw(f"{key}-wide", paint, size=WIDE, label=told))


def _mark_phase(axes: Axes, phase: Phase, start: float, end: float) -> None:
    """A line where the phase's gate stood, and its name before it."""
    passed = phase.verdict is not None and phase.verdict.get("passed") is True
    label = "gate passed" if passed else "gate not passed" if phase.verdict is not None else "not judged"
    colour = LIGHT["line3" if passed else "rollback"]
    axes.axvline(end, color=colour, linewidth=1.2, linestyle="-" if passed else "--", label=label)
    axes.annotate(
        f"{phase.name} {'✓' if passed else '✗' if phase.verdict is not None else ''}",
        (end, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-3, -4),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        fontsize=8.5,
        color=LIGHT["muted"],
    )
