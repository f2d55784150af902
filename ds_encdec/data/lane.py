"""One lane: an endless, deterministic stream of micro-batches, and the small record that resumes it.

The record holds the reader's position, the document being cut, and what waits to be packed, all by reference.
Restoring it reads the documents it refers to once more, and nothing else that was seen.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ds_encdec.data.budgets import Budgets
from ds_encdec.data.chunks import Chunk, Chunker, Tokenize
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.readers import LaneShare, Located, MixtureReader, Reference
from ds_encdec.data.sources import BadRow, OpenSource, bad_rows_of, check_bad_rows
from ds_encdec.data.ul2 import MIN_RAW_TOKENS
from ds_encdec.types import DataError, Example

BARREN_DOCUMENTS = 10_000
"""Documents in a row without a usable one (empty, or held out) after which the data is called empty."""

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
    example: Example
    origin: _Origin


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
        return [example for example, _ in made]

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
        entries: dict[_Origin, Waiting[_Made]] = {}
        for (reference, epoch), chunks in wanted.items():
            document = self._open_again(reference, epoch)
            again = [chunk for chunk in islice(document.chunks(), max(chunks) + 1) if chunk.index in chunks]
            entries |= {entry.item.origin: entry for entry in map(document.entry, again)}
        return [
            dataclasses.replace(entries[origin], waited_batches=waited)
            for origin, (*_, waited) in zip(origins, waiting, strict=True)
        ]

    def _read_examples(self) -> Iterator[Waiting[_Made]]:
        """Examples in the order of reading, endlessly; `_next_chunk` points behind the last one."""
        if self._next_chunk:
            reference, epoch, chunk = self._next_chunk
            yield from self._cut(self._open_again(reference, epoch), chunk)
        while True:
            yield from self._cut(self._next_document())

    def _cut(self, document: _OpenDocument, first_chunk: int = 0) -> Iterator[Waiting[_Made]]:
        for chunk in islice(document.chunks(), first_chunk, None):
            entry = document.entry(chunk)
            is_last = chunk.start + chunk.length == len(document.tokens)
            self._next_chunk = None if is_last else entry.item.origin._replace(chunk=chunk.index + 1)
            yield entry

    def _next_document(self) -> _OpenDocument:
        """The next document that is not held out and has text. Raises DataError when there seems to be none."""
        # A look that meets more bad rows than two passes may have has gone over all documents.
        most = BARREN_DOCUMENTS + 2 * self._pipeline.bad_row_limit
        for _ in range(most):
            located = next(self._reader)
            if isinstance(located.document, BadRow):
                self._pass_over(located.document, located.epoch)
                continue
            if self._reader.sources[located.reference[0]].holds_out(located.document.key):
                continue
            document = self._open(located)
            if len(document.tokens) >= MIN_RAW_TOKENS:
                return document
            self._skipped_documents += 1
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

    def _open_again(self, reference: Reference, epoch: int) -> _OpenDocument:
        document = self._reader.fetch(reference)
        if isinstance(document, BadRow):
            raise DataError(f"{document.problem}. It could be read when the checkpoint was made")
        return self._open(Located(document, reference, epoch))

    def _open(self, located: Located) -> _OpenDocument:
        assert not isinstance(located.document, BadRow)
        return _OpenDocument(located, self._pipeline.tokenize(located.document), self._pipeline.chunker)


class _OpenDocument(NamedTuple):
    """A tokenised document on its way through the chunker."""

    located: Located
    tokens: np.ndarray
    chunker: Chunker

    def chunks(self) -> Iterator[Chunk]:
        return self.chunker.chunks(len(self.tokens), self.located.document.key, self.located.epoch)

    def entry(self, chunk: Chunk) -> Waiting[_Made]:
        """The example of `chunk`, for the packer."""
        example = self.chunker.example(chunk, self.tokens, self.located.document.key)
        origin = _Origin(self.located.reference, self.located.epoch, chunk.index)
        return Waiting(_Made(example, origin), len(example.encoder_ids), len(example.decoder_ids))


def _origin(reference: list[int], epoch: int, chunk: int) -> _Origin:
    return _Origin(tuple(reference), epoch, chunk)
