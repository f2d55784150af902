"""The evaluation batches: the first examples of the held-out documents, the same at every evaluation and world size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice

from ds_encdec.data.collate import collate
from ds_encdec.data.held_out import held_out_hash
from ds_encdec.data.lane import Pipeline
from ds_encdec.data.packing import Budgets, Waiting
from ds_encdec.data.randomness import Permutation
from ds_encdec.data.sources import AnyDocument, OpenSource, StreamSource
from ds_encdec.types import Batch, DataError, Example

_SEED = 0
"""Evaluation does not depend on the run's seed, so that runs can be compared."""


def eval_batches(pipeline: Pipeline, budgets: Budgets, num_examples: int, *, rank: int, world_size: int) -> list[Batch]:
    """Rank `rank`'s part of the first `num_examples` held-out examples (fewer, if there are no more).

    All ranks pack the same batches; batch j goes to rank j mod world_size, and empty batches make the ranks'
    lists equally long. Raises DataError when nothing is held out.
    """
    packer = dataclasses.replace(pipeline, budgets=budgets).packer()
    arrivals = (
        Waiting(example, len(example.encoder_ids), len(example.decoder_ids))
        for example in islice(held_out_examples(pipeline), num_examples)
    )
    packed: list[list[Example]] = list(iter(lambda: packer.pack(arrivals), []))
    if not packed:
        raise DataError(
            "no document is held out for evaluation: raise data.eval_fraction, add documents (two at least), or turn "
            "evaluation off with training.eval_samples=0"
        )
    rounds = -(-len(packed) // world_size)
    packed += [[]] * (rounds * world_size - len(packed))
    vocabulary = pipeline.chunker.vocabulary
    return [
        collate(examples, budgets, decoder_start_id=vocabulary.decoder_start_id, pad_id=vocabulary.pad_id)
        for examples in packed[rank::world_size]
    ]


def held_out_examples(pipeline: Pipeline) -> Iterator[Example]:
    """Every held-out example once, source by source in turn, denoised alike in all runs."""
    chunker = dataclasses.replace(pipeline.chunker, seed=_SEED)
    queues = [_held_out_documents(opened) for opened in pipeline.sources]
    while queues:
        for documents in list(queues):
            document = next(documents, None)
            if document is None:
                queues.remove(documents)
                continue
            tokens = pipeline.tokens(document)
            for chunk in chunker.chunks(len(tokens), document.key, 0):
                yield chunker.example(chunk, tokens, document.key)


def _held_out_documents(opened: OpenSource) -> Iterator[AnyDocument]:
    source = opened.source
    if isinstance(source, StreamSource):
        for unit in range(source.num_units):
            documents = source.documents(unit, 0)
            yield from (one for one in documents if held_out_hash(one.key) < opened.held_out_below)
    elif opened.held_out_below:
        order = Permutation(len(source), _SEED, "evaluation")
        for index in (order[place] for place in range(len(source))):
            if held_out_hash(source.key(index)) < opened.held_out_below:
                yield source.document(index)
