"""Readers: the order in which a lane reads its share of a source, or of a mixture of sources.

Lane i of M reads every document that falls to it once per epoch, in an order keyed by (seed, epoch). A
position is a small dict of integers. A reference is a tuple of integers with which `fetch` reads one document again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ds_encdec.base.quantities import count
from ds_encdec.base.types import DataError
from ds_encdec.data.randomness import Permutation, keyed_generator
from ds_encdec.data.sources.sources import MapSource, OpenSource, Row, StreamSource

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


def changed_since(what: str) -> DataError:
    """The error for something that a record refers to and its file does not hold any more."""
    return DataError(
        f"{what} is not there any more: the file has changed since the checkpoint was made. Restore the file, or begin "
        "a new run"
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
            raise share.nothing_to_read(count(source, "document"))
        self._source, self._number, self._share = source, source_number, share
        self.position = position or {"epoch": 0, "index": share.lane}
        """Epoch, and index in the epoch's permutation, of the next document. Replaced, never changed."""
        self._order = self._permutation(self.position["epoch"])

    def __next__(self) -> Located:
        epoch, index = self.position["epoch"], self.position["index"]
        if index >= len(self._source):
            epoch, index = epoch + 1, self._share.lane
            self._order = self._permutation(epoch)
        self.position = {"epoch": epoch, "index": index + self._share.num_lanes}
        reference = (self._order[index],)
        return Located(self.fetch(reference), reference, epoch)

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(len(self._source), self._share.seed, "documents", self._number, epoch)

    def fetch(self, reference: Reference) -> Row:
        """Document number `reference[0]`. Raises DataError where the source has become shorter."""
        if reference[0] >= len(self._source):
            raise changed_since(f"document {reference[0]} behind {self._source.key(len(self._source) - 1)}")
        return self._source.document(reference[0])


class StreamReader:
    """The rows of the lane's units, in windows of `shuffle_buffer_size` documents, each permuted.

    Units are dealt to the lanes in every epoch. Where there are fewer units than lanes, every lane reads
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
            # On to the window behind it, in the next epoch if it was the last.
            epoch, number = self.position["epoch"], self.position["window"]
            if len(window) == self._share.shuffle_buffer_size:
                unit, row = self._next_start
                self.position = {"epoch": epoch, "window": number + 1, "unit": unit, "row": row, "taken": 0}
            elif number == 0 and not window:
                raise self._share.nothing_to_read("too few documents")
            else:
                self.position = {"epoch": epoch + 1, "window": 0, "unit": 0, "row": 0, "taken": 0}
                self._rows = self._read_rows()
            self._window = None
        reference, document = window[self.position["taken"]]
        self.position = {**self.position, "taken": self.position["taken"] + 1}
        return Located(document, reference, self.position["epoch"])

    def fetch(self, reference: Reference) -> Row:
        """Row `reference[1]` of unit `reference[0]`. Raises DataError where the unit has become shorter."""
        held, (unit, row) = dict(self._current_window()), reference
        found = held.get(reference) or next(self._source.documents(unit, row), None)
        if found is None:
            first = next(self._source.documents(unit, 0), None) if unit < self._source.num_units else None
            raise changed_since(f"row {row} of unit {unit} ({'empty' if first is None else f'from {first.key} on'})")
        return found

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


TYPICAL_TOKENS = 1000
"""Tokens of a document of which nothing is known yet."""


class MixtureReader:
    """Draws each document from one of several sources, by weight. References start with the source's number.

    Where weights count documents, the choice is keyed by the lane and the number of the draw. Where they count tokens,
    the next document is of the source that has had the fewest for its weight; each begins with a random part of a
    document. Either way lanes do not draw a rare source in step. A position holds that of each source by its number,
    and the tokens that it has had over its weight; a source that is not in it begins at its beginning.
    """

    def __init__(self, sources: Sequence[OpenSource], share: LaneShare, position: dict[str, Any] | None) -> None:
        start = position or {"draws": 0, "sources": {}}
        positions = {int(number): one for number, one in start["sources"].items()}
        self.sources = {opened.number: opened for opened in sources}
        """The sources by their numbers."""
        self._readers: dict[int, MapReader | StreamReader] = {}
        for opened in sources:
            kind: type[Any] = StreamReader if isinstance(opened.source, StreamSource) else MapReader
            self._readers[opened.number] = kind(opened.source, opened.number, share, positions.get(opened.number))
        total = sum(opened.weight for opened in sources)
        self._weights = {opened.number: opened.weight / total for opened in sources}
        self._share = share
        self._draws: int = start["draws"]
        had = {int(number): tokens for number, tokens in start.get("tokens_over_weight", {}).items()}
        self._had = {
            opened.number: had.get(opened.number, min(had.values(), default=0.0) + self._first_part(opened.number))
            for opened in sources
            if opened.counts_tokens
        }

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
            **({"tokens_over_weight": {str(number): had for number, had in self._had.items()}} if self._had else {}),
        }

    def took(self, number: int, tokens: int) -> None:
        """Count the tokens of a document that was drawn from the source `number`."""
        if self._had:
            self._had[number] += tokens / self._weights[number]

    def _first_part(self, number: int) -> float:
        part = keyed_generator(self._share.seed, "mixture", self._share.lane, "first part", number).random()
        return TYPICAL_TOKENS * part / self._weights[number]

    def __next__(self) -> Located:
        (number, *others) = self.sources
        if self._had:
            number = min(self._had, key=self._had.__getitem__)
            self.took(number, 1)  # so that one without text, or all held out, has its turns, too
        elif others:
            rng = keyed_generator(self._share.seed, "mixture", self._share.lane, self._draws)
            number = [number, *others][rng.choice(len(self.sources), p=[*self._weights.values()])]
        self._draws += 1
        located = next(self._readers[number])
        return located._replace(reference=(number, *located.reference))

    def fetch(self, reference: Reference) -> Row:
        """The document of the source with number `reference[0]`."""
        return self._readers[reference[0]].fetch(reference[1:])
