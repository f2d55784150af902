"""One lane: an endless, deterministic stream of micro-batches, and the small record that resumes it.

The record holds only references; restoring it reads the documents behind them again.
"""

import copy
import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ds_encdec.base.types import DataError, Example
from ds_encdec.config.schema import DataConfig
from ds_encdec.config.shares import Budgets
from ds_encdec.data.examples.protocol import ALL, ExampleMaker
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.data.readers import LaneShare, Located, MixtureReader, Reference, changed_since
from ds_encdec.data.sources.sources import BadRow, OpenSource, Row, check_bad_rows
from ds_encdec.registry.objectives import OBJECTIVES

# Consecutive documents without a usable one (empty, or held out) after which the data counts as empty.
MAX_EMPTY_DOCUMENTS = 10_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanePipeline:
    """Everything that the lanes of a run share; it is pickled into worker processes."""

    sources: tuple[OpenSource, ...]
    maker: ExampleMaker
    budgets: Budgets
    num_lanes: int
    seed: int
    data: DataConfig

    def packer(self, budgets: Budgets) -> Packer[Any]:
        """Return a packer with an empty pool."""
        data = self.data
        return Packer(budgets, pool_examples=data.packing_pool_examples, max_wait_batches=data.packing_max_wait_batches)

    def tokens(self, example: Example) -> tuple[int, int]:
        """Return the tokens of `example` on either side of a micro-batch; an encoder's labels need no decoder."""
        encoder, decoder = example.tokens
        return encoder, 0 if OBJECTIVES[self.data.objective].encoder_only else decoder


class _Origin(NamedTuple):
    reference: Reference
    epoch: int
    chunk: int


_Placed: TypeAlias = tuple[Example, _Origin]


class Lane:
    """Lane `number` of `pipeline.num_lanes`, from its beginning or from a `record`. Each `next` is the examples of a
    micro-batch. Raises DataError."""

    def __init__(self, pipeline: LanePipeline, number: int, record: dict[str, Any] | None = None) -> None:
        self._pipeline, self._number, start = pipeline, number, record or {}
        share = LaneShare(number, pipeline.num_lanes, pipeline.seed, pipeline.data.shuffle_buffer_size)
        self._reader = MixtureReader(pipeline.sources, share, start.get("reader"))
        new = {"batches": 0, "skipped_documents": 0, "bad_rows": [], "last_bad_row": None, "long_rows": []}
        # Bad and long rows by pass, and the last bad row's batch and problem.
        self._counts: dict[str, Any] = copy.deepcopy({name: start.get(name, zero) for name, zero in new.items()})
        self._next_chunk = _origin(*start["next_chunk"]) if start.get("next_chunk") else None
        self._packer: Packer[_Placed] = pipeline.packer(pipeline.budgets)
        self._packer.waiting = self._make_again(start.get("waiting", []))
        self._arrivals = self._read_examples()

    def __next__(self) -> list[Example]:
        made = self._packer.pack(self._arrivals)
        self._counts["batches"] += 1
        return [example for example, _ in made]

    @property
    def record(self) -> dict[str, Any]:
        """Return the state that resumes the lane behind its last micro-batch: JSON-able, a few kilobytes."""
        return {
            "lane": self._number,
            "epoch": self._reader.epoch,
            **copy.deepcopy(self._counts),
            "reader": self._reader.position,
            "next_chunk": self._next_chunk and list(self._next_chunk),
            "waiting": [[*entry.item[1], entry.waited_batches] for entry in self._packer.waiting],
        }

    @property
    def passes(self) -> int:
        """Return the complete passes over the data whose examples have all been returned."""
        waiting = (entry.item[1].epoch for entry in self._packer.waiting)
        return min(self._reader.epoch, *waiting, *([self._next_chunk.epoch] if self._next_chunk else []))

    def _make_again(self, waiting: list[list[Any]]) -> list[Waiting[_Placed]]:
        origins = [_origin(*place) for *place, _ in waiting]
        wanted: dict[tuple[Reference, int], set[int]] = {}
        for reference, epoch, chunk in origins:
            wanted.setdefault((reference, epoch), set()).add(chunk)
        read = {place: self._fetch(*place) for place in wanted}
        entries = {
            entry.item[1]: entry
            for place, chunks in wanted.items()
            for entry in self._cut(*read[place], chunks, again=True)
        }
        if lost := [origin for origin in origins if origin not in entries]:
            located, _ = read[lost[0].reference, lost[0].epoch]
            raise changed_since(f"example {lost[0].chunk} of {located.document.key}")
        return [
            replace(entries[origin], waited_batches=waited)
            for origin, (*_, waited) in zip(origins, waiting, strict=True)
        ]

    def _read_examples(self) -> Iterator[Waiting[_Placed]]:
        if self._next_chunk:
            reference, epoch, chunk = self._next_chunk
            yield from self._cut(*self._fetch(reference, epoch), ALL[chunk:])
        # A search that meets more bad rows than two passes may have has read all documents.
        most = MAX_EMPTY_DOCUMENTS + 2 * self._pipeline.data.bad_row_limit
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
                empty = 0
                yield entry
            self._counts["skipped_documents"] += empty > 0
        raise DataError(
            f"lane {self._number} found no text in {most} documents in a row: all were {self._pipeline.maker.why_empty}"
        )

    def _count(self, name: str, epoch: int) -> None:
        rows = self._counts[name]
        rows += [0] * (epoch + 1 - len(rows))
        rows[epoch] += 1

    def _pass_over(self, row: BadRow, epoch: int) -> None:
        self._count("bad_rows", epoch)
        *earlier, found = self._counts["bad_rows"][: epoch + 1]
        check_bad_rows(found, self._pipeline.data.bad_row_limit, row.problem)
        # Logged unless an earlier pass must have logged it. All rows of a damaged row group have the same problem.
        last = self._counts["last_bad_row"]
        if found > max(earlier, default=0) and (last is None or last[1] != row.problem):
            logger.warning("passed over: %s", row.problem)
        self._counts["last_bad_row"] = [self._counts["batches"], row.problem]

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
    ) -> Iterator[Waiting[_Placed]]:
        """Yield the `wanted` examples of a document; unless made `again`, they move the place where reading goes on."""
        document, reference, epoch = located
        for number, example, is_last, is_long in self._pipeline.maker.examples(ids, document.key, epoch, wanted):
            if is_long and not again:
                self._count("long_rows", epoch)
            if example is None:
                continue
            if not again:
                self._next_chunk = None if is_last else _Origin(reference, epoch, number + 1)
            origin = _Origin(reference, epoch, number)
            yield Waiting((example, origin), *self._pipeline.tokens(example))


def _origin(reference: Sequence[int], epoch: int, chunk: int) -> _Origin:
    return _Origin(tuple(reference), epoch, chunk)


def lane_batches(
    pipeline: LanePipeline, numbers: Sequence[int], records: Mapping[int, dict[str, Any]]
) -> Iterator[tuple[list[Example], dict[str, Any]]]:
    """Yield micro-batches of one process's lanes and the record right behind each, in turns, endlessly."""
    lanes = [Lane(pipeline, number, records.get(number)) for number in numbers]
    while True:
        for lane in lanes:
            yield next(lane), lane.record
