"""The optimizer steps of `training.num_train_epochs`: lanes run ahead without a model, or a sample is packed."""

import logging
import math
from itertools import islice

from ds_encdec.base.types import ConfigError, DataError, Example
from ds_encdec.config.implied import shortened_warmup
from ds_encdec.config.rules import find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.eval_set import split_rows, weighed_size
from ds_encdec.data.examples.protocol import usable_documents
from ds_encdec.data.lane import Lane, LanePipeline
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.sources.sources import AnySource, OpenSource, StreamSource

COUNTED_READINGS = 100_000
"""Readings of a document, in all passes, up to which the lanes run ahead."""

SAMPLE_DOCUMENTS = 4000

logger = logging.getLogger(__name__)


def with_steps_of_epochs(config: FullConfig, steps: int) -> FullConfig:
    """Return the configuration with `steps` for its epochs. Raises ConfigError if its other fields do not fit them."""
    training = config.training
    epochs, ratio, warmup_steps = training.num_train_epochs, training.warmup_ratio, training.warmup_steps
    if ratio is not None:
        warmup_steps = math.ceil(steps * ratio)
    elif "warmup_steps" not in training.model_fields_set:
        shorter = shortened_warmup(steps, training.lr_scheduler_type)
        warmup_steps = warmup_steps if shorter is None else shorter
    changes = {"num_train_steps": steps, "num_train_epochs": None, "warmup_steps": warmup_steps, "warmup_ratio": None}
    counted = config.model_copy(update={"training": config.training.model_copy(update=changes)})
    if conflicts := find_conflicts(counted):
        lines = "\n".join(f"  {', '.join(conflict.fields)}: {conflict.message}" for conflict in conflicts)
        raise ConfigError(f"training.num_train_epochs={epochs} are {steps} optimizer steps:\n{lines}")
    return counted


def steps_of_epochs(pipeline: LanePipeline, epochs: float) -> int:
    """Return the optimizer steps in which every lane returns all examples of `epochs` passes over its data.

    Passes over a mixture are those over its slowest source. Raises DataError for a stream of unknown length.
    """
    rows = [_rows(opened.source) for opened in pipeline.sources]
    readings = sum(
        count * (pipeline.num_lanes if isinstance(opened.source, StreamSource) else 1)
        for count, opened in zip(rows, pipeline.sources, strict=True)
    )
    # Of many passes a few are counted; a part of a pass counts as the same part of its steps.
    counted = min(epochs, COUNTED_READINGS // max(1, readings))
    if counted:
        longest = max(_batches(Lane(pipeline, number), counted) for number in range(pipeline.num_lanes))
        return math.ceil(longest * (epochs / counted))
    total = sum(opened.weight for opened in pipeline.sources)
    passes = max(
        count * (1 - opened.held_out) * _mean_size(opened, pipeline) * total / opened.weight
        for count, opened in zip(rows, pipeline.sources, strict=True)
    )
    logger.info("num_train_epochs=%g: the steps are estimated from %d documents", epochs, SAMPLE_DOCUMENTS)
    return math.ceil(epochs * passes * _batches_per_size(pipeline) / pipeline.num_lanes)


def _rows(source: AnySource) -> int:
    count = getattr(source, "num_rows", None) if isinstance(source, StreamSource) else len(source)
    if count is None:
        raise DataError(
            "training.num_train_epochs: the length of streamed data is not known before its end. Give "
            "training.num_train_steps, or read it whole with data.streaming=false"
        )
    return int(count)


def _batches(lane: Lane, epochs: float) -> float:
    ends = [0]
    batches = 0
    while len(ends) <= math.ceil(epochs):
        next(lane)
        batches += 1
        ends += [batches] * (lane.passes - len(ends) + 1)
    whole = math.floor(epochs)
    return ends[whole] + (epochs - whole) * (ends[math.ceil(epochs)] - ends[whole])


def _mean_size(opened: OpenSource, pipeline: LanePipeline) -> float:
    """Return the mean size of a source's documents, from a sample, in the unit of the weights (`weighed_size`)."""
    if not opened.counts_tokens:
        return 1.0
    rows = islice(split_rows([opened], "train", pipeline.maker), SAMPLE_DOCUMENTS)
    sizes = [weighed_size(opened, pipeline.maker, ids) for _, ids in rows]
    return sum(sizes) / max(1, len(sizes))


def _batches_per_size(pipeline: LanePipeline) -> float:
    """Return the micro-batches that a sample fills, per document or per token, in the unit of the weights."""
    maker = pipeline.maker
    rows = split_rows(pipeline.sources, "train", maker)
    sample = list(islice(usable_documents(rows, pipeline.bad_row_limit), SAMPLE_DOCUMENTS))
    made: list[Example] = [
        one.example
        for document, ids in sample
        for one in maker.examples(ids, document.key, 0)
        if one.example is not None
    ]
    packer: Packer[None] = Packer(
        pipeline.budgets, pool_examples=pipeline.pool_examples, max_wait_batches=pipeline.max_wait_batches
    )
    arrivals = iter([Waiting(None, len(one.encoder_ids), len(one.decoder_ids)) for one in made])
    size = sum(weighed_size(pipeline.sources[0], maker, ids) for _, ids in sample)
    return sum(1 for _ in iter(lambda: packer.pack(arrivals), [])) / max(1, size)
