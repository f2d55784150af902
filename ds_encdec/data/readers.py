"""Readers: the order in which a lane reads its share of a source, or of a mixture of sources.

A position is a small dict of integers; a reference is a tuple of integers, by which `fetch` reads a document again. It
raises DataError if the source has become shorter.
"""

# ruff: noqa: D102  (see above)

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ds_encdec.base.quantities import count
from ds_encdec.base.types import DataError
from ds_encdec.data.randomness import Permutation, keyed_generator
from ds_encdec.data.sources.sources import MapSource, OpenSource, Row, StreamSource

Reference = tuple[int, ...]


class LaneShare(NamedTuple):
    """The share of the data that a reader serves: lane `lane` of `num_lanes`, in an order that `seed` decides."""

    lane: int
    num_lanes: int
    seed: int
    shuffle_buffer_size: int

    def nothing_to_read(self, there: str) -> DataError:
        return DataError(
            f"lane {self.lane} of {self.num_lanes} has nothing to read: the source has {there}. Lower data.num_lanes "
            "(or training.gradient_accumulation_steps), or add data"
        )


def changed_since(what: str) -> DataError:
    """Return the error for a reference whose file no longer has the document."""
    return DataError(
        f"{what} is not there any more: the file has changed since the checkpoint. Restore it, or begin a new run"
    )


class Located(NamedTuple):
    """A document (or a bad row), its reference, and the pass over its source in which it was read."""

    document: Row
    reference: Reference
    epoch: int


class MapReader:
    """Reads documents lane, lane + num_lanes, ... of the epoch's permutation."""

    def __init__(self, source: MapSource, number: int, share: LaneShare, position: dict[str, Any] | None) -> None:
        if len(source) <= share.lane:
            raise share.nothing_to_read(count(source, "document"))
        self._source, self._number, self._share = source, number, share
        # Epoch, and index in the epoch's permutation, of the next document; replaced, never changed.
        self.position = position or {"epoch": 0, "index": share.lane}
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
        if reference[0] >= len(self._source):
            raise changed_since(f"document {reference[0]} behind {self._source.key(len(self._source) - 1)}")
        return self._source.document(reference[0])


class StreamReader:
    """Reads the rows of the lane's units, in windows of `shuffle_buffer_size` documents, each permuted. With fewer
    units than lanes, every lane reads all units and keeps its rows. A resume reads the current window again."""

    def __init__(self, source: StreamSource, number: int, share: LaneShare, position: dict[str, Any] | None) -> None:
        self._source, self._number, self._share = source, number, share
        # The start of the current window (the unit's place in the lane's order, and the row), the window's number in
        # the epoch, and the documents taken from it; replaced, never changed.
        self.position = position or {"epoch": 0, "window": 0, "unit": 0, "row": 0, "taken": 0}
        self._rows = self._read_rows()
        self._window: list[tuple[Reference, Row]] | None = None

    def __next__(self) -> Located:
        while self.position["taken"] >= len(window := self._current_window()):
            # Continue with the next window, in the next epoch if this was the last.
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
        unit, row = reference
        document = dict(self._current_window()).get(reference) or next(self._source.documents(unit, row), None)
        if document is None:
            first = next(self._source.documents(unit, 0), None) if unit < self._source.num_units else None
            raise changed_since(f"row {row} of unit {unit} ({'empty' if first is None else f'from {first.key} on'})")
        return document

    def _current_window(self) -> list[tuple[Reference, Row]]:
        if self._window is None:
            window = list(islice(self._rows, self._share.shuffle_buffer_size))
            self._next_start = window[-1][0] if window else (0, 0)
            purpose = ("window", self._number, self._share.lane, self.position["epoch"], self.position["window"])
            order = keyed_generator(self._share.seed, *purpose).permutation(len(window))
            self._window = [window[index][1:] for index in order]
        return self._window

    def _read_rows(self) -> Iterator[tuple[tuple[int, int], Reference, Row]]:
        """Yield (position behind it, reference, document) of each row from the window's start to the epoch's end."""
        count, share, first_row = self._source.num_units, self._share, self.position["row"]
        shares_units = count < share.num_lanes
        order = Permutation(max(1, count), share.seed, "units", self._number, self.position["epoch"])
        places = range(count) if shares_units else range(share.lane, count, share.num_lanes)
        for place, unit in islice(enumerate(map(order.__getitem__, places)), self.position["unit"], None):
            for row, document in enumerate(self._source.documents(unit, first_row), start=first_row):
                if not shares_units or row % share.num_lanes == share.lane:
                    yield (place, row + 1), (unit, row), document
            first_row = 0


_TYPICAL_TOKENS = 1000  # assumed for a document before any is read


class MixtureReader:
    """Draws each document from one of several sources, by weight; references start with the source's number.

    If weights count documents, a draw is keyed by its lane and number. If they count tokens, the next document is
    one of the source with the fewest tokens for its weight; each source starts at a random count. Either way the lanes
    do not all read a rare source at the same time.
    """

    def __init__(self, sources: Sequence[OpenSource], share: LaneShare, position: dict[str, Any] | None) -> None:
        start = position or {"draws": 0, "sources": {}}
        self.sources = {opened.number: opened for opened in sources}
        self._readers: dict[int, MapReader | StreamReader] = {}
        self._weights: dict[int, float] = {}
        self._had: dict[int, float] = {}  # tokens over weight
        self._share, self._draws = share, start["draws"]
        had = {int(number): tokens for number, tokens in start.get("tokens_over_weight", {}).items()}
        for number, opened in self.sources.items():
            kind: type[Any] = StreamReader if isinstance(opened.source, StreamSource) else MapReader
            self._readers[number] = kind(opened.source, number, share, start["sources"].get(str(number)))
            self._weights[number] = opened.weight / sum(one.weight for one in sources)
            if opened.counts_tokens:
                part = keyed_generator(share.seed, "mixture", share.lane, "first part", number).random()
                first = min(had.values(), default=0.0) + _TYPICAL_TOKENS * part / self._weights[number]
                self._had[number] = had.get(number, first)

    @property
    def epoch(self) -> int:
        """Return the complete passes over the slowest source."""
        return min(reader.position["epoch"] for reader in self._readers.values())

    @property
    def position(self) -> dict[str, Any]:
        """Return the JSON-able position in each source by its number, the draws, and the tokens over the weights."""
        had = {str(number): had for number, had in self._had.items()}
        return {
            "draws": self._draws,
            "sources": {str(number): reader.position for number, reader in self._readers.items()},
            **({"tokens_over_weight": had} if had else {}),
        }

    def took(self, number: int, tokens: int) -> None:
        if self._had:
            self._had[number] += tokens / self._weights[number]

    def __next__(self) -> Located:
        (number, *others) = self.sources
        if self._had:
            number = min(self._had, key=self._had.__getitem__)
            self.took(number, 1)  # so that other sources have their turns if this one has no text
        elif others:
            rng = keyed_generator(self._share.seed, "mixture", self._share.lane, self._draws)
            number = [number, *others][rng.choice(len(self.sources), p=[*self._weights.values()])]
        self._draws += 1
        located = next(self._readers[number])
        return located._replace(reference=(number, *located.reference))

    def fetch(self, reference: Reference) -> Row:
        return self._readers[reference[0]].fetch(reference[1:])
