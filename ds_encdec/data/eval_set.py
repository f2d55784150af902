"""The evaluation split: the first held-out examples, the same at every evaluation and world size."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ds_encdec.base.types import DataError, Example
from ds_encdec.config.shares import Budgets
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.data.examples.protocol import ExampleMaker, usable_documents, with_ids
from ds_encdec.data.fingerprint import Facts, digest
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.packing import Waiting
from ds_encdec.data.sources.sources import BadRow, OpenSource, Row, Split, all_rows, held_out_hash
from ds_encdec.launch.disk import write_atomically

_FORMAT = 5  # of the cached files, and of the rules that make examples of rows: raised when either changes

logger = logging.getLogger(__name__)


def evaluation_examples(
    pipeline: LanePipeline,
    num_examples: int,
    facts: Facts,
    cache_folder: Path | None,  # keeps the examples under a digest of everything they depend on
    own: Sequence[OpenSource] = (),  # sources for evaluation only
) -> list[Example]:
    """Return the first `num_examples` held-out examples, or all. Raises DataError if no example is held out."""
    kept = cache_folder and cache_folder / f"examples-{digest([_FORMAT, facts, num_examples])}.json"
    if kept and (examples := _read_examples(kept)):
        return examples
    if kept:
        logger.info("building the evaluation set (cached in %s)", kept)
    examples = list(islice(held_out_examples(pipeline, own), num_examples))
    if not examples:
        raise DataError(
            f"{'the files or the split to evaluate on (eval_files, eval_split)' if own else 'the held-out documents'} "
            "give no example: no document is there, or all are empty, too long (data.on_long_row) or of weight 0. "
            "Raise data.eval_fraction (for sft lower data.train_split_ratio), add documents (two at least), or turn "
            "evaluation off with training.eval_samples=0"
        )
    if kept:
        rows = [
            ([[ids.tolist() for ids in segment] for segment in one.segments], one.denoiser, one.document)
            for one in examples
        ]
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps({"digest": digest(rows), "examples": rows}))
        except OSError as error:
            logger.warning("%s could not be written (%s): the evaluation set is made again by each rank", kept, error)
    return examples


def _read_examples(path: Path) -> list[Example]:
    try:
        content = read_json(path, None)
        if content["digest"] != digest(content["examples"]):
            raise ValueError("its digest does not match")
        return [_example(*row) for row in content["examples"]]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("%s is damaged, and is made again: %r", path, error)
    return []


def _example(segments: list[list[list[int]]], denoiser: str, document: str) -> Example:
    first, *others = [(np.array(ids, np.int32), np.array(target, np.int32)) for ids, target in segments]
    return Example(*first, denoiser, document, tuple(others))


def packed(examples: Iterable[Example], pipeline: LanePipeline, budgets: Budgets) -> Iterator[list[Example]]:
    """Yield the examples in micro-batches."""
    arrivals = (Waiting(one, *pipeline.tokens(one)) for one in examples)
    return iter(partial(pipeline.packer(budgets).pack, arrivals), [])


def held_out_examples(pipeline: LanePipeline, own: Sequence[OpenSource] = ()) -> Iterator[Example]:
    """Yield every held-out example once, the same in all runs. Raises DataError for too many bad rows."""
    maker, sources = pipeline.maker.of_evaluation(), own or pipeline.sources
    return (example for _, example in keyed_examples(sources, "validation", maker, pipeline.data.bad_row_limit))


def keyed_examples(
    sources: Sequence[OpenSource], split: Split, maker: ExampleMaker, bad_row_limit: int
) -> Iterator[tuple[str, Example]]:
    """Yield every example of a split once with its document's key, and `#NUMBER` if it is not that document's first."""
    for document, ids in usable_documents(split_rows(sources, split, maker), bad_row_limit):
        for made in maker.examples(ids, document.key, 0):
            if made.example is not None:
                yield document.key if made.number == 0 else f"{document.key}#{made.number}", made.example


def split_rows(sources: Sequence[OpenSource], split: Split, maker: ExampleMaker) -> Iterator[tuple[Row, Any | BadRow]]:
    """Yield the rows of a split `with_ids`; every prefix is in proportion to the weights, in their unit. The next row
    is of the source that is furthest behind its share; a source drops out at its end."""

    def is_wanted(opened: OpenSource, key: str) -> bool:
        if not opened.holds_out(key):
            return split == "train"
        return split == ("validation" if held_out_hash(key) < opened.held_out_below else "test")

    queues = [with_ids(all_rows(opened.source, "evaluation", partial(is_wanted, opened)), maker) for opened in sources]
    shares = [{"train": 1.0, "validation": one.held_out_below, "test": one.test_below}[split] for one in sources]
    due = {number: 1 / opened.weight for number, opened in enumerate(sources) if shares[number]}
    for number in due if sources[0].counts_tokens else ():
        first = [*islice(queues[number], 1)]
        queues[number] = chain(first, queues[number])
        due[number] *= sum(weighed_size(sources[number], maker, ids) for _, ids in first)
    while due:
        number = min(due, key=lambda candidate: due[candidate])
        if read := next(queues[number], None):
            due[number] += weighed_size(sources[number], maker, read[1]) / sources[number].weight
            yield read
        else:
            del due[number]


def weighed_size(opened: OpenSource, maker: ExampleMaker, ids: Any | BadRow) -> int:
    """Return the size of a row with these ids in the unit of the weights: 1 document, or its tokens."""
    return 1 if isinstance(ids, BadRow) or not opened.counts_tokens else 1 + maker.size(ids)
