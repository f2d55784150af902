"""A look at the data: its size, its division between the sides, and a run's first examples."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.quantities import count
from ds_encdec.base.types import DataError, Example
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.eval_set import split_rows
from ds_encdec.data.examples.protocol import ExampleMaker, usable_documents, with_ids
from ds_encdec.data.lane import Lane, LanePipeline
from ds_encdec.data.sources.sources import BadRow, OpenSource, StreamSource, all_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SIDES = ("encoder", "decoder")

SAMPLE_DOCUMENTS = 256
"""Documents in the sample of all sources together."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Facts about the training documents, from a sample of them."""

    ratio: float  # encoder tokens per decoder token after denoising
    documents: float  # in the whole training split; infinite if a stream is longer than the sample
    tokens: float  # before denoising, extrapolated from the sample
    forms: tuple[str, ...] = ()  # sorted forms of the inputs, from `ExampleMaker.form`


def sample_statistics(sources: Sequence[OpenSource], maker: ExampleMaker, bad_row_limit: int = 0) -> SampleStatistics:
    """Sample the sources in proportion to their weights. Raises DataError if there is no text at all."""
    total_weight = sum(opened.weight for opened in sources)
    all_read: list[Any] = []
    documents = tokens = 0.0
    forms: set[str | None] = set()
    for opened in sources:
        count = max(16, round(SAMPLE_DOCUMENTS * opened.weight / total_weight))
        rows = with_ids(all_rows(opened.source, "sample"), maker)
        read = list(islice(usable_documents(rows, bad_row_limit), count + 1))
        forms |= {maker.form(document) for document, ids in read[:count] if maker.size(ids)}
        trained = [ids for document, ids in read[:count] if not opened.holds_out(document.key)]
        size: float = len(trained)
        if len(read) > count:
            is_stream = isinstance(opened.source, StreamSource)
            size = math.inf if is_stream else round(opened.size * (1 - opened.held_out))
        all_read += trained
        documents += size
        tokens += math.inf if size == math.inf else size * sum(map(maker.size, trained)) / max(1, len(trained))
    if sources[0].counts_tokens:
        rows = split_rows(sources, "train", maker)
        all_read = [ids for _, ids in islice(usable_documents(rows, bad_row_limit), SAMPLE_DOCUMENTS)]
    usable = [ids for ids in all_read if maker.size(ids)]
    if not usable:
        looked_at = (row for opened in sources for row in islice(all_rows(opened.source, "sample"), 1))
        first = next((ids for _, ids in with_ids(looked_at, maker)), None)
        if isinstance(first, BadRow):
            raise DataError(f"the data set is empty: no row that was looked at can be used. {first.problem}")
        raise DataError(
            f"the data set is empty: none of {len(all_read)} documents looked at has text to train on. All were "
            f"{maker.why_empty}"
        )
    return SampleStatistics(maker.ratio(usable), documents, tokens, tuple(sorted(filter(None, forms))))


def require_one_step(sample: SampleStatistics, num_lanes: int, budgets: Budgets) -> None:
    """Raise DataError if the training split is smaller than one optimizer step."""
    if sample.documents < num_lanes:
        raise DataError(
            f"{count(sample.documents, 'document')} to train on: too few for {num_lanes} lanes. Each lane (a "
            "micro-batch of every optimizer step) reads documents of its own. Set data.num_lanes="
            f"{max(1, sample.documents):.0f}{' or less' if sample.documents > 1 else ''}, give more files or "
            "lines, or cut long ones"
        )
    per_batch = budgets.encoder_tokens + budgets.decoder_tokens
    if sample.tokens < num_lanes * per_batch:
        raise DataError(
            f"the corpus is shorter than one batch: about {sample.tokens:,.0f} tokens in "
            f"{count(sample.documents, 'document')} to train on, but one optimizer step of "
            f"{count(num_lanes, 'micro-batch')} x {per_batch:,} tokens needs "
            f"{num_lanes * per_batch:,} tokens. Add data, or lower training.per_device_train_batch_size, "
            "training.gradient_accumulation_steps (or data.num_lanes), or the maximum lengths"
        )


def inspect_data(
    pipeline: LanePipeline,
    tokenizer: PreTrainedTokenizerFast,
    weights: Sequence[float],
    *,
    num_examples: int,
    as_json: bool,
    with_ids: bool = False,
    too_short: str | None = None,
) -> str:
    """Return the run's first `num_examples` examples, in the order of its lanes, as text or JSON. Raises DataError.

    Statistics are of all micro-batches made for them. `weights`: those of the tasks. `too_short`: why a run refuses
    this data; one lane then reads at most all of it.
    """
    if too_short:
        pipeline = dataclasses.replace(pipeline, num_lanes=1)
    made, batches, counted = _first_examples(pipeline, num_examples, one_pass=bool(too_short))
    statistics, examples = _statistics(pipeline, batches, made) | counted, made[:num_examples]
    statistics |= {"too_short": too_short} if too_short else {}
    long, skipped, bad = counted.values()
    if as_json:
        fields = ("document", "denoiser", "encoder_ids", "decoder_ids")
        rows = [{name: getattr(example, name) for name in fields} for example in examples]
        return json.dumps({"examples": rows, "statistics": statistics}, ensure_ascii=False, default=np.ndarray.tolist)
    lines = []
    for number, example in enumerate(examples, start=1):
        lines.append(f"── example {number} · {example.denoiser} · {example.document}")
        for side in _SIDES:
            ids = getattr(example, f"{side}_ids").tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            lines += [f"{side}, {len(ids)} tokens: {text}", *([f"{side} ids: {ids}"] if with_ids else [])]
        lines.append("")
    lines.append(
        f"── {count(statistics['examples'], 'example')} in {count(statistics['micro_batches'], 'micro-batch')}"
    )
    lines += (
        f"{side}: {statistics[f'{side}_fill']:.1%} of {statistics[f'{side}_budget_tokens']} tokens filled; lengths "
        "{min} to {max}, median {median:.0f}, mean {mean:.0f}".format(**statistics[f"{side}_tokens"])
        for side in _SIDES
    )
    lines.append("             examples   share   by weight")
    for (name, drawn), weight in zip(statistics["denoisers"].items(), weights, strict=True):
        lines.append(f"{name:<10}{drawn:11,}{drawn / statistics['examples']:8.1%}{weight / sum(weights):12.1%}")
    lines += [f"{count(skipped, 'document')} that were read gave no example"] if skipped else []
    lines += [f"{count(bad, 'bad row')} among those read"] if bad else []
    lines += [f"{count(long, 'example')} of those read exceeded the lengths"] if long else []
    lines += [f"A run refuses this data: {too_short}"] if too_short else []
    return "\n".join(lines)


def _first_examples(
    pipeline: LanePipeline, num_examples: int, *, one_pass: bool
) -> tuple[list[Example], int, dict[str, int]]:
    """Return at least `num_examples` examples, the number of their micro-batches, and counts of other rows."""
    lane = cache(partial(Lane, pipeline))
    made: list[Example] = []
    batches = 0
    while not batches or (len(made) < num_examples and not (one_pass and lane(0).passes)):
        made += next(lane(batches % pipeline.num_lanes))
        batches += 1
    read = [lane(number).record for number in range(min(batches, pipeline.num_lanes))]
    long, bad = (sum(sum(record[name]) for record in read) for name in ("long_rows", "bad_rows"))
    skipped = sum(record["skipped_documents"] for record in read)
    return made, batches, {"long_rows": long, "skipped_documents": skipped, "bad_rows": bad}


def _statistics(pipeline: LanePipeline, batches: int, examples: Sequence[Example]) -> dict[str, Any]:
    lengths = {side: np.array([len(getattr(example, f"{side}_ids")) for example in examples]) for side in _SIDES}
    budgets = {f"{side}_budget_tokens": getattr(pipeline.budgets, f"{side}_tokens") for side in _SIDES}
    return {
        "micro_batches": batches,
        "examples": len(examples),
        **budgets,
        **{
            f"{side}_fill": float(lengths[side].sum() / (batches * budgets[f"{side}_budget_tokens"])) for side in _SIDES
        },
        **{
            f"{side}_tokens": {
                "min": int(tokens.min()),
                "median": float(np.median(tokens)),
                "mean": float(tokens.mean()),
                "max": int(tokens.max()),
            }
            for side, tokens in lengths.items()
        },
        "denoisers": {name: sum(example.denoiser == name for example in examples) for name in pipeline.tasks},
    }
