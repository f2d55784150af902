"""Compare predictions with references: the functions of the rows of `text_metrics.py`. Figures are from 0 to 100;
`bleu` and `chrf` are of the whole set (sacrebleu's corpus scores), the others means over the pairs."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_encdec.base.plugins import load_plugin, whose_fault
from ds_encdec.base.types import ConfigError
from ds_encdec.registry.text_metrics import TEXT_METRICS, not_installed, text_metric

ROUGE_TYPES = TEXT_METRICS["rouge"].figures


def bertscore_layer(folder: Path) -> int:
    """Return the layer, from 1, that BERTScore compares: bert-score's choice for a model of this folder's name, or the
    last. Raises ConfigError for a folder without a model."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--bertscore-model: {folder} is no model folder (config.json: {error})") from error
    from bert_score.utils import model2layers  # torch: once the folder is sound

    known = {name.rpartition("/")[2]: layer for name, layer in model2layers.items()}
    last = config.get("num_hidden_layers") or config.get("num_layers") or config.get("n_layers") or 0
    return known.get(folder.resolve().name) or int(last)


def check_metrics(names: Iterable[str], bertscore_model: Path | None = None, *, field: str = "--metrics") -> None:
    """Raise ConfigError if a metric is unknown or cannot be called, or a package or model that it needs is missing.
    `field`: the setting in which the user has named it."""
    names = list(names)
    rows = {name: row for name in names if (row := text_metric(name)) is not None}
    if unknown := [name for name in names if name not in rows]:
        raise ConfigError(f"unknown metric {', '.join(unknown)}; known: {', '.join(TEXT_METRICS)}, and `module:name`")
    for name in set(names) - TEXT_METRICS.keys():
        load_plugin(field, name, "metrics")
    if problems := list(not_installed(names)):
        raise ConfigError("\n".join(problems))
    if needs_model := [name for name in names if rows[name].needs_model]:
        if bertscore_model is None:
            raise ConfigError(f"{needs_model[0]} compares texts by a model: name its folder in --bertscore-model")
        bertscore_layer(bertscore_model)


def score_texts(
    names: Iterable[str],
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    bertscore_model: Path | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the figures of the metrics `names`, which `check_metrics` has accepted; and the error, with its place, of
    each user's metric that raises or returns no finite number."""
    figures, left_out = dict[str, float](), dict[str, str]()
    for name in names:
        if name in TEXT_METRICS:
            model = {"bertscore_model": bertscore_model} if TEXT_METRICS[name].needs_model else {}
            figures |= _FUNCTIONS[name](predictions, references, **model)
            continue
        try:
            figure = float(load_plugin("--metrics", name, "metrics")(predictions, references))
            if not math.isfinite(figure):  # nothing can be judged by it
                raise ValueError(f"it returned {figure}")
            figures[name] = figure
        except Exception as error:  # whatever the user's function raises
            left_out[name] = whose_fault(error)
    return figures, left_out


def same_words(prediction: str, reference: str) -> bool:
    """Return whether the texts are equal, with white space ignored at the ends and as one blank within."""
    return prediction.split() == reference.split()


def rouge_scorer() -> Any:
    """Return Google's ROUGE-1, -2 and -L with Porter's stemmer. It knows words of a to z and digits only."""
    from rouge_score.rouge_scorer import RougeScorer

    logging.getLogger("absl").setLevel(logging.WARNING)  # it names its tokenizer each time
    return RougeScorer(list(ROUGE_TYPES), use_stemmer=True)


def _exact_match(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    return {"exact_match": 100 * fmean(map(same_words, predictions, references))}


def _rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    scores = list(map(rouge_scorer().score, references, predictions))
    return {name: 100 * fmean(score[name].fmeasure for score in scores) for name in ROUGE_TYPES}


def _of_corpus(name: str, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    import sacrebleu

    return {name: getattr(sacrebleu, f"corpus_{name}")(predictions, [references]).score}


def _bertscore(predictions: Sequence[str], references: Sequence[str], *, bertscore_model: Path) -> dict[str, float]:
    from bert_score import score
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    names = TEXT_METRICS["bertscore"].figures
    pairs = [pair for pair in zip(predictions, references, strict=True) if all(text.strip() for text in pair)]
    if not pairs:
        return dict.fromkeys(names, 0.0)
    layer = bertscore_layer(bertscore_model)
    try:
        parts = score(*zip(*pairs, strict=True), model_type=str(bertscore_model), num_layers=layer)
    except OverflowError as error:  # bert-score passes on model_max_length, which is 1e30 if a tokenizer has none
        raise ConfigError(
            f"--bertscore-model: the tokenizer in {bertscore_model} does not state how long a text may be; add "
            '"model_max_length" (such as 512) to its tokenizer_config.json'
        ) from error
    return {name: 100 * part.sum().item() / len(predictions) for name, part in zip(names, parts, strict=True)}


# The function of each row of `TEXT_METRICS`, with the defaults of its library.
_FUNCTIONS: dict[str, Callable[..., dict[str, float]]] = {
    "exact_match": _exact_match,
    "rouge": _rouge,  # mean F1 of common words, pairs of words, and the longest common sequence of words
    # chrF2, the F-score of character n-grams up to 6, which needs no division into words.
    "chrf": partial(_of_corpus, "chrf"),
    "bleu": partial(_of_corpus, "bleu"),
    "bertscore": _bertscore,  # of the tokens' best cosines, not rescaled; a text without words scores 0
}
