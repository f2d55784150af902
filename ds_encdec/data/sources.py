"""Sources of documents: two protocols, the choice of a source by `data.dataset_name`, and what is held out of it.

A source that can hand out document i is a `MapSource`: its order is a permutation. One that can only be read
from the front of a unit (a row group, a file, a shard) is a `StreamSource`: its order is shuffled in windows.
Both are pickled into worker processes, and neither keeps a position: that is `readers.py`'s. A row that cannot be read
comes as a `BadRow` in its document's place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ds_encdec.config.schema import DataConfig, MixtureSource, Source
from ds_encdec.data.local_files import expand_files
from ds_encdec.data.randomness import Permutation, unit_hash
from ds_encdec.engines import load
from ds_encdec.source_kinds import HUB, LOCAL_SOURCES
from ds_encdec.types import DataError, Document

if TYPE_CHECKING:
    from ds_encdec.tokenizer.sentinels import Vocabulary

SMALL_SOURCE_DOCUMENTS = 1024
"""Sources up to this size are checked for a held-out document; larger ones have one for any sensible fraction."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """Stands in the place of a document that cannot be read. `problem` names the file, the row and the reason."""

    key: str
    problem: str


Row: TypeAlias = Document | BadRow


class MapSource(Protocol):
    """Documents by number. `identity`: JSON-able facts that tell this data from other data."""

    identity: dict[str, Any]

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The key of document `index`, without reading the document."""
        ...

    def document(self, index: int) -> Row:
        """Document `index`. Raises DataError where the source itself fails, not a row."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """Documents in units that are read from the front. `identity` as in `MapSource`."""

    identity: dict[str, Any]
    num_units: int

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        """The documents of `unit` from row `first_row` on; those whose key is `wanted`, if given. Errors as there."""
        ...


AnySource: TypeAlias = MapSource | StreamSource


@dataclass(frozen=True)
class OpenSource:
    """A source as a run uses it: its share of the documents, and the rule that holds documents out.

    Documents whose key hashes below `held_out_below` are kept for evaluation, whatever the seed, the number of lanes
    and the order of reading. `number`: its own among the run's sources, whatever was added, taken out or put in another
    order; its documents' order depends on it.
    """

    source: AnySource
    weight: float
    held_out_below: float
    number: int

    def holds_out(self, key: str) -> bool:
        """Return whether the document `key` is kept for evaluation."""
        return held_out_hash(key) < self.held_out_below

    @property
    def size(self) -> int:
        """Documents, or units of a stream."""
        return self.source.num_units if isinstance(self.source, StreamSource) else len(self.source)


def source_entries(data: DataConfig) -> Sequence[MixtureSource]:
    """The sources that `data` names: those of `data.mixture`, else the only one."""
    return data.mixture or (MixtureSource(weight=1.0, **{name: getattr(data, name) for name in Source.model_fields}),)


def open_sources(
    data: DataConfig, seed: int, vocabulary: Vocabulary, num_lanes: int, commits: Mapping[str, str]
) -> tuple[OpenSource, ...]:
    """Open what `data` names, data sets of the hub at `commits` (see `resolve_commits`). Raises DataError."""
    opened = []
    for number, named in enumerate(source_entries(data)):
        entry = named.model_copy(update={"dataset_revision": commits.get(hub_name(named), named.dataset_revision)})
        kind = LOCAL_SOURCES.get(entry.dataset_name, HUB)
        offered = {
            "entry": entry,
            "text_column": entry.text_column,
            "seed": seed,
            "vocabulary": vocabulary,
            "num_lanes": num_lanes,
            "streaming": data.streaming,
            "files": _files(entry) if kind.reads_files else (),
        }
        source: AnySource = load(kind.reader)(**{name: offered[name] for name in kind.needs})
        opened.append(OpenSource(source, entry.weight, held_out_below(_keys(source), data.eval_fraction), number))
    return tuple(opened)


def hub_name(entry: MixtureSource) -> str:
    """`DATASET@REVISION`: what a commit is looked up by."""
    return f"{entry.dataset_name}@{entry.dataset_revision or 'main'}"


def _files(entry: MixtureSource) -> tuple[str, ...]:
    if not entry.data_files:
        raise DataError(
            f"data.dataset_name={entry.dataset_name} reads local files: name them in data.data_files "
            "(paths or glob patterns)"
        )
    return expand_files((entry.data_files,) if isinstance(entry.data_files, str) else entry.data_files)


def held_out_hash(key: str) -> float:
    """The number in [0, 1) that decides about the document `key`: below the source's threshold it is held out."""
    return unit_hash(key, "held out")


def held_out_below(keys: Iterable[str], eval_fraction: float) -> float:
    """The threshold of the source with these document `keys` (read up to `SMALL_SOURCE_DOCUMENTS` of them).

    It is `eval_fraction`, raised for a small source until one document is held out. A source of one document
    holds out nothing, since training needs it.
    """
    hashes = sorted(map(held_out_hash, islice(keys, SMALL_SOURCE_DOCUMENTS + 1)))
    if eval_fraction == 0 or len(hashes) < 2:
        return 0.0
    if len(hashes) > SMALL_SOURCE_DOCUMENTS or hashes[0] < eval_fraction:
        return eval_fraction
    return (hashes[0] + hashes[1]) / 2


def readable(rows: Iterable[Row], bad_row_limit: int) -> Iterator[Document]:
    """The documents among `rows`. Raises DataError for more than `bad_row_limit` others."""
    bad = count(1)
    for row in rows:
        if isinstance(row, BadRow):
            check_bad_rows(next(bad), bad_row_limit, row.problem)
        else:
            yield row


def sample_documents(source: AnySource, most: int, bad_row_limit: int) -> Iterator[Document]:
    """Up to `most` `readable` documents, the same on every machine: spread over a map, the first of a stream."""
    return islice(readable(all_rows(source, "sample"), bad_row_limit), most)


def all_rows(source: AnySource, purpose: str, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
    """Every row of a source once; those whose key is `wanted`, if given, and no others are read where it can help it.

    A stream's come in its order, a map's in one of their own for each `purpose`, equal in all runs.
    """
    if isinstance(source, StreamSource):
        for unit in range(source.num_units):
            yield from source.documents(unit, 0, wanted)
    elif len(source):
        order = Permutation(len(source), 0, purpose)
        yield from (source.document(index) for index in order if wanted is None or wanted(source.key(index)))


def _keys(source: AnySource) -> Iterator[str]:
    if isinstance(source, StreamSource):
        return (document.key for document in all_rows(source, "sample"))
    return map(source.key, range(len(source)))


def text_document(key: str, read: Callable[[], Any], where: str) -> Row:
    """The document of the text field that `read` returns: null is an empty text, anything but a string a bad row."""
    try:
        value = read()
    except UnicodeDecodeError as error:
        return BadRow(key, f"{where}: not UTF-8 text ({error.reason})")
    if value is None or isinstance(value, str):
        return Document(key, value or "")
    return BadRow(key, f"{where}: expected text, found {type(value).__name__} {reprlib.repr(value)}")


def field_document(key: str, record: Mapping[str, Any], column: str, where: str) -> Row:
    """The document of the field `column` of a record; a bad row where it has none."""
    if column not in record:
        return BadRow(key, missing_column(column, where, list(record)))
    return text_document(key, partial(record.__getitem__, column), where)


def missing_column(column: str, where: str, existing: Sequence[str]) -> str:
    """The message for a column that is not there, listing those that are."""
    return f"data.text_column={column}: {where} has no such column; it has {(', '.join(existing) or 'none'):.300}"


def bad_rows_of(record: Mapping[str, Any]) -> list[int]:
    """The bad rows in a lane's record, by pass over their source; earlier records count the first pass alone."""
    rows = record.get("bad_rows", [])
    return list(rows) if isinstance(rows, list) else [rows]


def sum_by_pass(counts: Iterable[Sequence[int]]) -> list[int]:
    """The sum of counts by pass, of which some may be of fewer passes."""
    return [sum(one_pass) for one_pass in zip_longest(*counts, fillvalue=0)]


def check_bad_rows(found: int, limit: int, last: str) -> None:
    """Raise DataError where `found` rows, the newest with the problem `last`, are more than `limit`; 0 allows none."""
    if found <= limit:
        return
    if limit == 0:
        raise DataError(f"{last}. Mend it, or pass over such rows: data.on_bad_row=skip")
    raise DataError(
        f"more than data.max_bad_rows={limit} rows cannot be read, the last one {last}. Look at the data, or raise "
        "data.max_bad_rows"
    )
