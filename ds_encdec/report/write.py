"""Write one page with charts about a run, several compared ones, or a pipeline of phases (`ds-encdec report`)."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.schema import Mark, PhasesConfig, marked
from ds_encdec.config.validation import default_of
from ds_encdec.report.charts import COLOURS, PLANS, Chart, ChartPlan, charts_of, describe, draw_curve, finish, styled
from ds_encdec.report.page import differences, number, outcomes, write_page
from ds_encdec.report.read_run import Curve, Run, back_to, read_json, read_run

DIFFERENCE_PLAN = ChartPlan(
    "loss_difference", "Difference of the training losses", "nats", PLANS["loss"].metrics, smoothed=True
)
COMPARED = (
    DIFFERENCE_PLAN,
    *(PLANS[key] for key in ("loss", "eval_loss", "grad_norm", "tokens_per_sec", "learning_rate")),
)
_LOSSES = ("train/loss", "eval/loss")
_MEANINGS = {
    Mark.TOKENS: "losses per token of different tokenizers or vocabularies cannot be compared",
    Mark.TEXTS: "evaluation losses are of different texts",
    Mark.EXAMPLES: "evaluation losses are over different examples",
    Mark.MIXTURE: "losses are of different mixtures of denoisers",
}
# The effect on losses of a difference in these fields of the configuration, for runs without checkpoints.
_FIELDS = {path: meaning for mark, meaning in _MEANINGS.items() for path in marked(mark)}
# The same for facts in the checkpoints of comparable runs (data/fingerprint.py).
_DATA_FACTS = {
    "tokenizer": _MEANINGS[Mark.TOKENS],
    "special tokens": _MEANINGS[Mark.TOKENS],
    "sources": _MEANINGS[Mark.TEXTS],
    **{path: _FIELDS[path] for path in marked(Mark.EXAMPLES, Mark.MIXTURE)},
}
_PHASE_NAME: dict[str, Any] = {
    "xycoords": ("data", "axes fraction"), "xytext": (-3, -4), "textcoords": "offset points",
    "rotation": 90, "ha": "right", "va": "top", "fontsize": 8.5, "color": COLOURS["muted"],
}  # fmt: skip


def write_report(
    path: Path, *, compare: Sequence[Path] = (), out: Path | None = None, png: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of the run in `path`, or of the phases in it; return the page and its warnings. Curves of the
    runs in `compare` are drawn over this one's. `out` is the page's folder, by default RUN/report or
    RUN/report-compared, where it replaces an earlier report. `png` also writes each chart as a picture. Raises
    ConfigError for a path that is not a run or a folder that cannot be written, DataError for a run without metrics and
    for runs that cannot be compared."""
    paths = [one.expanduser() for one in (path, *compare)]
    folder = (paths[0] / ("report-compared" if compare else "report") if out is None else out).expanduser()
    pipelines = [one for one in paths if _phase_folders(one) and not (one / "metrics.jsonl").exists()]
    if pipelines and compare:
        raise ConfigError(
            f"{pipelines[0]} is the folder of a pipeline of phases, and --compare takes single runs: name one of its "
            f"phases, e.g. {_phase_folders(pipelines[0])[-1]}."
        )
    try:
        if pipelines:
            return _write_phases(paths[0].resolve(), folder, png=png), []
        return _write_run([read_run(one) for one in paths], folder, png=png)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {folder} ({error.strerror}); choose another folder.") from error


def _write_run(runs: Sequence[Run], folder: Path, *, png: bool) -> tuple[Path, list[str]]:
    """Write the page of the first run, compared with the others. Warnings name runs whose losses mean different things.
    Raises DataError if two have no loss in common."""
    run, *others = runs
    for other in others:
        if not any(len(run.curve(metric).known) and len(other.curve(metric).known) for metric in _LOSSES):
            metrics = " and ".join(_LOSSES)
            raise DataError(f"{run.path} and {other.path} cannot be compared: neither of {metrics} was logged by both.")
    folder.mkdir(parents=True, exist_ok=True)  # before drawing, which takes time
    pictures = folder if png else None
    above = os.path.commonpath([one.path.parent for one in runs])  # names have parents up to this folder
    names = [os.path.relpath(one.path, above) for one in runs]
    comparison: dict[str, Any] = {}
    if others:
        comparison = {
            "names": names,
            "warnings": list(incomparable(runs, names)),
            "charts": [chart for plan in COMPARED if (chart := _chart_of_runs(plan, runs, names, pictures))],
            "outcomes": [
                [rows[0][0], *(value for _, value in rows)] for rows in zip(*map(outcomes, runs), strict=True)
            ],
            "differing": differences([run.config for run in runs]),
        }
    charts, empty = charts_of(run, pictures)
    page = write_page(
        folder,
        "run.html.j2",
        run=run,
        comparison=comparison,
        charts=charts,
        empty=empty,
        alert_types=Counter(str(entry.get("type", "unknown")) for entry in run.entries("alert")).most_common(),
        steps_taken_back=int(sum(entry["step"] - back_to(entry) for entry in run.entries("rollback"))),
    )
    return page, comparison.get("warnings", [])


def incomparable(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """Yield sentences about why losses of the first run and the others do not mean the same, by their newest
    checkpoints, or else by their configurations."""
    first, *others = runs
    for other, name in zip(others, names[1:], strict=True):
        meaning = _DATA_FACTS if first.data and other.data else _FIELDS
        facts = [
            [run.data.get(what, run.setting(what, default_of(what))) for what in meaning] for run in (first, other)
        ]
        differing = [what for what, ours, its in zip(meaning, *facts, strict=True) if ours != its]
        for reason in dict.fromkeys(meaning[what] for what in differing):
            what = " and ".join(what for what in differing if meaning[what] == reason)
            yield f"{names[0]} and {name} differ in {what}: {reason}."


@styled
def _chart_of_runs(plan: ChartPlan, runs: Sequence[Run], names: Sequence[str], pictures: Path | None) -> Chart | None:
    """Draw the plan's metric of all runs over tokens, or over steps if a run lacks them; None if no run logged it."""
    (metric,) = plan.metrics
    over, logged = "optimizer step", [run.curve(metric) for run in runs]
    seen = [run.curve("train/tokens_seen") for run in runs]
    if all(len(tokens.known) for tokens in seen):
        over = "tokens seen"
        logged = [
            Curve(np.interp(curve.steps, [0.0, *tokens.steps], [0.0, *tokens.values]), curve.values)
            for curve, tokens in zip(logged, seen, strict=True)
        ]
    curves, labels = dict(enumerate(logged)), dict(enumerate(names))  # the number of a run chooses its colour
    title = plan.title if plan is DIFFERENCE_PLAN else f"{plan.title} of {len(runs)} runs"
    shown = replace(plan, key=f"compare_{plan.key}", title=title)
    axes = shown.axes(over)
    if plan is DIFFERENCE_PLAN:
        first = curves.pop(0)
        curves = {i: difference(curve, first) for i, curve in curves.items()}
        labels = {i: f"{name} − {names[0]}" for i, name in labels.items()}
        axes.axhline(0, color=COLOURS["muted"], linewidth=0.9)
    curves = {i: curve for i, curve in curves.items() if len(curve.known)}
    if not curves:
        return None
    for i, curve in curves.items():
        draw_curve(axes, curve, plan, labels[i], i, alone=False)
    known = np.concatenate([curve.known for curve in curves.values()])
    caption = "last " + ", ".join(f"{labels[i]} {number(curve.known[-1])}" for i, curve in curves.items())
    return finish(axes, shown, caption, known, pictures)


def difference(curve: Curve, first: Curve) -> Curve:
    """Return `curve` minus `first`, between the first and the last step at which `first` is known."""
    expected = first.at(curve.steps, beyond=np.nan)
    inside = np.isfinite(expected)
    return Curve(curve.steps[inside], (curve.values - expected)[inside])


def _phase_folders(root: Path) -> list[Path]:
    order = list(PhasesConfig.model_fields)
    found = [path for path in (root / "phases").glob("*") if path.is_dir()]
    return sorted(found, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name))


def _write_phases(root: Path, folder: Path, *, png: bool) -> Path:
    notes: list[str] = []
    folders = {path.name: path for path in _phase_folders(root)}
    phases: list[dict[str, Any]] = []
    runs: list[Run] = []
    for name in dict.fromkeys([*PhasesConfig.model_fields, *folders]):
        run: Run | None = None
        try:
            if name in folders:
                runs.append(run := read_run(folders[name]))
        except (ConfigError, DataError) as error:
            notes.append(str(error))
        verdict = run.verdict if run else read_json(root / "phases" / name / "result.json", notes)
        phases.append({"name": name, "begun": name in folders, "run": run, "verdict": verdict})
    if not runs:
        raise DataError(f"{root / 'phases'}: none of the phases has logged metrics, so there is nothing to draw.")
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        _write_run([run], folder / run.path.name, png=png)
    charts = [_chart_of_phases(PLANS[key], runs, folder if png else None) for key in ("loss", "eval_loss")]
    return write_page(folder, "phases.html.j2", root=root, phases=phases, notes=notes, charts=[*filter(None, charts)])


@styled
def _chart_of_phases(plan: ChartPlan, runs: Sequence[Run], pictures: Path | None) -> Chart | None:
    (metric,) = plan.metrics
    ends = np.cumsum([run.steps for run in runs])
    curves = [run.curve(metric) for run in runs]
    steps = [curve.steps + end - run.steps for curve, end, run in zip(curves, ends, runs, strict=True)]
    whole = Curve(np.concatenate(steps), np.concatenate([curve.values for curve in curves]))
    if not len(whole.known):
        return None
    shown = replace(plan, key=f"phases_{plan.key}", title=f"{plan.heading}, all phases", unit="")
    axes = shown.axes("optimizer step, all phases")
    draw_curve(axes, whole, plan, "", alone=True)
    for run, end in zip(runs, ends, strict=True):
        axes.axvline(end, color=COLOURS["muted"], linewidth=1.2, linestyle="--")
        axes.annotate(run.path.name, (end, 1.0), **_PHASE_NAME)
    return finish(axes, shown, describe({"loss": whole}), whole.known, pictures)
