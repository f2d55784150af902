"""The order in which a lane reads documents: a position that can be saved, and a reference to each document.

Lane i of M reads every document that falls to it once per epoch, in an order keyed by (seed, epoch). A
position is a small dict of integers. A reference is a tuple of integers with which `fetch` reads one document again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ds_encdec.data.randomness import Permutation, keyed_generator
from ds_encdec.data.sources import MapSource, OpenSource, Row, StreamSource
from ds_encdec.types import DataError

Reference = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaneShare:
    """Which part of the data a reader serves: lane `lane` of `num_lanes`, in the order that `seed` gives."""

    lane: int
    num_lanes: int
    seed: int
    shuffle_buffer_size: int

    def nothing_to_read(self, there: str) -> DataError:
        """The error of a lane to which nothing of a source with `there` falls."""
        return DataError(
            f"lane {self.lane} of {self.num_lanes} has nothing to read: the source has {there}. Lower data.num_lanes "
            "(or training.gradient_accumulation_steps), or add data"
        )


class Located(NamedTuple):
    """A document (or a bad row), where it can be found again, and the pass over its source in which it was read."""

    document: Row
    reference: Reference
    epoch: int


class MapReader:
    """Documents lane, lane + num_lanes, ... of the epoch's permutation. Position: epoch and index in it."""

    def __init__(
        self, source: MapSource, source_number: int, share: LaneShare, position: dict[str, Any] | None
    ) -> None:
        if len(source) <= share.lane:
            raise share.nothing_to_read(f"{len(source)} documents")
        self._source = source
        self._number = source_number
        self._share = share
        start = position or {"epoch": 0, "index": share.lane}
        self._begin(start["epoch"], start["index"])

    @property
    def position(self) -> dict[str, Any]:
        """Epoch, and index in the epoch's permutation, of the next document."""
        return {"epoch": self.epoch, "index": self._index}

    def __next__(self) -> Located:
        if self._index >= len(self._permutation):
            self._begin(self.epoch + 1, self._share.lane)
        reference = (self._permutation[self._index],)
        self._index += self._share.num_lanes
        return Located(self.fetch(reference), reference, self.epoch)

    def fetch(self, reference: Reference) -> Row:
        """Document number `reference[0]`."""
        return self._source.document(reference[0])

    def _begin(self, epoch: int, index: int) -> None:
        self.epoch = epoch
        self._index = index
        self._permutation = Permutation(len(self._source), self._share.seed, "documents", self._number, epoch)


class StreamReader:
    """The rows of the lane's units, in windows of `shuffle_buffer_size` documents, each permuted.

    Units are dealt to the lanes anew in every epoch. Where there are fewer units than lanes, every lane reads
    all units and keeps the rows whose number falls to it. Position: where the current window starts (the
    unit's place in the lane's order, and the row), its number in the epoch, and the documents taken from it.
    A resumed reader reads the current window again, and nothing before it.
    """

    def __init__(
        self, source: StreamSource, source_number: int, share: LaneShare, position: dict[str, Any] | None
    ) -> None:
        self._source = source
        self._number = source_number
        self._share = share
        self._shares_units = source.num_units < share.num_lanes
        start = position or {"epoch": 0, "window": 0, "unit": 0, "row": 0, "taken": 0}
        self.epoch: int = start["epoch"]
        self._window_number: int = start["window"]
        self._window_start = self._next_start = (start["unit"], start["row"])
        self._taken: int = start["taken"]
        self._rows = self._read_rows()
        self._window: list[tuple[Reference, Row]] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """See the class."""
        unit, row = self._window_start
        return {"epoch": self.epoch, "window": self._window_number, "unit": unit, "row": row, "taken": self._taken}

    def __next__(self) -> Located:
        while self._taken >= len(window := self._current_window()):
            self._advance(len(window))
        reference, document = window[self._taken]
        self._taken += 1
        return Located(document, reference, self.epoch)

    def fetch(self, reference: Reference) -> Row:
        """Row `reference[1]` of unit `reference[0]`."""
        held, (unit, row) = dict(self._current_window()), reference
        return held[reference] if reference in held else next(self._source.documents(unit, row))

    def _advance(self, window_size: int) -> None:
        """Move on to the window after the current one, in the next epoch if it was the last."""
        if window_size == self._share.shuffle_buffer_size:
            self._window_number += 1
            self._window_start = self._next_start
        elif self._window_number == 0 and not window_size:
            raise self._share.nothing_to_read("too few documents")
        else:
            self.epoch, self._window_number = self.epoch + 1, 0
            self._window_start = (0, 0)
            self._rows = self._read_rows()
        self._taken = 0
        self._window = None

    def _current_window(self) -> list[tuple[Reference, Row]]:
        """The documents of the current window in its order, read at its first use."""
        if self._window is None:
            window = []
            for start, reference, document in islice(self._rows, self._share.shuffle_buffer_size):
                window.append((reference, document))
                self._next_start = start
            share = self._share
            rng = keyed_generator(share.seed, "window", self._number, share.lane, self.epoch, self._window_number)
            self._window = [window[index] for index in rng.permutation(len(window))]
        return self._window

    def _read_rows(self) -> Iterator[tuple[tuple[int, int], Reference, Row]]:
        """(position behind it, reference, document) of each row from the window's start to the epoch's end."""
        (first_place, first_row), units = self._window_start, self._units()
        for place in range(first_place, len(units)):
            start = first_row if place == first_place else 0
            for row, document in enumerate(self._source.documents(units[place], start), start=start):
                if not self._shares_units or row % self._share.num_lanes == self._share.lane:
                    yield (place, row + 1), (units[place], row), document

    def _units(self) -> list[int]:
        """The units that this lane reads in this epoch, in order."""
        if not self._source.num_units:
            return []
        order = Permutation(self._source.num_units, self._share.seed, "units", self._number, self.epoch)
        mine = slice(None) if self._shares_units else slice(self._share.lane, None, self._share.num_lanes)
        return [order[place] for place in range(len(order))[mine]]


class MixtureReader:
    """Draws each document from one of several sources, by weight. References start with the source's number.

    The choice is keyed by the lane and the number of the draw, so lanes do not draw a rare source in step. A position
    holds that of each source by its number; a source that is not in it begins at its beginning.
    """

    def __init__(self, sources: Sequence[OpenSource], share: LaneShare, position: dict[str, Any] | None) -> None:
        start = position or {"draws": 0, "sources": {}}
        positions = source_positions(start)
        self.sources = {opened.number: opened for opened in sources}
        """The sources by their numbers."""
        self._readers: dict[int, MapReader | StreamReader] = {}
        for opened in sources:
            kind: type[Any] = StreamReader if isinstance(opened.source, StreamSource) else MapReader
            self._readers[opened.number] = kind(opened.source, opened.number, share, positions.get(opened.number))
        total = sum(opened.weight for opened in sources)
        self._shares = [opened.weight / total for opened in sources]
        self._share = share
        self._draws: int = start["draws"]

    @property
    def epoch(self) -> int:
        """Complete passes over the source that is furthest behind."""
        return min(reader.epoch for reader in self._readers.values())

    @property
    def position(self) -> dict[str, Any]:
        """The position in each source, and the draws made. JSON-able."""
        return {
            "draws": self._draws,
            "sources": {str(number): reader.position for number, reader in self._readers.items()},
        }

    def __next__(self) -> Located:
        drawn = 0
        if len(self.sources) > 1:
            rng = keyed_generator(self._share.seed, "mixture", self._share.lane, self._draws)
            drawn = int(rng.choice(len(self.sources), p=self._shares))
        self._draws += 1
        number = list(self.sources)[drawn]
        located = next(self._readers[number])
        return located._replace(reference=(number, *located.reference))

    def fetch(self, reference: Reference) -> Row:
        """The document of the source with number `reference[0]`."""
        return self._readers[reference[0]].fetch(reference[1:])


def source_positions(position: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The position in each source, by its number, of a `MixtureReader.position`; earlier ones hold a list of them."""
    saved = position["sources"]
    return dict(enumerate(saved)) if isinstance(saved, list) else {int(number): one for number, one in saved.items()}
