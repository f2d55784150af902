"""Read the values of a row's fields, and write them as text: numbers and truth values as in JSON."""

import datetime
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any

_PLAIN = (str, int, float, decimal.Decimal, datetime.date, datetime.time)
"""Types of values that can be written as text."""


def field_value(record: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or at a dotted path (`answers.text.0`); None if there is no value."""
    if column in record:
        return present(record[column])
    value: Any = record
    for part in column.split("."):
        is_item = isinstance(value, list) and part.isdigit() and int(part) < len(value)
        value = value[int(part)] if is_item else value.get(part) if isinstance(value, Mapping) else None
    return present(value)


def present(value: Any) -> Any:
    """Return the value, or None if it is not finite: tables write NaN for missing values."""
    if isinstance(value, float | decimal.Decimal):
        return value if math.isfinite(value) else None
    return None if isinstance(value, datetime.date) and value != value else value  # pandas' NaT


def not_unicode(text: str) -> str | None:
    """Return an error if `text` has half of a surrogate pair, which JSON can hold and UTF-8 cannot, else None."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return f"half of a surrogate pair, {half}, is no character (character {error.start + 1} of the text)"
    return None


def as_text(value: Any) -> str:
    """Return a value as text, numbers and truth values as in JSON. Raises TypeError for lists and objects."""
    if not isinstance(value, _PLAIN):
        raise TypeError(type(value).__name__)
    return json.dumps(value) if isinstance(value, bool | float) else str(value)
