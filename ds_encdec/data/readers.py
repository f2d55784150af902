"""The order in which a lane reads documents: a position that can be saved, and a reference to each document.

Lane i of M reads every document that falls to it once per epoch, in an order keyed by (seed, epoch). A
position is a small dict of integers. A reference is a tuple of integers with which `fetch` reads one document again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_encdec.data.randomness import Permutation, keyed_generator
from ds_encdec.data.sources import AnyRow, MapSource, OpenSource, StreamSource
from ds_encdec.types import DataError

Reference = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaneShare:
    """Which part of the data a reader serves: lane `lane` of `num_lanes`, in the order that `seed` gives."""

    lane: int
    num_lanes: int
    seed: int
    shuffle_buffer_size: int


class Located(NamedTuple):
    """A document (or a bad row), where it can be found again, and the pass over its source in which it was read."""

    document: AnyRow
    reference: Reference
    epoch: int


class MapReader:
    """Documents lane, lane + num_lanes, ... of the epoch's permutation. Position: epoch and index in it."""

    def __init__(
        self, source: MapSource, source_number: int, share: LaneShare, position: dict[str, Any] | None
    ) -> None:
        if len(source) <= share.lane:
            raise DataError(
                f"lane {share.lane} of {share.num_lanes} has nothing to read: the source has {len(source)} documents. "
                "Lower data.num_lanes (or training.gradient_accumulation_steps), or add data"
            )
        self._source = source
        self._number = source_number
        self._share = share
        self.epoch: int = position["epoch"] if position else 0
        self._index: int = position["index"] if position else share.lane
        self._permutation = self._order()

    @property
    def position(self) -> dict[str, Any]:
        """Epoch, and index in the epoch's permutation, of the next document."""
        return {"epoch": self.epoch, "index": self._index}

    def __next__(self) -> Located:
        if self._index >= len(self._permutation):
            self.epoch, self._index = self.epoch + 1, self._share.lane
            self._permutation = self._order()
        reference = (self._permutation[self._index],)
        self._index += self._share.num_lanes
        return Located(self.fetch(reference), reference, self.epoch)

    def fetch(self, reference: Reference) -> AnyRow:
        """Document number `reference[0]`."""
        return self._source.document(reference[0])

    def _order(self) -> Permutation:
        return Permutation(len(self._source), self._share.seed, "documents", self._number, self.epoch)


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
        self._rows: Iterator[tuple[int, int, AnyRow]] | None = None
        self._window: list[tuple[Reference, AnyRow]] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """See the class."""
        unit, row = self._window_start
        return {"epoch": self.epoch, "window": self._window_number, "unit": unit, "row": row, "taken": self._taken}

    def __next__(self) -> Located:
        if self._window is None:
            self._window = self._read_window()
        while self._taken >= len(self._window):
            self._advance()
            self._window = self._read_window()
        reference, document = self._window[self._taken]
        self._taken += 1
        return Located(document, reference, self.epoch)

    def fetch(self, reference: Reference) -> AnyRow:
        """Row `reference[1]` of unit `reference[0]`."""
        if self._window is None:
            self._window = self._read_window()
        for held, document in self._window:
            if held == reference:
                return document
        unit, row = reference
        return next(self._source.documents(unit, row))

    def _advance(self) -> None:
        """Move on to the window after the current one, in the next epoch if it was the last."""
        assert self._window is not None
        if len(self._window) == self._share.shuffle_buffer_size:
            self._window_number += 1
            self._window_start = self._next_start
        elif self._window_number == 0 and not self._window:
            raise DataError(
                f"lane {self._share.lane} of {self._share.num_lanes} has nothing to read: the source has too few "
                "documents. Lower data.num_lanes (or training.gradient_accumulation_steps), or add data"
            )
        else:
            self.epoch, self._window_number = self.epoch + 1, 0
            self._window_start = (0, 0)
            self._rows = None
        self._taken = 0

    def _read_window(self) -> list[tuple[Reference, AnyRow]]:
        if self._rows is None:
            self._rows = self._read_rows(*self._window_start)
        units = self._units()
        window: list[tuple[Reference, AnyRow]] = []
        for place, row, document in self._rows:
            window.append(((units[place], row), document))
            self._next_start = (place, row + 1)
            if len(window) == self._share.shuffle_buffer_size:
                break
        rng = keyed_generator(
            self._share.seed, "window", self._number, self._share.lane, self.epoch, self._window_number
        )
        return [window[index] for index in rng.permutation(len(window))]

    def _read_rows(self, first_place: int, first_row: int) -> Iterator[tuple[int, int, AnyRow]]:
        """(place of the unit in the lane's order, row in the unit, document), from a position to the epoch's end."""
        units = self._units()
        for place in range(first_place, len(units)):
            start = first_row if place == first_place else 0
            for row, document in enumerate(self._source.documents(units[place], start), start=start):
                if not self._shares_units or row % self._share.num_lanes == self._share.lane:
                    yield place, row, document

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
        positions = source_positions(position) if position else {}
        self._readers = {
            opened.number: _reader(opened.source, opened.number, share, positions.get(opened.number))
            for opened in sources
        }
        self._numbers = [opened.number for opened in sources]
        total = sum(opened.weight for opened in sources)
        self._shares = [opened.weight / total for opened in sources]
        self._share = share
        self._draws: int = position["draws"] if position else 0

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
        if len(self._numbers) > 1:
            rng = keyed_generator(self._share.seed, "mixture", self._share.lane, self._draws)
            drawn = int(rng.choice(len(self._numbers), p=self._shares))
        self._draws += 1
        number = self._numbers[drawn]
        located = next(self._readers[number])
        return located._replace(reference=(number, *located.reference))

    def fetch(self, reference: Reference) -> AnyRow:
        """The document of the source with number `reference[0]`."""
        return self._readers[reference[0]].fetch(reference[1:])


def source_positions(position: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The position in each source, by its number, of a `MixtureReader.position`; earlier ones hold a list of them."""
    saved = position["sources"]
    return dict(enumerate(saved)) if isinstance(saved, list) else {int(number): one for number, one in saved.items()}


def _reader(
    source: MapSource | StreamSource, number: int, share: LaneShare, position: dict[str, Any] | None
) -> MapReader | StreamReader:
    if isinstance(source, StreamSource):
        return StreamReader(source, number, share, position)
    return MapReader(source, number, share, position)
