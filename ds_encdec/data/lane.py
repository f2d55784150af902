"""One lane: an endless, deterministic stream of micro-batches, and the small record that resumes it.

The record holds the reader's position, the document being cut, and what waits to be packed, all by reference.
Restoring it reads the documents it refers to once more, and nothing else that was seen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_encdec.data.budgets import Budgets
from ds_encdec.data.chunks import Chunker, Tokenize
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.readers import LaneShare, Located, MixtureReader, Reference
from ds_encdec.data.sources import BadRow, OpenSource, bad_rows_of, check_bad_rows
from ds_encdec.types import DataError, Example

BARREN_DOCUMENTS = 10_000
"""Documents in a row without a usable one (empty, or held out) after which the data is called empty."""

_ALL_CHUNKS = range(1 << 62)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanePipeline:
    """Everything that the lanes of a run have in common. It is pickled into worker processes.

    `bad_row_limit`: rows that cannot be read and are passed over, in one pass and over all lanes; 0: none may be.
    """

    sources: tuple[OpenSource, ...]
    tokenize: Tokenize
    chunker: Chunker
    budgets: Budgets
    num_lanes: int
    seed: int
    shuffle_buffer_size: int
    pool_examples: int
    max_wait_batches: int
    bad_row_limit: int = 0


class _Origin(NamedTuple):
    """The place that an example comes from: enough to make it again."""

    reference: Reference
    epoch: int
    chunk: int


class _Made(NamedTuple):
    """An example, its place, and that of the next one of its document."""

    example: Example
    origin: _Origin
    next: _Origin | None


class Lane:
    """Lane `number` of `pipeline.num_lanes`, from its beginning or from a `record`."""

    def __init__(self, pipeline: LanePipeline, number: int, record: dict[str, Any] | None = None) -> None:
        self._pipeline = pipeline
        self._number = number
        share = LaneShare(number, pipeline.num_lanes, pipeline.seed, pipeline.shuffle_buffer_size)
        start = record or {"reader": None, "batches": 0, "skipped_documents": 0, "next_chunk": None, "waiting": []}
        self._reader = MixtureReader(pipeline.sources, share, start["reader"])
        self._batches: int = start["batches"]
        self._skipped_documents: int = start["skipped_documents"]
        self._bad_rows = bad_rows_of(start)
        self._last_bad_row: list[Any] | None = start.get("last_bad_row")
        self._next_chunk = start["next_chunk"] and _origin(*start["next_chunk"])
        self._packer: Packer[_Made] = Packer(
            pipeline.budgets, pool_examples=pipeline.pool_examples, max_wait_batches=pipeline.max_wait_batches
        )
        self._packer.waiting = self._make_again(start["waiting"])
        self._arrivals = self._read_examples()

    def __next__(self) -> list[Example]:
        """The examples of the next micro-batch. Raises DataError."""
        made = self._packer.pack(self._arrivals)
        self._batches += 1
        return [example for example, _, _ in made]

    @property
    def record(self) -> dict[str, Any]:
        """The state that resumes the lane behind the micro-batches handed out so far. JSON-able; a few kilobytes."""
        return {
            "lane": self._number,
            "epoch": self._reader.epoch,
            "batches": self._batches,
            "skipped_documents": self._skipped_documents,
            "bad_rows": list(self._bad_rows),
            "last_bad_row": self._last_bad_row,
            "reader": self._reader.position,
            "next_chunk": self._next_chunk and list(self._next_chunk),
            "waiting": [[*entry.item.origin, entry.waited_batches] for entry in self._packer.waiting],
        }

    def _make_again(self, waiting: list[list[Any]]) -> list[Waiting[_Made]]:
        """The entries of the pool that a record holds as `waiting`; each document is read once."""
        origins = [_origin(*place) for *place, _ in waiting]
        wanted: dict[tuple[Reference, int], set[int]] = {}
        for reference, epoch, chunk in origins:
            wanted.setdefault((reference, epoch), set()).add(chunk)
        made = (self._cut(self._fetch(*place), chunks) for place, chunks in wanted.items())
        entries = {entry.item.origin: entry for document in made for entry in document}
        return [
            dataclasses.replace(entries[origin], waited_batches=waited)
            for origin, (*_, waited) in zip(origins, waiting, strict=True)
        ]

    def _read_examples(self) -> Iterator[Waiting[_Made]]:
        """Examples in the order of reading, endlessly; `_next_chunk` points behind the last one.

        They are of documents that are not held out and have text. Raises DataError when there seems to be none.
        """
        if self._next_chunk:
            reference, epoch, chunk = self._next_chunk
            for entry in self._cut(self._fetch(reference, epoch), _ALL_CHUNKS[chunk:]):
                self._next_chunk = entry.item.next
                yield entry
        # A look that meets more bad rows than two passes may have has gone over all documents.
        most = BARREN_DOCUMENTS + 2 * self._pipeline.bad_row_limit
        barren = 0
        while barren < most:
            barren += 1
            located = next(self._reader)
            if isinstance(located.document, BadRow):
                self._pass_over(located.document, located.epoch)
            elif not self._reader.sources[located.reference[0]].holds_out(located.document.key):
                for entry in self._cut(located):
                    barren, self._next_chunk = 0, entry.item.next
                    yield entry
                self._skipped_documents += barren > 0
        raise DataError(
            f"lane {self._number} read {most} documents in a row without finding text to train on: all "
            "were empty, held out or not readable. Check data.text_column and data.eval_fraction"
        )

    def _pass_over(self, row: BadRow, epoch: int) -> None:
        """Count a row in its pass, and log it unless an earlier pass must have logged it. Raises DataError."""
        self._bad_rows += [0] * (epoch + 1 - len(self._bad_rows))
        is_new = self._bad_rows[epoch] >= max(self._bad_rows[:epoch], default=0)
        self._bad_rows[epoch] += 1
        check_bad_rows(self._bad_rows[epoch], self._pipeline.bad_row_limit, row.problem)
        same = self._last_bad_row is not None and row.problem == self._last_bad_row[1]  # as a damaged row group's are
        if is_new and not same:
            logger.warning("passed over: %s", row.problem)
        self._last_bad_row = [self._batches, row.problem]

    def _fetch(self, reference: Reference, epoch: int) -> Located:
        document = self._reader.fetch(reference)
        if isinstance(document, BadRow):
            raise DataError(f"{document.problem}. It could be read when the checkpoint was made")
        return Located(document, reference, epoch)

    def _cut(self, located: Located, wanted: Container[int] = _ALL_CHUNKS) -> Iterator[Waiting[_Made]]:
        """The examples of the `wanted` chunks of a document, for the packer. One without text has none."""
        document, reference, epoch = located
        assert not isinstance(document, BadRow)
        tokens, chunker = self._pipeline.tokenize(document), self._pipeline.chunker
        for chunk in chunker.chunks(len(tokens), document.key, epoch):
            if chunk.index in wanted:
                example = chunker.example(chunk, tokens, document.key)
                is_last = chunk.start + chunk.length == len(tokens)
                behind = None if is_last else _Origin(reference, epoch, chunk.index + 1)
                made = _Made(example, _Origin(reference, epoch, chunk.index), behind)
                yield Waiting(made, len(example.encoder_ids), len(example.decoder_ids))


def _origin(reference: list[int], epoch: int, chunk: int) -> _Origin:
    return _Origin(tuple(reference), epoch, chunk)
