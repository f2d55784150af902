"""One lane: an endless, deterministic stream of micro-batches, and the small record that resumes it.

The record holds the reader's position, the document being cut, and what waits to be packed, all by reference.
Restoring it reads the documents it refers to once more, and nothing else that was seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ds_encdec.data.bad_rows import BadRow, bad_rows_of, check_bad_rows
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.chunks import Chunk, Chunker
from ds_encdec.data.held_out import held_out_hash
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.readers import LaneShare, Located, MixtureReader, Reference
from ds_encdec.data.sources import AnyDocument, OpenSource, TokenDocument
from ds_encdec.data.text_tokens import Tokenize
from ds_encdec.data.ul2 import MIN_RAW_TOKENS
from ds_encdec.types import DataError, Example

BARREN_DOCUMENTS = 10_000
"""Documents in a row without a usable one (empty, or held out) after which the data is called empty."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pipeline:
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

    def tokens(self, document: AnyDocument) -> np.ndarray:
        """The token ids of a document, int32 [n]."""
        return document.token_ids if isinstance(document, TokenDocument) else self.tokenize([document.text])[0]

    def holds_out(self, located: Located) -> bool:
        """Whether a document is kept for evaluation."""
        return held_out_hash(located.document.key) < self._held_out_below[located.reference[0]]

    @cached_property
    def _held_out_below(self) -> dict[int, float]:
        return {opened.number: opened.held_out_below for opened in self.sources}

    def packer(self) -> Packer[Any]:
        """An empty packer with the run's budgets."""
        return Packer(self.budgets, pool_examples=self.pool_examples, max_wait_batches=self.max_wait_batches)


class _Origin(NamedTuple):
    """Where an example comes from: enough to make it again."""

    reference: Reference
    epoch: int
    chunk: int


class _Made(NamedTuple):
    example: Example
    origin: _Origin


class Lane:
    """Lane `number` of `pipeline.num_lanes`, from its beginning or from a `record`."""

    def __init__(self, pipeline: Pipeline, number: int, record: dict[str, Any] | None = None) -> None:
        self._pipeline = pipeline
        self._number = number
        share = LaneShare(number, pipeline.num_lanes, pipeline.seed, pipeline.shuffle_buffer_size)
        self._reader = MixtureReader(pipeline.sources, share, record["reader"] if record else None)
        self._packer: Packer[_Made] = pipeline.packer()
        self._next_chunk: _Origin | None = None
        self._batches = 0
        self._skipped_documents = 0
        self._bad_rows: list[int] = []
        self._last_bad_row: tuple[int, str] | None = None
        if record:
            self._restore(record)
        self._arrivals = self._read_examples()

    def __next__(self) -> list[Example]:
        """The examples of the next micro-batch. Raises DataError."""
        made = self._packer.pack(self._arrivals)
        self._batches += 1
        return [example for example, _ in made]

    @property
    def record(self) -> dict[str, Any]:
        """What resumes the lane behind the micro-batches handed out so far. JSON-able; a few kilobytes."""
        return {
            "lane": self._number,
            "epoch": self._reader.epoch,
            "batches": self._batches,
            "skipped_documents": self._skipped_documents,
            "bad_rows": list(self._bad_rows),
            "last_bad_row": self._last_bad_row and list(self._last_bad_row),
            "reader": self._reader.position,
            "next_chunk": self._next_chunk and list(self._next_chunk),
            "waiting": [[*entry.item.origin, entry.waited_batches] for entry in self._packer.waiting],
        }

    def _restore(self, record: dict[str, Any]) -> None:
        self._batches = record["batches"]
        self._skipped_documents = record["skipped_documents"]
        self._bad_rows = bad_rows_of(record)
        self._last_bad_row = tuple(record["last_bad_row"]) if record.get("last_bad_row") else None
        if record["next_chunk"]:
            reference, epoch, chunk = record["next_chunk"]
            self._next_chunk = _Origin(tuple(reference), epoch, chunk)
        origins = [_Origin(tuple(reference), epoch, chunk) for reference, epoch, chunk, _ in record["waiting"]]
        examples = self._make_again(origins)
        self._packer.waiting = [
            _waiting(_Made(examples[origin], origin), waited_batches=waited)
            for origin, (*_, waited) in zip(origins, record["waiting"], strict=True)
        ]

    def _make_again(self, origins: list[_Origin]) -> dict[_Origin, Example]:
        """The examples at `origins`; each document is read once."""
        wanted: dict[tuple[Reference, int], set[int]] = {}
        for origin in origins:
            wanted.setdefault((origin.reference, origin.epoch), set()).add(origin.chunk)
        examples = {}
        for (reference, epoch), indices in wanted.items():
            document = self._open_again(reference, epoch)
            for chunk in islice(document.chunks(), max(indices) + 1):
                if chunk.index in indices:
                    examples[_Origin(reference, epoch, chunk.index)] = document.example(chunk)
        return examples

    def _read_examples(self) -> Iterator[Waiting[_Made]]:
        """Examples in the order of reading, endlessly; `_next_chunk` points behind the last one."""
        if self._next_chunk:
            document = self._open_again(self._next_chunk.reference, self._next_chunk.epoch)
            yield from self._cut(document, self._next_chunk.chunk)
        while True:
            yield from self._cut(self._next_document(), 0)

    def _cut(self, document: _OpenDocument, first_chunk: int) -> Iterator[Waiting[_Made]]:
        origin = _Origin(document.located.reference, document.located.epoch, 0)
        for chunk in islice(document.chunks(), first_chunk, None):
            is_last = chunk.start + chunk.length == len(document.tokens)
            self._next_chunk = None if is_last else origin._replace(chunk=chunk.index + 1)
            yield _waiting(_Made(document.example(chunk), origin._replace(chunk=chunk.index)))

    def _next_document(self) -> _OpenDocument:
        """The next document that is not held out and has text. Raises DataError when there seems to be none."""
        # A look that meets more bad rows than two passes may have has gone over all documents.
        most = BARREN_DOCUMENTS + 2 * self._pipeline.bad_row_limit
        for _ in range(most):
            located = next(self._reader)
            if isinstance(located.document, BadRow):
                self._pass_over(located.document, located.epoch)
                continue
            if self._pipeline.holds_out(located):
                continue
            document = _OpenDocument(located, self._pipeline.tokens(located.document), self._pipeline.chunker)
            if len(document.tokens) >= MIN_RAW_TOKENS:
                return document
            self._skipped_documents += 1
        raise DataError(
            f"lane {self._number} read {most} documents in a row without finding text to train on: all "
            "were empty, held out or not readable. Check data.text_column and data.eval_fraction"
        )

    def _pass_over(self, row: BadRow, epoch: int) -> None:
        """Count a row in its pass, and tell it where earlier ones had no more: it was told then. Raises DataError."""
        self._bad_rows += [0] * (epoch + 1 - len(self._bad_rows))
        is_new = self._bad_rows[epoch] >= max(self._bad_rows[:epoch], default=0)
        self._bad_rows[epoch] += 1
        check_bad_rows(self._bad_rows[epoch], self._pipeline.bad_row_limit, row.problem)
        same = self._last_bad_row is not None and row.problem == self._last_bad_row[1]  # as a damaged row group's are
        if is_new and not same:
            logger.warning("passed over: %s", row.problem)
        self._last_bad_row = (self._batches, row.problem)

    def _open_again(self, reference: Reference, epoch: int) -> _OpenDocument:
        document = self._reader.fetch(reference)
        if isinstance(document, BadRow):
            raise DataError(f"{document.problem}. It could be read when the checkpoint was made")
        return _OpenDocument(
            Located(document, reference, epoch), self._pipeline.tokens(document), self._pipeline.chunker
        )


@dataclass(frozen=True, slots=True)
class _OpenDocument:
    """A tokenised document on its way through the chunker."""

    located: Located
    tokens: np.ndarray
    chunker: Chunker

    def chunks(self) -> Iterator[Chunk]:
        return self.chunker.chunks(len(self.tokens), self.located.document.key, self.located.epoch)

    def example(self, chunk: Chunk) -> Example:
        return self.chunker.example(chunk, self.tokens, self.located.document.key)


def _waiting(made: _Made, *, waited_batches: int = 0) -> Waiting[_Made]:
    return Waiting(made, len(made.example.encoder_ids), len(made.example.decoder_ids), waited_batches)
