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
        self._source, self._number, self._share = source, source_number, share
        self.position = position or {"epoch": 0, "index": share.lane}
        """Epoch, and index in the epoch's permutation, of the next document. Replaced, never changed."""

    def __next__(self) -> Located:
        epoch, index = self.position["epoch"], self.position["index"]
        if index >= len(self._source):
            epoch, index = epoch + 1, self._share.lane
        self.position = {"epoch": epoch, "index": index + self._share.num_lanes}
        order = Permutation(len(self._source), self._share.seed, "documents", self._number, epoch)
        reference = (order[index],)
        return Located(self.fetch(reference), reference, epoch)

    def fetch(self, reference: Reference) -> Row:
        """Document number `reference[0]`."""
        return self._source.document(reference[0])


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
        self._source, self._number, self._share = source, source_number, share
        self.position = position or {"epoch": 0, "window": 0, "unit": 0, "row": 0, "taken": 0}
        """See the class. Replaced, never changed."""
        self._rows = self._read_rows()
        self._window: list[tuple[Reference, Row]] | None = None

    def __next__(self) -> Located:
        while self.position["taken"] >= len(window := self._current_window()):
            self._advance(len(window))
        reference, document = window[self.position["taken"]]
        self.position = {**self.position, "taken": self.position["taken"] + 1}
        return Located(document, reference, self.position["epoch"])

    def fetch(self, reference: Reference) -> Row:
        """Row `reference[1]` of unit `reference[0]`."""
        held, (unit, row) = dict(self._current_window()), reference
        return held[reference] if reference in held else next(self._source.documents(unit, row))

    def _advance(self, window_size: int) -> None:
        """Move on to the window after the current one, in the next epoch if it was the last."""
        epoch, window = self.position["epoch"], self.position["window"]
        if window_size == self._share.shuffle_buffer_size:
            unit, row = self._next_start
            self.position = {"epoch": epoch, "window": window + 1, "unit": unit, "row": row, "taken": 0}
        elif window == 0 and not window_size:
            raise self._share.nothing_to_read("too few documents")
        else:
            self.position = {"epoch": epoch + 1, "window": 0, "unit": 0, "row": 0, "taken": 0}
            self._rows = self._read_rows()
        self._window = None

    def _current_window(self) -> list[tuple[Reference, Row]]:
        """The documents of the current window in its order, read at its first use."""
        if self._window is None:
            window = list(islice(self._rows, self._share.shuffle_buffer_size))
            self._next_start = window[-1][0] if window else (0, 0)
            purpose = ("window", self._number, self._share.lane, self.position["epoch"], self.position["window"])
            order = keyed_generator(self._share.seed, *purpose).permutation(len(window))
            self._window = [window[index][1:] for index in order]
        return self._window

    def _read_rows(self) -> Iterator[tuple[tuple[int, int], Reference, Row]]:
        """(position behind it, reference, document) of each row from the window's start to the epoch's end."""
        count, share, first_row = self._source.num_units, self._share, self.position["row"]
        shares_units = count < share.num_lanes
        order = Permutation(max(1, count), share.seed, "units", self._number, self.position["epoch"])
        places = range(count) if shares_units else range(share.lane, count, share.num_lanes)
        for place, unit in islice(enumerate(map(order.__getitem__, places)), self.position["unit"], None):
            for row, document in enumerate(self._source.documents(unit, first_row), start=first_row):
                if not shares_units or row % share.num_lanes == share.lane:
                    yield (place, row + 1), (unit, row), document
            first_row = 0


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
        self._weights = [opened.weight / total for opened in sources]
        self._share = share
        self._draws: int = start["draws"]

    @property
    def epoch(self) -> int:
        """Complete passes over the source that is furthest behind."""
        return min(reader.position["epoch"] for reader in self._readers.values())

    @property
    def position(self) -> dict[str, Any]:
        """The position in each source, and the draws made. JSON-able."""
        return {
            "draws": self._draws,
            "sources": {str(number): reader.position for number, reader in self._readers.items()},
        }

    def __next__(self) -> Located:
        (number, *others) = self.sources
        if others:
            rng = keyed_generator(self._share.seed, "mixture", self._share.lane, self._draws)
            number = [number, *others][rng.choice(len(self.sources), p=self._weights)]
        self._draws += 1
        located = next(self._readers[number])
        return located._replace(reference=(number, *located.reference))

    def fetch(self, reference: Reference) -> Row:
        """The document of the source with number `reference[0]`."""
        return self._readers[reference[0]].fetch(reference[1:])


def source_positions(position: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The position in each source, by its number, of a `MixtureReader.position`; earlier ones hold a list of them."""
    saved = position["sources"]
    return dict(enumerate(saved)) if isinstance(saved, list) else {int(number): one for number, one in saved.items()}
