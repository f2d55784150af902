"""Sources of documents: two protocols, their rows, and the rule that holds documents out.

A `MapSource` returns document i, so its order is a permutation. A `StreamSource` is read from the front of a unit (a
row group, a file, a shard), so its order is shuffled in windows. Both are pickled into worker processes.
"""

# ruff: noqa: D102  (MapSource and StreamSource document the methods)

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from ds_encdec.base.plugins import PYTHON, code_digest, load_plugin
from ds_encdec.base.types import DataError, Document
from ds_encdec.config.file_rows import not_unicode
from ds_encdec.config.schema import DataConfig, MixtureSource, Source
from ds_encdec.data.randomness import Permutation, unit_hash

_SMALL_SOURCE_DOCUMENTS = 1024  # up to which sources are checked for a held-out document; larger ones have one


@dataclass(frozen=True, slots=True)
class BadRow:
    """Takes the place of an unreadable document; `problem` names the file, the row and the reason."""

    key: str
    problem: str


Row: TypeAlias = Document | BadRow


class MapSource(Protocol):
    """Documents by number; `identity` holds JSON-able facts that distinguish this data from other data."""

    identity: dict[str, Any]

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """Return the key of document `index`, without reading the document."""

    def document(self, index: int) -> Row:
        """Return document `index`. Raises DataError if the source itself fails, not a row."""


@runtime_checkable
class StreamSource(Protocol):
    """Documents in units that are read from the front; `identity` as in `MapSource`."""

    identity: dict[str, Any]
    num_units: int

    def documents(self, unit: int, first_row: int, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
        """Yield the (`wanted`) documents of `unit` from `first_row` on. Raises DataError if the source itself fails."""


Split = Literal["train", "validation", "test"]

AnySource: TypeAlias = MapSource | StreamSource


@dataclass(frozen=True)
class OpenSource:
    """A source in a run: its share of the documents, and the rule that holds documents out. Keys that hash below
    `held_out_below` are for evaluation, and from there to `test_below` for the test, in all runs."""

    source: AnySource
    weight: float
    held_out_below: float
    number: int  # unique and fixed in a run, whatever is added or removed; the order of documents depends on it
    test_below: float = 0.0
    counts_tokens: bool = False  # the weight is a share of the tokens, not of the documents

    @property
    def held_out(self) -> float:
        """Return the share of the documents that is not trained on."""
        return max(self.held_out_below, self.test_below)

    def holds_out(self, key: str) -> bool:
        return held_out_hash(key) < self.held_out

    @property
    def size(self) -> int:
        """Return the number of documents, or of a stream's units."""
        return self.source.num_units if isinstance(self.source, StreamSource) else len(self.source)


def source_entries(data: DataConfig) -> Sequence[MixtureSource]:
    """Return the sources of `data`: those of `data.mixture`, else the only one."""
    return data.mixture or (MixtureSource(weight=1.0, **{name: getattr(data, name) for name in Source.model_fields}),)


def named_sources(data: DataConfig) -> dict[str, MixtureSource]:
    """Return all sources of `data`, those of separate validation and test splits too, by the names of their folders."""
    trained = {f"source-{number}": entry for number, entry in enumerate(source_entries(data))}
    splits = {
        **{split: data.own_split(split) for split in ("validation", "test")},
        **{f"eval-{name}": data.of_eval_set(name).own_split("validation") for name in data.eval_sets},
    }
    return trained | {name: entry for name, entry in splits.items() if entry}


def held_out_hash(key: str) -> float:
    """Return the number in [0, 1) of the document `key`, which is held out below the source's threshold."""
    return unit_hash(key, "held out")


def held_out_below(source: AnySource, eval_fraction: float) -> float:
    """Return `eval_fraction`, raised for a small source until one document of two or more is held out."""
    keys: Iterator[str] = (
        (row.key for row in all_rows(source, "keys"))
        if isinstance(source, StreamSource)
        else map(source.key, range(len(source)))
    )
    hashes = sorted(map(held_out_hash, islice(keys, _SMALL_SOURCE_DOCUMENTS + 1)))
    if eval_fraction == 0 or len(hashes) < 2:
        return 0.0
    is_enough = len(hashes) > _SMALL_SOURCE_DOCUMENTS or hashes[0] < eval_fraction
    return eval_fraction if is_enough else (hashes[0] + hashes[1]) / 2


def all_rows(source: AnySource, purpose: str, wanted: Callable[[str], bool] | None = None) -> Iterator[Row]:
    """Yield every (`wanted`) row once: a stream's in its order, a map's in an order that `purpose` alone decides."""
    if isinstance(source, StreamSource):
        for unit in range(source.num_units):
            yield from source.documents(unit, 0, wanted)
    elif len(source):
        order = Permutation(len(source), 0, purpose)
        yield from (source.document(index) for index in order if wanted is None or wanted(source.key(index)))


def row_document(key: str, read: Callable[[], Mapping[str, Any]], column: str | None, where: str) -> Row:
    """Return the document of the text in the field `column` of the row that `read` returns; of the whole row if None.
    Null is an empty text. A row that cannot be read, or has no text there, is a bad row."""
    try:
        record = read()
        value = record[column] if column is not None and column in record else None
    # Libraries' errors for a value that Python cannot hold: a date of the year 300000, an unknown time zone.
    except (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        problem = f"a value of it cannot be read ({type(error).__name__}: {error})"
        problem = f"not UTF-8 text ({error.reason})" if isinstance(error, UnicodeDecodeError) else problem
        return BadRow(key, f"{where}: {problem}")
    if column is None:
        return Document(key, "", record=record)
    if column not in record:
        return BadRow(key, missing_column(column, where, list(record)))
    if value is not None and not isinstance(value, str):
        return BadRow(key, f"{where}: expected text, found {type(value).__name__} {reprlib.repr(value)}")
    reason = not_unicode(value or "")
    return Document(key, value or "") if reason is None else BadRow(key, f"{where}: {reason}")


def missing_column(column: str, where: str, existing: Sequence[str]) -> str:
    """Return the message for a missing column, with the existing ones."""
    has = ", ".join(existing) or "none"
    return f"data.text_column={column}: {where} has no such column; it has {has:.300}: set data.text_column=COLUMN"


def check_bad_rows(found: int, limit: int, last: str) -> None:
    """Raise DataError if `found` bad rows, the newest with the problem `last`, are more than `limit`."""
    if found > limit:
        raise DataError(
            f"{last}. Mend it or, where such rows are few, pass over them: data.on_bad_row=skip"
            if limit == 0
            else f"more than data.max_bad_rows={limit} rows cannot be read, the last one {last}. Look at the data, or "
            "raise data.max_bad_rows"
        )


def reader_digest(name: str) -> str:
    """Return a digest of the file of the function `python:MODULE:FUNCTION`. Raises ConfigError."""
    return code_digest("data.dataset_name", name, load_plugin("data.dataset_name", name))


class UserReader:
    """The rows of a user's reader as a `MapSource`: `reader[i]`, of `len(reader)`, is a text or a row by columns. The
    mapping `reader.identity` is part of its identity. Each process calls the function, so no two share open files."""

    def __init__(self, entry: Source, text_column: str | None) -> None:
        self._name, self._column = entry.dataset_name, text_column
        self._rows: Any = None
        name, digest = self._name.removeprefix(PYTHON), reader_digest(self._name)
        self.identity: dict[str, Any] = {"kind": "python", "name": name, "sha256": digest, "text_column": text_column}
        reader = self._reader()
        self._size = len(reader)
        if isinstance(identity := getattr(reader, "identity", {}), Mapping):
            self.identity |= {f"own {key}": value for key, value in identity.items()}

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": None}

    def key(self, index: int) -> str:
        return f"{self._name}/{index}"

    def document(self, index: int) -> Row:
        key = self.key(index)
        try:
            row = self._reader()[index]
        except Exception as error:  # whatever the user's reader raises
            return BadRow(key, f"{key}: {type(error).__name__}: {error}")
        if self._column is None and not isinstance(row, Mapping):
            return BadRow(key, f"{key}: expected a row by columns, found {type(row).__name__}")
        record = row if isinstance(row, Mapping) else {str(self._column): row}
        return row_document(key, lambda: record, self._column, key)

    def _reader(self) -> Sequence[Any]:
        if self._rows is None:
            make = load_plugin("data.dataset_name", self._name)
            try:
                rows = make()
                len(rows), rows.__getitem__
            except Exception as error:
                raise DataError(
                    f"data.dataset_name={self._name}: called without arguments, it must return an object with a length "
                    f"and numbered rows ({type(error).__name__}: {error})"
                ) from error
            self._rows = rows
        return self._rows
