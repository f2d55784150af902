"""Rows that cannot be read: what a source hands out in their place, and when there are too many of them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ds_encdec.types import DataError, Document


@dataclass(frozen=True, slots=True)
class BadRow:
    """What stands in the place of a document that cannot be read. `problem` names the file, the row and the reason."""

    key: str
    problem: str


def text_document(key: str, value: Any, where: str) -> Document | BadRow:
    """The document of a text field's value: null is an empty text, anything but a string a bad row."""
    if value is None or isinstance(value, str):
        return Document(key, value or "")
    return BadRow(key, f"{where}: expected text, found {type(value).__name__} {reprlib.repr(value)}")


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


def check_bad_rows(count: int, limit: int, last: str) -> None:
    """Raise DataError where `count` rows, the newest with the problem `last`, are more than `limit`; 0 allows none."""
    if count <= limit:
        return
    if limit == 0:
        raise DataError(f"{last}. Mend it, or pass over such rows: data.on_bad_row=skip")
    raise DataError(
        f"more than data.max_bad_rows={limit} rows cannot be read, the last one {last}. Look at the data, or raise "
        "data.max_bad_rows"
    )
