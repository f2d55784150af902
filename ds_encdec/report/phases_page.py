"""The page of a pipeline of phases: their losses one behind the other, and each one's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import PhasesConfig
from ds_encdec.report.charts import EVAL_PLAN, LOSS_PLAN, ChartPlan, describe, paint_line, set_scale
from ds_encdec.report.drawing import COLOURS, Chart, draw
from ds_encdec.report.read_run import SMOOTHED_FROM, Curve, Entry, Run, read_json, read_run
from ds_encdec.types import ConfigError, DataError


@dataclass(frozen=True)
class Phase:
    """One phase. `run`: None where it has logged nothing; `verdict`: None where it was not judged."""

    name: str
    began: bool
    run: Run | None
    verdict: Entry | None

    @property
    def state(self) -> tuple[str, str, str]:
        """How far it has come: (ok | bad | warn | muted, a mark, words)."""
        if self.verdict is not None:
            passed = self.verdict.get("passed") is True
            return ("ok", "✓", "gate passed") if passed else ("bad", "✗", "gate not passed")
        return ("warn", "!", "was begun and not judged") if self.began else ("muted", "○", "not started")


def phase_folders(root: Path) -> list[Path]:
    """The folders of the phases in `root`, in their order; empty where it holds no pipeline."""
    order = list(PhasesConfig.model_fields)
    found = [path for path in (root / "phases").glob("*") if path.is_dir()]
    return sorted(found, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name))


def read_phases(root: Path, notes: list[str]) -> list[Phase]:
    """All phases, begun in `root` or not, in their order. Raises DataError where none of them has logged anything."""
    folders = {folder.name: folder for folder in phase_folders(root)}
    phases = []
    for name in dict.fromkeys([*PhasesConfig.model_fields, *folders]):
        run = verdict = None
        if name in folders:
            try:
                run = read_run(folders[name])
                verdict = run.verdict
            except (ConfigError, DataError) as error:
                notes.append(str(error))
                verdict = read_json(folders[name] / "result.json", notes)
        phases.append(Phase(name, name in folders, run, verdict))
    if not any(phase.run for phase in phases):
        raise DataError(f"{root / 'phases'}: none of the phases has logged metrics, so there is nothing to draw.")
    return phases


def phase_charts(phases: Sequence[Phase], pictures: Path | None) -> list[Chart]:
    """The losses over the steps of all phases together, each phase behind the one before; those that were logged."""
    ran = [(phase, phase.run) for phase in phases if phase.run]
    ends = np.cumsum([run.steps for _, run in ran])
    return [chart for plan in (LOSS_PLAN, EVAL_PLAN) if (chart := _chart(plan, ran, [0, *ends], pictures)) is not None]


def _chart(
    plan: ChartPlan, ran: Sequence[tuple[Phase, Run]], ends: Sequence[int], pictures: Path | None
) -> Chart | None:
    """The plan's metric, where one has logged it; `ends`: 0, and the step that each phase ended at."""
    (metric,) = plan.metrics
    curves = [(c := run.curve(metric)).at(c.steps + start) for (_, run), start in zip(ran, ends[:-1], strict=True)]
    whole = Curve(np.concatenate([c.steps for c in curves]), np.concatenate([c.values for c in curves]))
    if not len(whole.known):
        return None
    mixed = plan.smoothed and any(len(curve) >= SMOOTHED_FROM for curve in curves)

    def paint(axes: Axes) -> None:
        for curve in curves:
            if len(curve.known):
                alone = not mixed or len(curve) >= SMOOTHED_FROM
                paint_line(axes, curve, plan, "not smoothed", alone=alone)
        set_scale(axes, plan, whole.known)
        axes.set_xlim(left=0)
        for (phase, _), end in zip(ran, ends[1:], strict=True):
            _mark_gate(axes, phase, end)

    key, title = f"phases_{plan.key}", f"{plan.heading}, all phases"
    return draw(key, title, describe({"loss": whole}), paint, pictures, "optimizer step, all phases")


def _mark_gate(axes: Axes, phase: Phase, end: float) -> None:
    """A line where the phase's gate was, and its name before it."""
    judged = phase.verdict is not None
    level, mark, words = phase.state if judged else ("", "", "not judged")
    colour, dashes = ("line3", "-") if level == "ok" else ("rollback", "--")
    axes.axvline(end, color=COLOURS[colour], linewidth=1.2, linestyle=dashes, label=words)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (-3, -4), "textcoords": "offset points"}
    style: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 8.5, "color": COLOURS["muted"]}
    axes.annotate(f"{phase.name} {mark}", (end, 1.0), **place, **style)
