"""The values of a row's fields, and the text that a template writes of them: JSON's spelling of numbers and truth."""

import datetime
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any

_PLAIN = (str, int, float, decimal.Decimal, datetime.date, datetime.time)
"""Types of values that have a text."""


def field_value(record: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of what a path with dots (`answers.text.0`) leads to; None where nothing is there."""
    if column in record:
        return present(record[column])
    value: Any = record
    for part in column.split("."):
        is_item = isinstance(value, list) and part.isdigit() and int(part) < len(value)
        value = value[int(part)] if is_item else value.get(part) if isinstance(value, Mapping) else None
    return present(value)


def present(value: Any) -> Any:
    """The value, or None for what is not finite: tables write NaN where a value is missing."""
    if isinstance(value, float | decimal.Decimal):
        return value if math.isfinite(value) else None
    return None if isinstance(value, datetime.date) and value != value else value  # pandas' NaT


def not_unicode(text: str) -> str | None:
    """Say where `text` has half of a surrogate pair, which JSON can hold and UTF-8 cannot; None for sound texts."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return f"half of a surrogate pair, {half}, is no character (character {error.start + 1} of the text)"
    return None


def as_text(value: Any) -> str:
    """The text of a value, of numbers and truth values as JSON spells them. Raises TypeError for lists and objects."""
    if not isinstance(value, _PLAIN):
        raise TypeError(type(value).__name__)
    return json.dumps(value) if isinstance(value, bool | float) else str(value)
