"""Lists the metrics that compare generated texts with references, a row each; evaluate/metrics.py has their functions.
All figures are on the scale of 0 to 100. The configuration reads their names, so nothing is imported here."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from ds_encdec.base.plugins import is_dotted


@dataclass(frozen=True, slots=True)
class TextMetric:
    """One metric, which yields `figures`. `package`: the module that it imports, if any, which the `extra` of this
    package installs. `needs_model`: it takes another model, as `bertscore_model`."""

    figures: tuple[str, ...]
    package: str | None = None
    extra: str | None = None
    higher_is_better: bool = True
    needs_model: bool = False


TEXT_METRICS: dict[str, TextMetric] = {
    "exact_match": TextMetric(("exact_match",)),
    "rouge": TextMetric(("rouge1", "rouge2", "rougeL"), "rouge_score", "eval"),
    "chrf": TextMetric(("chrf",), "sacrebleu", "eval"),
    "bleu": TextMetric(("bleu",), "sacrebleu", "eval"),
    "bertscore": TextMetric(
        ("bertscore_precision", "bertscore_recall", "bertscore_f1"), "bert_score", "bertscore", needs_model=True
    ),
}

FIGURES: dict[str, TextMetric] = {figure: row for row in TEXT_METRICS.values() for figure in row.figures}


def text_metric(name: str) -> TextMetric | None:
    """Return the row of that name, or one for the user's function `module:name`; None for any other name."""
    return TEXT_METRICS.get(name) or (TextMetric((name,)) if is_dotted(name) else None)


def not_installed(names: Iterable[str]) -> Iterator[str]:
    """Yield a message for each of the metrics `names` whose package is not installed."""
    for name in names:
        row = text_metric(name)
        if row is not None and row.package is not None and find_spec(row.package) is None:
            yield f"{name} needs {row.package}, which is not installed: pip install 'ds_encdec[{row.extra}]'"


def usable(names: Collection[str]) -> tuple[list[str], str]:
    """Return the installed ones of the metrics `names`, and the others with the command to install them (or "")."""
    absent = {name: str(TEXT_METRICS[name].extra) for name in names if any(not_installed([name]))}
    advice = f"{', '.join(absent)}: pip install 'ds_encdec[{','.join(sorted({*absent.values()}))}]' adds them"
    return [name for name in names if name not in absent], advice if absent else ""
