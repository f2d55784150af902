"""The metrics that compare generated texts with references, a row each: adding one is a function and a row here.

All figures are on the scale of 0 to 100. It stands below the configuration, which asks for the figures' names, and no
function is imported for it: they are in `evaluate/metrics.py`, and in other packages (docs/library.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from ds_encdec.plugins import installed, is_dotted


@dataclass(frozen=True, slots=True)
class TextMetric:
    """One metric, which yields `figures`, means over the examples or figures of the whole set.

    `compute`: the dotted name of a function of predictions and references that returns the figures. `package`: the
    module that it imports, if any, which the `extra` of this package brings. `needs_model`: it takes a model of its
    own, as `bertscore_model`.
    """

    figures: tuple[str, ...]
    compute: str
    package: str | None = None
    extra: str | None = None
    higher_is_better: bool = True
    needs_model: bool = False


TEXT_METRICS: dict[str, TextMetric] = {
    "exact_match": TextMetric(("exact_match",), "ds_encdec.evaluate.metrics:exact_match"),
    "rouge": TextMetric(("rouge1", "rouge2", "rougeL"), "ds_encdec.evaluate.metrics:rouge", "rouge_score", "eval"),
    "chrf": TextMetric(("chrf",), "ds_encdec.evaluate.metrics:chrf", "sacrebleu", "eval"),
    "bleu": TextMetric(("bleu",), "ds_encdec.evaluate.metrics:bleu", "sacrebleu", "eval"),
    "bertscore": TextMetric(
        ("bertscore_precision", "bertscore_recall", "bertscore_f1"),
        "ds_encdec.evaluate.metrics:bertscore",
        "bert_score",
        "bertscore",
        needs_model=True,
    ),
}
"""The rows by the name that asks for them."""

FIGURES: dict[str, TextMetric] = {figure: row for row in TEXT_METRICS.values() for figure in row.figures}
"""The row that yields each figure."""


def text_metrics() -> dict[str, TextMetric]:
    """The rows here, and one for each entry point of `ds_encdec.metrics`, which yields the figure of its own name."""
    own = {name: TextMetric((name,), point.value) for name, point in installed("metrics").items()}
    return own | TEXT_METRICS


def text_metric(name: str) -> TextMetric | None:
    """The row of that name, or of the user's own function `module:name`; None where there is neither."""
    return text_metrics().get(name) or (TextMetric((name,), name) if is_dotted(name) else None)


def not_installed(names: Iterable[str]) -> Iterator[str]:
    """Problems, in words, with the packages that the metrics `names` need on this machine."""
    for name in names:
        row = text_metric(name)
        if row is not None and row.package is not None and find_spec(row.package) is None:
            yield f"{name} needs {row.package}, which is not installed: pip install 'ds_encdec[{row.extra}]'"


def usable(names: Iterable[str]) -> tuple[list[str], str]:
    """Return those of the metrics `names` whose packages are here, and the others with the command that adds them.

    The second is empty where there are no others.
    """
    rows = {name: text_metric(name) for name in names}
    found = [name for name in rows if not any(not_installed([name]))]
    absent = {name: row.extra or "" for name, row in rows.items() if row is not None and name not in found}
    extras = ",".join(sorted(set(absent.values())))
    return found, f"{', '.join(absent)}: pip install 'ds_encdec[{extras}]' adds them" if absent else ""
