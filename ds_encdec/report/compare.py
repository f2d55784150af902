"""Several runs beside each other: their curves in one chart, and what differed in the config beside what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from ds_encdec.report.charts import (
    EVAL_PLAN,
    GRAD_NORM_PLAN,
    LOSS_PLAN,
    RATE_PLAN,
    THROUGHPUT_PLAN,
    Chart,
    ChartPlan,
    draw_chart,
    paint_line,
    set_scale,
)
from ds_encdec.report.drawing import COLOURS
from ds_encdec.report.page import differences, number, outcomes
from ds_encdec.report.read_run import Curve, Run
from ds_encdec.types import DataError

DIFFERENCE_PLAN = ChartPlan(
    "loss_difference", "Difference of the training losses", "nats per token", LOSS_PLAN.metrics, smoothed=True
)
COMPARED = (DIFFERENCE_PLAN, LOSS_PLAN, EVAL_PLAN, GRAD_NORM_PLAN, THROUGHPUT_PLAN, RATE_PLAN)
"""What is drawn of all runs together."""
_ABSCISSAE: Mapping[str, str] = {"tokens": "tokens seen", "steps": "optimizer step"}
_LOSSES = ("train/loss", "eval/loss")
_TOKENS = "losses per token of different tokenizers or vocabularies cannot be compared"
_TEXTS = "evaluation losses are of different texts"
_EXAMPLES = "evaluation losses are over different examples"
_MIXTURE = "losses are of different mixtures of denoisers"
_EXAMPLE_FIELDS = {
    "data.eval_fraction": _EXAMPLES,
    "data.max_seq_length": _EXAMPLES,
    "data.max_encoder_length": _EXAMPLES,
    "data.max_decoder_length": _EXAMPLES,
    "data.use_mode_tokens": _EXAMPLES,
    "training.eval_samples": _EXAMPLES,
    "data.ul2_task_weights": _MIXTURE,
}
"""Fields that choose the held-out documents, cut them into examples, denoise them, or end their number."""
_DATA_FACTS = {"tokenizer": _TOKENS, "special tokens": _TOKENS, "sources": _TEXTS, **_EXAMPLE_FIELDS}
"""Facts that the checkpoints of comparable runs agree in (data/fingerprint.py), and what it means where not."""
_FIELDS = {
    "model.tokenizer_name_or_path": _TOKENS,
    "model.num_sentinel_tokens": _TOKENS,
    "model.architecture.vocab_size": _TOKENS,
    "data.dataset_name": _TEXTS,
    "data.dataset_config": _TEXTS,
    "data.dataset_split": _TEXTS,
    "data.data_files": _TEXTS,
    "data.mixture": _TEXTS,
    **_EXAMPLE_FIELDS,
}
"""The same by fields of the configuration, for runs without checkpoints."""


@dataclass(frozen=True)
class Comparison:
    """What the page shows of several runs, the first of which is the page's own.

    `charts`: the same ones over tokens seen, where they are known, and over optimizer steps. `outcomes`: rows of a name
    and a value for each run; `differing`: by field of the configuration.
    """

    names: list[str]
    warnings: list[str]
    charts: dict[str, list[Chart]]
    outcomes: list[list[str]]
    differing: list[tuple[str, list[str]]]


def compare_runs(runs: Sequence[Run], pictures: Path | None = None) -> Comparison:
    """Lay `runs` over each other; `pictures`: as of `charts_of`.

    Raises DataError where two of the runs have no loss in common; runs whose losses mean different things are
    drawn, with a warning, since their throughput and stability can still be compared.
    """
    _require_common_loss(runs)
    names = distinct_names(runs)
    return Comparison(
        names,
        incomparable(runs, names),
        {over: [c for plan in COMPARED for c in _chart(plan, runs, names, over, pictures)] for over in _ABSCISSAE},
        [[rows[0][0], *(value for _, value in rows)] for rows in zip(*map(_outcomes, runs), strict=True)],
        differences([run.config for run in runs]),
    )


def _outcomes(run: Run) -> list[tuple[str, str]]:
    counts = {"alerts": len(run.entries("alert")), "rollbacks": len(run.entries("rollback"))}
    counted = [(name, number(times)) for name, times in {**counts, "skipped steps": run.skipped_steps}.items()]
    return [("state", str(run.status.get("state", "unknown"))), *outcomes(run), *counted]


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs' folders, with folders above them where runs of one name are compared."""
    names = [run.name for run in runs]
    for depth in range(2, 1 + max(len(run.path.parts) for run in runs)):
        repeated = {name for name, times in Counter(names).items() if times > 1}
        names = [
            "/".join(run.path.parts[-depth:]) if name in repeated else name
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def _require_common_loss(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        if not any(len(first.curve(metric).known) and len(other.curve(metric).known) for metric in _LOSSES):
            raise DataError(
                f"{first.path} and {other.path} cannot be compared: "
                f"neither of {' and '.join(_LOSSES)} was logged by both."
            )


def incomparable(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Why losses of the first run and the others do not mean the same, in sentences."""
    warnings = []
    first = runs[0]
    for other, name in zip(runs[1:], names[1:], strict=True):
        meaning = _DATA_FACTS if first.data and other.data else _FIELDS
        differing = [what for what in meaning if _fact(first, what) != _fact(other, what)]
        for reason in dict.fromkeys(meaning[what] for what in differing):
            what = " and ".join(what for what in differing if meaning[what] == reason)
            warnings.append(f"{names[0]} and {name} differ in {what}: {reason}.")
    return warnings


def _fact(run: Run, what: str) -> object:
    """What the newest checkpoint says of the run's data, or else its configuration."""
    return run.data.get(what, run.setting(what))


def _chart(plan: ChartPlan, runs: Sequence[Run], names: Sequence[str], over: str, pictures: Path | None) -> list[Chart]:
    """The plan's metric of all runs over steps or over tokens; nothing where none has logged it."""
    (metric,) = plan.metrics
    curves = {}
    for name, run in zip(names, runs, strict=True):
        curve = run.curve(metric)
        curve = curve if over == "steps" else curve.at(run.tokens_at(curve.steps))
        if len(curve.known) and np.isfinite(curve.steps).all():
            curves[name] = curve
    if plan is DIFFERENCE_PLAN:
        first = curves.pop(names[0], None)
        curves = {} if first is None else {f"{name} − {names[0]}": difference(c, first) for name, c in curves.items()}
    drawn = {label: curve for label, curve in curves.items() if len(curve.known)}
    if not drawn:
        return []

    def paint(axes: Axes) -> None:
        if plan is DIFFERENCE_PLAN:
            axes.axhline(0, color=COLOURS["muted"], linewidth=0.9)
        for label, curve in drawn.items():
            # A run has its colour in every chart.
            paint_line(axes, curve, plan, label, [*names].index(label.split(" − ")[0]), alone=False)
        set_scale(axes, plan, np.concatenate([curve.known for curve in drawn.values()]))

    caption = "last " + ", ".join(f"{label} {number(curve.known[-1])}" for label, curve in drawn.items())
    key, title = f"compare_{plan.key}_by_{over}", f"{plan.title} over {over}"
    return [draw_chart(key, title, caption, paint, pictures, _ABSCISSAE[over])]


def difference(curve: Curve, first: Curve) -> Curve:
    """How much higher `curve` is than `first`, where both are known."""
    finite = np.isfinite(first.values)
    at, values = first.steps[finite], first.values[finite]
    inside = (curve.steps >= at[0]) & (curve.steps <= at[-1])
    return Curve(curve.steps[inside], curve.values[inside] - np.interp(curve.steps[inside], at, values))
