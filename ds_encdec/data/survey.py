"""The size of the training data, from a sample or from lanes that run ahead without a model.

A new run needs the ratio of its two sides; `training.num_train_epochs` becomes steps.
"""

import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.rules import find_conflicts
from ds_encdec.config.schema import FullConfig, shortened_warmup
from ds_encdec.data.eval_set import packed, split_rows, weighed_size
from ds_encdec.data.examples.protocol import ExampleMaker, usable_documents, with_ids
from ds_encdec.data.lane import Lane, LanePipeline
from ds_encdec.data.sources.sources import BadRow, OpenSource, StreamSource, all_rows

SAMPLE_DOCUMENTS = 256  # documents in the survey's sample of all sources together
COUNTED_READINGS = 100_000  # readings of a document, in all passes, up to which the lanes run ahead
_LARGE_SAMPLE_DOCUMENTS = 4000  # documents from which the steps of more readings are estimated

logger = logging.getLogger(__name__)


def take_survey(config: FullConfig, sources: Sequence[OpenSource], maker: ExampleMaker) -> tuple[float, Sequence[str]]:
    """Sample the sources in proportion to their weights. Return the encoder tokens per decoder token after denoising,
    and the sorted forms of the inputs (from `ExampleMaker.form`). Raises DataError if there is no text at all."""
    total_weight, bad_row_limit = sum(opened.weight for opened in sources), config.data.bad_row_limit
    all_read: list[Any] = []
    forms: set[str | None] = set()
    for opened in sources:
        most = max(16, round(SAMPLE_DOCUMENTS * opened.weight / total_weight))
        rows = with_ids(all_rows(opened.source, "sample"), maker)
        read = list(islice(usable_documents(rows, bad_row_limit), most))
        forms |= {maker.form(document) for document, ids in read if maker.size(ids)}
        all_read += [ids for document, ids in read if not opened.holds_out(document.key)]
    if sources[0].counts_tokens:
        rows = split_rows(sources, "train", maker)
        all_read = [ids for _, ids in islice(usable_documents(rows, bad_row_limit), SAMPLE_DOCUMENTS)]
    usable = [ids for ids in all_read if maker.size(ids)]
    if not usable:
        first_rows = (row for opened in sources for row in islice(all_rows(opened.source, "sample"), 1))
        _, first = next(with_ids(first_rows, maker), (None, None))
        raise DataError(
            f"the data set is empty: no row of the sample can be used. {first.problem}"
            if isinstance(first, BadRow)
            else f"the data set is empty: no text to train on in {len(all_read)} documents: all were {maker.why_empty}"
        )
    return maker.ratio(usable), sorted(filter(None, forms))


def with_steps_of_epochs(config: FullConfig, steps: int) -> FullConfig:
    """Return the configuration with `steps` for its epochs. Raises ConfigError if its other fields do not fit them."""
    training = config.training
    warmup_steps = training.warmup_steps
    if training.warmup_ratio is not None:
        warmup_steps = math.ceil(steps * training.warmup_ratio)
    elif "warmup_steps" not in training.model_fields_set:
        warmup_steps = shortened_warmup(steps, training.lr_scheduler_type) or warmup_steps
    changes = {"num_train_steps": steps, "num_train_epochs": None, "warmup_steps": warmup_steps, "warmup_ratio": None}
    counted = config.model_copy(update={"training": training.model_copy(update=changes)})
    if conflicts := find_conflicts(counted):
        lines = "\n".join(f"  {', '.join(conflict.fields)}: {conflict.message}" for conflict in conflicts)
        raise ConfigError(f"training.num_train_epochs={training.num_train_epochs} are {steps} steps:\n{lines}")
    return counted


def steps_of_epochs(pipeline: LanePipeline, epochs: float) -> int:
    """Return the optimizer steps in which every lane returns all examples of `epochs` passes over its data. Passes over
    a mixture are those over its slowest source. Raises DataError for a stream of unknown length."""
    streams = [isinstance(opened.source, StreamSource) for opened in pipeline.sources]
    rows: list[Any] = [
        getattr(opened.source, "num_rows", None) if is_stream else opened.size
        for opened, is_stream in zip(pipeline.sources, streams, strict=True)
    ]
    if None in rows:
        raise DataError(
            "training.num_train_epochs: the length of streamed data is not known before its end. Give "
            "training.num_train_steps, or read it whole with data.streaming=false"
        )
    # Every lane reads all units of a stream.
    repeats = [pipeline.num_lanes if is_stream else 1 for is_stream in streams]
    readings = sum(number * times for number, times in zip(rows, repeats, strict=True))
    # Of many passes a few are counted; a part of a pass counts as the same part of its steps.
    if counted := min(epochs, COUNTED_READINGS // max(1, readings)):
        longest = max(_batches(Lane(pipeline, number), counted) for number in range(pipeline.num_lanes))
        return math.ceil(longest * (epochs / counted))
    logger.info("num_train_epochs=%g: the steps are estimated from %d documents", epochs, _LARGE_SAMPLE_DOCUMENTS)
    maker, total = pipeline.maker, sum(opened.weight for opened in pipeline.sources)
    passes = 0.0
    for number, opened in zip(rows, pipeline.sources, strict=True):
        read = islice(split_rows([opened], "train", maker), _LARGE_SAMPLE_DOCUMENTS)
        sizes = [weighed_size(opened, maker, ids) for _, ids in read]
        mean_size = sum(sizes) / max(1, len(sizes))  # of a document, in the unit of the weights
        passes = max(passes, number * (1 - opened.held_out) * mean_size * total / opened.weight)
    usable = usable_documents(split_rows(pipeline.sources, "train", maker), pipeline.data.bad_row_limit)
    sample = list(islice(usable, _LARGE_SAMPLE_DOCUMENTS))
    made = (one.example for document, ids in sample for one in maker.examples(ids, document.key, 0) if one.example)
    batches = sum(1 for _ in packed(made, pipeline, pipeline.budgets))
    size = sum(weighed_size(pipeline.sources[0], maker, ids) for _, ids in sample)
    return math.ceil(epochs * passes * batches / max(1, size) / pipeline.num_lanes)


def _batches(lane: Lane, epochs: float) -> float:
    ends = [0]
    batches = 0
    while len(ends) <= math.ceil(epochs):
        next(lane)
        batches += 1
        ends += [batches] * (lane.passes - len(ends) + 1)
    whole = math.floor(epochs)
    return ends[whole] + (epochs - whole) * (ends[math.ceil(epochs)] - ends[whole])
