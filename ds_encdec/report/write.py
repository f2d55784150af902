"""`ds-encdec report`: one page with pictures about a run, or a pipeline of phases, and the pictures as files.

The page of a pipeline has the losses of its phases one behind the other, and each one's verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import PhasesConfig
from ds_encdec.launch.disk import write_atomically
from ds_encdec.report.charts import (
    COLOURS,
    EVAL_PLAN,
    LOSS_PLAN,
    Chart,
    ChartPlan,
    Stroke,
    charts_of,
    describe,
    draw,
    lines,
)
from ds_encdec.report.compare import compare_runs
from ds_encdec.report.page import render
from ds_encdec.report.read_run import SMOOTHED_FROM, Curve, Entry, Run, back_to, read_json, read_run
from ds_encdec.types import ConfigError, DataError

_NAME = {
    "xycoords": ("data", "axes fraction"), "xytext": (-3, -4), "textcoords": "offset points",
    "rotation": 90, "ha": "right", "va": "top", "fontsize": 8.5, "color": COLOURS["muted"],
}  # fmt: skip


def write_report(
    path: Path, *, compare: Sequence[Path] = (), out: Path | None = None, png: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of the run in `path`, or of the phases in it; returns the page and what to warn of.

    `compare`: further runs, whose curves are laid over this one's. `out`: the folder of the page, RUN/report by
    default; an earlier report in it is replaced. `png`: each chart lies beside the page as a picture, too.

    Raises ConfigError for a path that is no run or a folder that cannot be written, DataError for a run without
    metrics and for runs that cannot be compared.
    """
    paths = [one.expanduser() for one in (path, *compare)]
    folder = (paths[0] / "report" if out is None else out).expanduser()
    pipelines = [one for one in paths if phase_folders(one) and not (one / "metrics.jsonl").exists()]
    if pipelines and compare:
        raise ConfigError(
            f"{pipelines[0]} is the folder of a pipeline of phases, and --compare takes single runs: name one of its "
            f"phases, e.g. {phase_folders(pipelines[0])[-1]}."
        )
    try:
        if pipelines:
            return _write_phases(paths[0].resolve(), folder, png=png), []
        return _write_run([read_run(one) for one in paths], folder, png=png)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {folder} ({error.strerror}); choose another folder.") from error


def _write_run(runs: Sequence[Run], folder: Path, *, png: bool) -> tuple[Path, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)  # before the time is spent on drawing
    run, pictures = runs[0], folder if png else None
    comparison = compare_runs(runs, pictures) if len(runs) > 1 else {"warnings": []}
    charts, empty = charts_of(run, pictures)
    alerts = Counter(str(entry.get("type", "unknown")) for entry in run.entries("alert"))
    page = render(
        "run.html.j2",
        run=run,
        comparison=comparison,
        charts=charts,
        empty=empty,
        alert_types=alerts.most_common(),
        steps_taken_back=int(sum(entry["step"] - back_to(entry) for entry in run.entries("rollback"))),
    )
    return _write(folder, page), comparison["warnings"]


def _write(folder: Path, text: str) -> Path:
    # JSON may hold halves of surrogate pairs, which no encoding has.
    write_atomically(folder / "index.html", text.encode("utf-8", "replace"))
    return folder / "index.html"


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


def _write_phases(root: Path, folder: Path, *, png: bool) -> Path:
    """The page of all phases, begun in `root` or not, and of each. Raises DataError where none has logged anything."""
    notes: list[str] = []
    folders = {path.name: path for path in phase_folders(root)}
    phases = []
    for name in dict.fromkeys([*PhasesConfig.model_fields, *folders]):
        run = None
        try:
            run = read_run(folders[name]) if name in folders else None
        except (ConfigError, DataError) as error:
            notes.append(str(error))
        verdict = run.verdict if run else read_json(root / "phases" / name / "result.json", notes)
        phases.append(Phase(name, name in folders, run, verdict))
    ran = [(phase, phase.run) for phase in phases if phase.run]
    if not ran:
        raise DataError(f"{root / 'phases'}: none of the phases has logged metrics, so there is nothing to draw.")
    folder.mkdir(parents=True, exist_ok=True)
    for phase, run in ran:
        _write_run([run], folder / phase.name, png=png)
    judged = [phase.verdict for phase in phases if phase.verdict is not None]
    drawn = [_chart_of_phases(plan, ran, folder if png else None) for plan in (LOSS_PLAN, EVAL_PLAN)]
    charts = [chart for chart in drawn if chart]
    return _write(folder, render("phases.html.j2", root=root, phases=phases, judged=judged, notes=notes, charts=charts))


def _chart_of_phases(plan: ChartPlan, ran: Sequence[tuple[Phase, Run]], pictures: Path | None) -> Chart | None:
    """The plan's metric over the steps of all phases, each behind the one before; None where none has logged it."""
    (metric,) = plan.metrics
    ends = [0, *np.cumsum([run.steps for _, run in ran])]
    logged = [(run.curve(metric), start) for (_, run), start in zip(ran, ends[:-1], strict=True)]
    curves = [Curve(curve.steps + start, curve.values) for curve, start in logged]
    whole = Curve(np.concatenate([c.steps for c in curves]), np.concatenate([c.values for c in curves]))
    if not len(whole.known):
        return None
    mixed = plan.smoothed and any(len(curve) >= SMOOTHED_FROM for curve in curves)
    strokes = [
        *(
            line
            for curve in curves
            if len(curve.known)
            for line in lines(curve, plan, "not smoothed", alone=not mixed or len(curve) >= SMOOTHED_FROM)
        ),
        (Axes.set_xlim, (), {"left": 0}),
        *(stroke for (phase, _), end in zip(ran, ends[1:], strict=True) for stroke in _gate(phase, end)),
    ]
    shown = replace(plan, key=f"phases_{plan.key}", title=f"{plan.heading}, all phases", unit="")
    return draw(shown, describe({"loss": whole}), strokes, whole.known, "optimizer step, all phases", pictures)


def _gate(phase: Phase, end: float) -> list[Stroke]:
    """A line where the phase's gate was, and its name before it."""
    level, mark, words = phase.state if phase.verdict is not None else ("", "", "not judged")
    colour, dashes = ("line3", "-") if level == "ok" else ("rollback", "--")
    line = {"color": COLOURS[colour], "linewidth": 1.2, "linestyle": dashes, "label": words}
    return [(Axes.axvline, (end,), line), (Axes.annotate, (f"{phase.name} {mark}", (end, 1.0)), _NAME)]
