"""One lane: an endless, deterministic stream of micro-batches, the small record that resumes it, and its processes.

The record holds only references; restoring it reads the documents behind them again. Worker processes run lanes ahead.
"""

import dataclasses
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ds_encdec.base.types import DataError, Example
from ds_encdec.data.budgets import Budgets
from ds_encdec.data.examples.protocol import ALL, ExampleMaker
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.readers import LaneShare, Located, MixtureReader, Reference, changed_since
from ds_encdec.data.sources.sources import BadRow, OpenSource, Row, check_bad_rows
from ds_encdec.data.workers import Worker

MAX_EMPTY_DOCUMENTS = 10_000
"""Consecutive documents without a usable one (empty, or held out) after which the data counts as empty."""

READY_BATCHES_PER_LANE = 2
"""Micro-batches of each lane that a worker prepares in advance."""

_LESS = (
    "lower data.preprocessing_num_workers or data.shuffle_buffer_size, or work without workers "
    "(data.preprocessing_num_workers=0)"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanePipeline:
    """Everything that the lanes of a run share; it is pickled into worker processes."""

    sources: tuple[OpenSource, ...]
    maker: ExampleMaker
    tasks: tuple[str, ...]  # the kinds of examples that may occur
    budgets: Budgets
    num_lanes: int
    seed: int
    shuffle_buffer_size: int
    pool_examples: int
    max_wait_batches: int
    bad_row_limit: int = 0  # unreadable rows that may be skipped in one pass, over all lanes


class _Origin(NamedTuple):
    reference: Reference
    epoch: int
    chunk: int


class _PlacedExample(NamedTuple):
    """An example, its place, and the place of the next one in its document."""

    example: Example
    origin: _Origin
    next: _Origin | None


_NEW_RECORD: dict[str, Any] = {
    "reader": None,
    "batches": 0,
    "skipped_documents": 0,
    "bad_rows": [],
    "last_bad_row": None,
    "long_rows": [],
    "next_chunk": None,
    "waiting": [],
}


class Lane:
    """Lane `number` of `pipeline.num_lanes`, from its beginning or from a `record`."""

    def __init__(self, pipeline: LanePipeline, number: int, record: dict[str, Any] | None = None) -> None:
        self._pipeline = pipeline
        self._number = number
        share = LaneShare(number, pipeline.num_lanes, pipeline.seed, pipeline.shuffle_buffer_size)
        start = _NEW_RECORD | (record or {})
        self._reader = MixtureReader(pipeline.sources, share, start["reader"])
        self._batches: int = start["batches"]
        self._skipped_documents: int = start["skipped_documents"]
        self._bad_rows: list[int] = [*start["bad_rows"]]
        self._last_bad_row: list[Any] | None = start["last_bad_row"]
        self._long_rows: list[int] = [*start["long_rows"]]
        self._next_chunk = start["next_chunk"] and _origin(start["next_chunk"])
        self._packer: Packer[_PlacedExample] = Packer(
            pipeline.budgets, pool_examples=pipeline.pool_examples, max_wait_batches=pipeline.max_wait_batches
        )
        self._packer.waiting = self._make_again(start["waiting"])
        self._arrivals = self._read_examples()

    def __next__(self) -> list[Example]:
        """Return the examples of the next micro-batch. Raises DataError."""
        made = self._packer.pack(self._arrivals)
        self._batches += 1
        return [example for example, _, _ in made]

    @property
    def record(self) -> dict[str, Any]:
        """Return the state that resumes the lane behind its last micro-batch: JSON-able, a few kilobytes."""
        return {
            "lane": self._number,
            "epoch": self._reader.epoch,
            "batches": self._batches,
            "skipped_documents": self._skipped_documents,
            "bad_rows": list(self._bad_rows),
            "last_bad_row": self._last_bad_row,
            "long_rows": list(self._long_rows),
            "reader": self._reader.position,
            "next_chunk": self._next_chunk and list(self._next_chunk),
            "waiting": [[*entry.item.origin, entry.waited_batches] for entry in self._packer.waiting],
        }

    @property
    def passes(self) -> int:
        """Return the complete passes over the data whose examples have all been returned."""
        waiting = (entry.item.origin.epoch for entry in self._packer.waiting)
        return min(self._reader.epoch, *waiting, *([self._next_chunk.epoch] if self._next_chunk else []))

    def _make_again(self, waiting: list[list[Any]]) -> list[Waiting[_PlacedExample]]:
        origins = [_origin(place) for *place, _ in waiting]
        wanted: dict[tuple[Reference, int], set[int]] = {}
        for reference, epoch, chunk in origins:
            wanted.setdefault((reference, epoch), set()).add(chunk)
        read = {place: self._fetch(*place) for place in wanted}
        made = chain.from_iterable(self._cut(*read[place], chunks, again=True) for place, chunks in wanted.items())
        entries = {entry.item.origin: entry for entry in made}
        for origin in origins:
            if origin not in entries:
                located, _ = read[origin.reference, origin.epoch]
                raise changed_since(f"example {origin.chunk} of {located.document.key}")
        return [
            dataclasses.replace(entries[origin], waited_batches=waited)
            for origin, (*_, waited) in zip(origins, waiting, strict=True)
        ]

    def _read_examples(self) -> Iterator[Waiting[_PlacedExample]]:
        """Yield examples in reading order, endlessly. Raises DataError if no document seems to have text."""
        if self._next_chunk:
            reference, epoch, chunk = self._next_chunk
            for entry in self._cut(*self._fetch(reference, epoch), ALL[chunk:]):
                self._next_chunk = entry.item.next
                yield entry
        # A search that meets more bad rows than two passes may have has read all documents.
        most = MAX_EMPTY_DOCUMENTS + 2 * self._pipeline.bad_row_limit
        empty = 0
        while empty < most:
            empty += 1
            located = next(self._reader)
            document, (number, *_), _ = located
            if not isinstance(document, BadRow) and self._reader.sources[number].holds_out(document.key):
                continue
            ids = self._read(document)
            if isinstance(ids, BadRow):
                self._pass_over(ids, located.epoch)
                continue
            self._reader.took(number, self._pipeline.maker.size(ids))
            for entry in self._cut(located, ids):
                empty, self._next_chunk = 0, entry.item.next
                yield entry
            self._skipped_documents += empty > 0
        raise DataError(
            f"lane {self._number} read {most} documents in a row without finding text to train on: all "
            f"were {self._pipeline.maker.why_empty}"
        )

    def _pass_over(self, row: BadRow, epoch: int) -> None:
        """Count a bad row in its pass, and log it unless an earlier pass must have logged it. Raises DataError."""
        self._bad_rows += [0] * (epoch + 1 - len(self._bad_rows))
        is_new = self._bad_rows[epoch] >= max(self._bad_rows[:epoch], default=0)
        self._bad_rows[epoch] += 1
        check_bad_rows(self._bad_rows[epoch], self._pipeline.bad_row_limit, row.problem)
        # All rows of a damaged row group have the same problem.
        same = self._last_bad_row is not None and row.problem == self._last_bad_row[1]
        if is_new and not same:
            logger.warning("passed over: %s", row.problem)
        self._last_bad_row = [self._batches, row.problem]

    def _read(self, row: Row) -> Any | BadRow:
        return row if isinstance(row, BadRow) else self._pipeline.maker.read(row)

    def _fetch(self, reference: Reference, epoch: int) -> tuple[Located, Any]:
        document = self._reader.fetch(reference)
        ids = self._read(document)
        if isinstance(ids, BadRow):
            raise DataError(f"{ids.problem}. It could be read when the checkpoint was made")
        return Located(document, reference, epoch), ids

    def _cut(
        self, located: Located, ids: Any, wanted: Container[int] = ALL, *, again: bool = False
    ) -> Iterator[Waiting[_PlacedExample]]:
        """Yield the `wanted` examples of a document; long ones are counted unless they are made `again`."""
        document, reference, epoch = located
        for number, example, is_last, is_long in self._pipeline.maker.examples(ids, document.key, epoch, wanted):
            if is_long and not again:
                self._long_rows += [0] * (epoch + 1 - len(self._long_rows))
                self._long_rows[epoch] += 1
            if example is not None:
                behind = None if is_last else _Origin(reference, epoch, number + 1)
                made = _PlacedExample(example, _Origin(reference, epoch, number), behind)
                yield Waiting(made, len(example.encoder_ids), len(example.decoder_ids))


def _origin(saved: list[Any]) -> _Origin:
    reference, epoch, chunk = saved
    return _Origin(tuple(reference), epoch, chunk)


class LaneBatch(NamedTuple):
    """A micro-batch, and the record of its lane right behind it."""

    examples: list[Example]
    record: dict[str, Any]


class WorkerLanes:
    """Lanes in `num_workers` processes (0: in this one); lane k of the list runs in worker k mod num_workers."""

    def __init__(
        self, pipeline: LanePipeline, lanes: Sequence[int], records: Mapping[int, dict[str, Any]], num_workers: int
    ) -> None:
        self._batches: dict[int, Iterator[LaneBatch]] = {}
        self.workers: list[Worker] = []
        for numbers in [lanes[worker::num_workers] for worker in range(num_workers)]:
            mine = {lane: records[lane] for lane in numbers if lane in records}
            ahead = READY_BATCHES_PER_LANE * len(numbers)
            worker = Worker(lane_batches, pipeline, list(numbers), mine, ahead=ahead, advice=_LESS)
            self.workers.append(worker)
            self._batches |= dict.fromkeys(numbers, worker)
        if not num_workers:
            self._batches = dict.fromkeys(lanes, lane_batches(pipeline, lanes, records))

    def take(self, lane: int) -> LaneBatch:
        """Return the next micro-batch of `lane`, in the order of the lanes. Raises the worker's error, or DataError."""
        return next(self._batches[lane])

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()


def lane_batches(
    pipeline: LanePipeline, numbers: Sequence[int], records: Mapping[int, dict[str, Any]]
) -> Iterator[LaneBatch]:
    """Yield the micro-batches of one process's lanes, in turns, endlessly."""
    lanes = [Lane(pipeline, number, records.get(number)) for number in numbers]
    while True:
        for lane in lanes:
            yield LaneBatch(next(lane), lane.record)
