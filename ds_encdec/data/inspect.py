"""Showing the examples that a run will see, with fill, length and denoiser statistics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.data.build import TrainingData
from ds_encdec.data.lane import Lane
from ds_encdec.types import DENOISERS, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def inspect_data(data: TrainingData, tokenizer: PreTrainedTokenizerFast, *, num_examples: int, as_json: bool) -> str:
    """The first `num_examples` examples of the run, in the order of its lanes, as text or as JSON.

    Statistics are over the micro-batches that were made for them. Lanes are read one after the other, and only as many
    as are needed. Raises DataError.
    """
    lane = cache(partial(Lane, data.pipeline))
    made: list[Example] = []
    batches = 0
    while not batches or len(made) < num_examples:
        made += next(lane(batches % data.pipeline.num_lanes))
        batches += 1
    statistics, examples = _statistics(data, batches, made), made[:num_examples]
    if as_json:
        fields = ("document", "denoiser", "encoder_ids", "decoder_ids")
        rows = [{name: getattr(example, name) for name in fields} for example in examples]
        return json.dumps({"examples": rows, "statistics": statistics}, ensure_ascii=False, default=np.ndarray.tolist)
    shown = [_as_text(number, example, tokenizer) for number, example in enumerate(examples, start=1)]
    return "\n".join([*shown, *_statistics_lines(statistics)])


def _statistics(data: TrainingData, batches: int, examples: Sequence[Example]) -> dict[str, Any]:
    encoder_tokens = np.array([len(example.encoder_ids) for example in examples])
    decoder_tokens = np.array([len(example.decoder_ids) for example in examples])
    budgets = data.pipeline.budgets
    return {
        "micro_batches": batches,
        "examples": len(examples),
        "encoder_budget_tokens": budgets.encoder_tokens,
        "decoder_budget_tokens": budgets.decoder_tokens,
        "encoder_fill": float(encoder_tokens.sum() / (batches * budgets.encoder_tokens)),
        "decoder_fill": float(decoder_tokens.sum() / (batches * budgets.decoder_tokens)),
        "encoder_tokens": _distribution(encoder_tokens),
        "decoder_tokens": _distribution(decoder_tokens),
        "denoisers": {name: sum(example.denoiser == name for example in examples) for name in DENOISERS},
    }


def _distribution(lengths: np.ndarray) -> dict[str, float]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }


def _as_text(number: int, example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    lines = [f"── example {number} · {example.denoiser} · {example.document}"]
    for side, ids in (("encoder", example.encoder_ids), ("decoder", example.decoder_ids)):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines += [f"{side}, {len(ids)} tokens: {text}", f"{side} ids: {ids.tolist()}"]
    return "\n".join(lines) + "\n"


def _statistics_lines(statistics: dict[str, Any]) -> list[str]:
    sides = [
        f"{side}: {statistics[f'{side}_fill']:.1%} of {statistics[f'{side}_budget_tokens']} tokens filled; lengths "
        "{min} to {max}, median {median:.0f}, mean {mean:.0f}".format(**statistics[f"{side}_tokens"])
        for side in ("encoder", "decoder")
    ]
    counts = ", ".join(f"{name} {count}" for name, count in statistics["denoisers"].items())
    title = f"── {statistics['examples']} examples in {statistics['micro_batches']} micro-batches"
    return [title, *sides, f"denoisers: {counts}"]
