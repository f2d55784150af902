"""Several runs beside each other: their curves in one chart, and what differed in the config beside what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.config.schema import Mark, marked
from ds_encdec.report.charts import (
    COLOURS,
    EVAL_PLAN,
    GRAD_NORM_PLAN,
    LOSS_PLAN,
    RATE_PLAN,
    THROUGHPUT_PLAN,
    Chart,
    ChartPlan,
    Stroke,
    draw,
    lines,
)
from ds_encdec.report.page import differences, number, outcomes
from ds_encdec.report.read_run import NO_CURVE, Curve, Run
from ds_encdec.types import DataError

DIFFERENCE_PLAN = ChartPlan(
    "loss_difference", "Difference of the training losses", "nats per token", LOSS_PLAN.metrics, smoothed=True
)
COMPARED = (DIFFERENCE_PLAN, LOSS_PLAN, EVAL_PLAN, GRAD_NORM_PLAN, THROUGHPUT_PLAN, RATE_PLAN)
"""The charts of all runs together."""
_ABSCISSAE: Mapping[str, str] = {"tokens": "tokens seen", "steps": "optimizer step"}
_LOSSES = ("train/loss", "eval/loss")
_TOKENS = "losses per token of different tokenizers or vocabularies cannot be compared"
_TEXTS = "evaluation losses are of different texts"
_EXAMPLES = "evaluation losses are over different examples"
_MIXTURE = "losses are of different mixtures of denoisers"
_MEANINGS = {Mark.TOKENS: _TOKENS, Mark.TEXTS: _TEXTS, Mark.EXAMPLES: _EXAMPLES, Mark.MIXTURE: _MIXTURE}
_FIELDS = {path: meaning for mark, meaning in _MEANINGS.items() for path in marked(mark)}
"""The meaning of runs without checkpoints that differ in these fields of the configuration."""
_DATA_FACTS = {
    **{"tokenizer": _TOKENS, "special tokens": _TOKENS, "sources": _TEXTS},
    **{path: _FIELDS[path] for path in marked(Mark.EXAMPLES, Mark.MIXTURE)},
}
"""The same by the facts that the checkpoints of comparable runs agree in (data/fingerprint.py)."""


def compare_runs(runs: Sequence[Run], pictures: Path | None = None) -> dict[str, Any]:
    """Lay `runs`, of which the first is the page's own, over each other; `pictures`: see `charts_of`.

    Returns all that the page shows of them: the `names` and `warnings`; `charts`, the same ones over `tokens` seen,
    where they are known, and over optimizer `steps`; `outcomes`, rows of a name and a value for each run; `differing`,
    the same by field of the configuration. Raises DataError where two of the runs have no loss in common; runs whose
    losses mean different things are drawn, with a warning, since their throughput and stability can still be compared.
    """
    for other in runs[1:]:
        if not any(len(runs[0].curve(metric).known) and len(other.curve(metric).known) for metric in _LOSSES):
            raise DataError(
                f"{runs[0].path} and {other.path} cannot be compared: "
                f"neither of {' and '.join(_LOSSES)} was logged by both."
            )
    names = distinct_names(runs)
    charts = {over: [_chart(plan, runs, names, over, pictures) for plan in COMPARED] for over in _ABSCISSAE}
    return {
        "names": names,
        "warnings": incomparable(runs, names),
        "charts": {over: [chart for chart in drawn if chart] for over, drawn in charts.items()},
        "outcomes": [[rows[0][0], *(value for _, value in rows)] for rows in zip(*map(outcomes, runs), strict=True)],
        "differing": differences([run.config for run in runs]),
    }


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


def incomparable(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Why losses of the first run and the others do not mean the same, in sentences.

    The newest checkpoints are asked, or else the configurations.
    """
    warnings = []
    first = runs[0]
    for other, name in zip(runs[1:], names[1:], strict=True):
        meaning = _DATA_FACTS if first.data and other.data else _FIELDS
        facts = [[run.data.get(what, run.setting(what)) for what in meaning] for run in (first, other)]
        differing = [what for what, ours, its in zip(meaning, *facts, strict=True) if ours != its]
        for reason in dict.fromkeys(meaning[what] for what in differing):
            what = " and ".join(what for what in differing if meaning[what] == reason)
            warnings.append(f"{names[0]} and {name} differ in {what}: {reason}.")
    return warnings


def _chart(
    plan: ChartPlan, runs: Sequence[Run], names: Sequence[str], over: str, pictures: Path | None
) -> Chart | None:
    """The plan's metric of all runs over steps or over tokens; None where no run has logged it."""
    (metric,) = plan.metrics
    logged = [run.curve(metric) for run in runs]
    if over == "tokens":
        logged = [Curve(run.tokens_at(curve.steps), curve.values) for run, curve in zip(runs, logged, strict=True)]
    # By number of the run, which has its colour in every chart.
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
    return draw(shown, caption, strokes, known, _ABSCISSAE[over], pictures)


def difference(curve: Curve, first: Curve) -> Curve:
    """How much higher `curve` is than `first`, between the first and the last step that `first` is known at."""
    expected = first.at(curve.steps, beyond=np.nan)
    inside = np.isfinite(expected)
    return Curve(curve.steps[inside], (curve.values - expected)[inside])
