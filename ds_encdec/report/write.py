"""`ds-encdec report`: one page with pictures about a run, or a pipeline of phases, and the pictures as files.

Runs that are compared have their curves in one chart, and what differed in the configuration beside what came out. The
page of a pipeline has the losses of its phases one behind the other, and each one's verdict.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import Mark, PhasesConfig, marked
from ds_encdec.config.validation import default_of
from ds_encdec.report.charts import COLOURS, PLANS, Chart, ChartPlan, Stroke, charts_of, describe, draw, lines
from ds_encdec.report.page import differences, number, outcomes, write_page
from ds_encdec.report.read_run import NO_CURVE, SMOOTHED_FROM, Curve, Entry, Run, back_to, read_json, read_run
from ds_encdec.types import ConfigError, DataError

DIFFERENCE_PLAN = ChartPlan(
    "loss_difference", "Difference of the training losses", "nats per token", PLANS["loss"].metrics, smoothed=True
)
COMPARED = (
    DIFFERENCE_PLAN,
    *(PLANS[key] for key in ("loss", "eval_loss", "grad_norm", "tokens_per_sec", "learning_rate")),
)
"""The charts of all runs together."""
_ABSCISSAE: Mapping[str, str] = {"tokens": "tokens seen", "steps": "optimizer step"}
_LOSSES = ("train/loss", "eval/loss")
_MEANINGS = {
    Mark.TOKENS: "losses per token of different tokenizers or vocabularies cannot be compared",
    Mark.TEXTS: "evaluation losses are of different texts",
    Mark.EXAMPLES: "evaluation losses are over different examples",
    Mark.MIXTURE: "losses are of different mixtures of denoisers",
}
_FIELDS = {path: meaning for mark, meaning in _MEANINGS.items() for path in marked(mark)}
"""The meaning of runs without checkpoints that differ in these fields of the configuration."""
_DATA_FACTS = {
    "tokenizer": _MEANINGS[Mark.TOKENS],
    "special tokens": _MEANINGS[Mark.TOKENS],
    "sources": _MEANINGS[Mark.TEXTS],
    **{path: _FIELDS[path] for path in marked(Mark.EXAMPLES, Mark.MIXTURE)},
}
"""The same by the facts that the checkpoints of comparable runs agree in (data/fingerprint.py)."""
_NAME = {
    "xycoords": ("data", "axes fraction"), "xytext": (-3, -4), "textcoords": "offset points",
    "rotation": 90, "ha": "right", "va": "top", "fontsize": 8.5, "color": COLOURS["muted"],
}  # fmt: skip


def write_report(
    path: Path, *, compare: Sequence[Path] = (), out: Path | None = None, png: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of the run in `path`, or of the phases in it; returns the page and what to warn of.

    `compare`: further runs, whose curves are laid over this one's. `out`: the folder of the page, by default
    RUN/report, or RUN/report-compared beside other runs; an earlier report in it is replaced. `png`: each chart lies
    beside the page as a picture, too.

    Raises ConfigError for a path that is no run or a folder that cannot be written, DataError for a run without
    metrics and for runs that cannot be compared.
    """
    paths = [one.expanduser() for one in (path, *compare)]
    folder = (paths[0] / ("report-compared" if compare else "report") if out is None else out).expanduser()
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


def write_last_report(path: Path) -> Path:
    """Write the report of a run that is about to be completed; returns the page."""
    ending = {"state": "completed", "reason": "", "exit_code": 0, "updated_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return _write_run([read_run(path, ending)], path / "report", png=False)[0]


def _write_run(runs: Sequence[Run], folder: Path, *, png: bool) -> tuple[Path, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)  # before the time is spent on drawing
    run, pictures = runs[0], folder if png else None
    comparison = compare_runs(runs, pictures) if len(runs) > 1 else None
    charts, empty = charts_of(run, pictures)
    alerts = Counter(str(entry.get("type", "unknown")) for entry in run.entries("alert"))
    page = write_page(
        folder,
        "run.html.j2",
        run=run,
        comparison=comparison,
        charts=charts,
        empty=empty,
        alert_types=alerts.most_common(),
        steps_taken_back=int(sum(entry["step"] - back_to(entry) for entry in run.entries("rollback"))),
    )
    return page, comparison.warnings if comparison else []


class Comparison(NamedTuple):
    """All that the page shows of several runs, the first of which is the page's own.

    `charts`: the same ones over `tokens` seen, where they are known, and over optimizer `steps`. `outcomes`: rows of a
    name and a value for each run; `differing`: the same by field of the configuration.
    """

    names: list[str]
    warnings: list[str]
    charts: dict[str, list[Chart]]
    outcomes: list[list[str]]
    differing: list[tuple[str, list[str]]]


def compare_runs(runs: Sequence[Run], pictures: Path | None = None) -> Comparison:
    """Lay `runs` over each other; `pictures`: see `charts_of`.

    Raises DataError where two of the runs have no loss in common; runs whose losses mean different things are drawn,
    with a warning, since their throughput and stability can still be compared.
    """
    for other in runs[1:]:
        if not any(len(runs[0].curve(metric).known) and len(other.curve(metric).known) for metric in _LOSSES):
            raise DataError(
                f"{runs[0].path} and {other.path} cannot be compared: "
                f"neither of {' and '.join(_LOSSES)} was logged by both."
            )
    names = distinct_names(runs)
    charts = {over: [_chart_of_runs(plan, runs, names, over, pictures) for plan in COMPARED] for over in _ABSCISSAE}
    return Comparison(
        names=names,
        warnings=list(incomparable(runs, names)),
        charts={over: [chart for chart in drawn if chart] for over, drawn in charts.items()},
        outcomes=[[rows[0][0], *(value for _, value in rows)] for rows in zip(*map(outcomes, runs), strict=True)],
        differing=differences([run.config for run in runs]),
    )


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs' folders, with folders above them where runs of one name are compared."""
    names = [run.path.name for run in runs]
    for depth in range(2, 1 + max(len(run.path.parts) for run in runs)):
        repeated = {name for name, times in Counter(names).items() if times > 1}
        names = [
            "/".join(run.path.parts[-depth:]) if name in repeated else name
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def incomparable(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """Yield why losses of the first run and the others do not mean the same, in sentences.

    The newest checkpoints are asked, or else the configurations.
    """
    first = runs[0]
    for other, name in zip(runs[1:], names[1:], strict=True):
        meaning = _DATA_FACTS if first.data and other.data else _FIELDS
        facts = [
            [run.data.get(what, run.setting(what, default_of(what))) for what in meaning] for run in (first, other)
        ]
        differing = [what for what, ours, its in zip(meaning, *facts, strict=True) if ours != its]
        for reason in dict.fromkeys(meaning[what] for what in differing):
            what = " and ".join(what for what in differing if meaning[what] == reason)
            yield f"{names[0]} and {name} differ in {what}: {reason}."


def _chart_of_runs(
    plan: ChartPlan, runs: Sequence[Run], names: Sequence[str], over: str, pictures: Path | None
) -> Chart | None:
    """The plan's metric of all runs over steps or over tokens; None where no run has logged it."""
    (metric,) = plan.metrics
    logged = [run.curve(metric) for run in runs]
    if over == "tokens":
        logged = [Curve(run.tokens_at(curve.steps), curve.values) for run, curve in zip(runs, logged, strict=True)]
    # The key is the number of the run, which has its own colour in every chart.
    curves = {i: curve for i, curve in enumerate(logged) if len(curve.known) and np.isfinite(curve.steps).all()}
    strokes: list[Stroke] = []
    labels = dict(enumerate(names))
    if plan is DIFFERENCE_PLAN:
        first = curves.pop(0, NO_CURVE)
        curves = {i: gap for i, curve in curves.items() if len((gap := difference(curve, first)).known)}
        labels = {i: f"{name} − {names[0]}" for i, name in labels.items()}
        strokes.append((Axes.axhline, (0,), {"color": COLOURS["muted"], "linewidth": 0.9}))
    if not curves:
        return None
    strokes += [line for i, curve in curves.items() for line in lines(curve, plan, labels[i], i, alone=False)]
    known = np.concatenate([curve.known for curve in curves.values()])
    caption = "last " + ", ".join(f"{labels[i]} {number(curve.known[-1])}" for i, curve in curves.items())
    shown = replace(plan, key=f"compare_{plan.key}_by_{over}", title=f"{plan.title} over {over}", unit="")
    named = {labels[i]: curve for i, curve in curves.items()}
    return draw(shown, caption, strokes, known, _ABSCISSAE[over], pictures, hovered=named)


def difference(curve: Curve, first: Curve) -> Curve:
    """How much higher `curve` is than `first`, between the first and the last step that `first` is known at."""
    expected = first.at(curve.steps, beyond=np.nan)
    inside = np.isfinite(expected)
    return Curve(curve.steps[inside], (curve.values - expected)[inside])


class Phase(NamedTuple):
    """One phase. `run`: None where it has logged nothing; `verdict`: None where it was not judged.

    `state`: how far it has come: (ok | bad | warn | muted, a mark, words).
    """

    name: str
    run: Run | None
    verdict: Entry | None
    state: tuple[str, str, str]


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
        state = ("warn", "!", "was begun and not judged") if name in folders else ("muted", "○", "not started")
        if verdict is not None:
            passed = verdict.get("passed") is True
            state = ("ok", "✓", "gate passed") if passed else ("bad", "✗", "gate not passed")
        phases.append(Phase(name, run, verdict, state))
    ran = [(phase, phase.run) for phase in phases if phase.run]
    if not ran:
        raise DataError(f"{root / 'phases'}: none of the phases has logged metrics, so there is nothing to draw.")
    folder.mkdir(parents=True, exist_ok=True)
    for phase, run in ran:
        _write_run([run], folder / phase.name, png=png)
    judged = [phase.verdict for phase in phases if phase.verdict is not None]
    drawn = [_chart_of_phases(PLANS[key], ran, folder if png else None) for key in ("loss", "eval_loss")]
    values = {"root": root, "phases": phases, "judged": judged, "notes": notes, "charts": list(filter(None, drawn))}
    return write_page(folder, "phases.html.j2", **values)


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
    over, named = "optimizer step, all phases", {"loss": whole}
    return draw(shown, describe(named), strokes, whole.known, over, pictures, hovered=named)


def _gate(phase: Phase, end: float) -> list[Stroke]:
    """A line where the phase's gate was, and its name before it."""
    level, mark, words = phase.state if phase.verdict is not None else ("", "", "not judged")
    colour, dashes = ("line3", "-") if level == "ok" else ("rollback", "--")
    line = {"color": COLOURS[colour], "linewidth": 1.2, "linestyle": dashes, "label": words}
    return [(Axes.axvline, (end,), line), (Axes.annotate, (f"{phase.name} {mark}", (end, 1.0)), _NAME)]
