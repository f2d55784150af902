"""Read CSV and JSON as rows, by the same strict rules in a run and in `ds-encdec validate`; read the values of a row's
fields, and write them as text: numbers and truth values as in JSON."""

import csv
import datetime
import decimal
import json
import math
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from ds_encdec.base.types import DataError
from ds_encdec.config.packed_files import NOT_UTF8
from ds_encdec.config.yaml.plain_files import too_deep

# Most levels of objects and lists in a line. Python's own limit depends on the caller, which must decide nothing.
MAX_NESTING = 200
_BLANK = re.compile(r"[ \t\r\n]*")
# The first line of an object that is spread over several lines.
_OPENING = re.compile(r'\{\s*("(\\.|[^"\\])*"\s*:\s*[\[{]?)?\s*')


def csv_rows(
    lines: Iterable[str], path: str, *, is_whole: bool = True, longest: int = sys.maxsize
) -> Iterator[dict[str, str] | str]:
    """Yield each row below the column names, or a sentence that says why it cannot be read; skip empty lines. `lines`
    keep their ends, as with `open(newline="")`, or are parts of lines; `is_whole` is False if they stop within the
    file. A row of a line of more than `longest` characters is passed over without being kept. Raises DataError for
    missing, empty or repeated names, for a wrong quote, because nothing after one can be trusted, and for a row of
    several lines that is too long."""
    csv.field_size_limit(sys.maxsize)
    rest, row_lines, names, too_long_lines = iter(lines), list[str](), list[str](), list[int]()
    head = list(islice(rest, 1))
    # The delimiter that splits the first line into the most fields, of equal ones the first.
    delimiter = max(",;\t|", key=lambda one: len(next(csv.reader(head, delimiter=one), ())))

    def recorded() -> Iterator[str]:
        kept = 0
        for line in chain(head, rest):
            kept = len(line) + (kept if row_lines else 0)
            if kept > longest:
                quotes = line.count('"')
                while not line.endswith(("\n", "\r")) and (line := next(rest, "")):
                    quotes += line.count('"')
                if row_lines or quotes % 2 or not names:
                    raise csv.Error(f"a row of {too_long(longest)}, maybe because of a quote that is never closed")
                too_long_lines.append(reader.line_num + 1)
                line = "\n"
            row_lines.append(line)
            yield line

    reader, first_line = csv.reader(recorded(), delimiter=delimiter, strict=True), 1
    try:
        for row in reader:
            if row and not names:
                names = row
                _check_names(names, path)
            elif row and (reason := _wrong_csv(row, names, row_lines, delimiter)):
                yield f"{reason} (line {first_line} of the file)"
            elif too_long_lines:
                yield f"{too_long(longest)} (line {too_long_lines.pop()} of the file)"
            elif row:
                yield dict(zip(names, row, strict=True))
            first_line = reader.line_num + 1
            row_lines.clear()
    except csv.Error as error:
        if "end of data" in str(error) and not is_whole:
            return
        reason = {
            "unexpected end of data": "a quote opens a field and is never closed",
            f"'{delimiter}' expected after '\"'": "text follows the quote that closes a field",
        }.get(str(error), f"not a CSV file ({error})")
        reason += ". Quotes within a quoted field are written twice; nothing behind this place can be trusted"
        where = f"{path}, line {first_line}" + f" to {reader.line_num}" * (reader.line_num > first_line)
        raise DataError(f"{where}: {reason}") from error


def too_long(most: int) -> str:
    """Return the error of a row of more than `most` bytes."""
    return f"longer than data.max_row_bytes={most}: raise that where such rows are meant"


def _check_names(names: Sequence[str], path: str) -> None:
    bare = [name.strip() for name in names]
    twice = next((name for name in bare if bare.count(name) > 1), None)
    if problem := not_utf8("".join(names)):
        problem = f"is {problem}"
    elif "" in bare:
        problem = f"has no name for column {bare.index('') + 1}. Write one (pandas: `to_csv(index=False)`)"
    elif twice is not None:
        problem = f"has {twice:.80} twice. Rename or remove one of these columns"
    if problem:
        raise DataError(f"{path}: the first line, which names the columns, {problem}")


def not_utf8(text: str) -> str | None:
    """Return an error message if a text, decoded with `surrogateescape`, was not UTF-8, else None."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return NOT_UTF8
    return None


def _wrong_csv(row: Sequence[str], names: Sequence[str], lines: Sequence[str], delimiter: str) -> str | None:
    if len(row) > 1 and [field.removeprefix("\ufeff") for field in row] == names:
        return "the names of the columns once more, as where files were joined; remove that line"
    if len(row) != len(names):
        return (
            f"{len(row)} fields, and the first line names {len(names)} columns; a field with the delimiter "
            f"{delimiter!r} or a line break in it needs double quotes"
        )
    if any("\0" in line for line in lines):
        return "a NUL character"
    if any(' "' in line for line in lines):
        try:  # blanks before the quote of a field, which it would open without them
            late = next(csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True))
        except csv.Error:
            late = []
        if [field.lstrip(" ") for field in row] != [field.lstrip(" ") for field in late]:
            return "a blank before the quote that opens a field; CSV reads both as text"
    return None


class RowError(ValueError):
    """A row that cannot be read; the message says why."""


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise RowError(f"an object has the field {next(name for name in names if names.count(name) > 1)} twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_fields)
_LENIENT = json.JSONDecoder()


def json_row(content: bytes) -> Any:
    """Parse a line. Raises RowError."""
    try:
        # Without the line's end, which may look like a part of a text. Joined files have a mark in their middle.
        text = content.rstrip(b"\r\n").removeprefix(BOM_UTF8).decode()
        record = _DECODER.decode(text)
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError(NOT_UTF8) from error
    except json.JSONDecodeError as error:
        raise RowError(f"not a JSON line ({error.msg.removesuffix(' at')} at character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"not a JSON line ({error})") from error
    if content.count(b"[") + content.count(b"{") > MAX_NESTING and too_deep(text, MAX_NESTING) is not None:
        raise RowError(f"not a JSON line (nested more than {MAX_NESTING} deep)")
    return record


def json_object(content: bytes) -> dict[str, Any]:
    """Parse a line that must be an object. Raises RowError."""
    record = json_row(content)
    if not isinstance(record, dict):
        raise RowError(f"expected one JSON object a line, found {type(record).__name__}")
    return record


def _text(content: bytes) -> str:
    return content.removeprefix(BOM_UTF8).decode(errors="replace").lstrip(" \t\r\n")


def is_array(start: bytes) -> bool:
    """Return whether a file that begins with `start` is one array, maybe damaged, and not lines that are lists."""
    line, _, rest = _text(start).partition("\n")
    if not line.startswith("[") or not rest.strip():
        return line.startswith("[")
    try:
        _LENIENT.decode(line)
    except (ValueError, RecursionError):
        return True
    return False


def array_rows(content: bytes, path: str, *, is_whole: bool = True) -> Iterator[bytes]:
    """Yield each element of an array as a line, as the file writes it. Raises DataError for a damaged array. `is_whole`
    is False if the content stops within the file: damage is then not reported. Bytes that are not UTF-8 are kept."""
    text = content.removeprefix(BOM_UTF8).decode(errors="surrogateescape")
    try:
        place = _after_blank(text, _after_blank(text, 0) + 1)
        while text[place : place + 1] != "]":
            _, end = _LENIENT.raw_decode(text, place)
            # Line breaks become blanks: strings contain no bare one.
            yield text[place:end].replace("\r", " ").replace("\n", " ").encode(errors="surrogateescape")
            place = _after_blank(text, end)
            if text[place : place + 1] == ",":
                place = _after_blank(text, place + 1)
                if text[place : place + 1] == "]":
                    raise json.JSONDecodeError("A comma before the end of the array", text, place)
            elif text[place : place + 1] != "]":
                raise json.JSONDecodeError("Expecting a comma, or the end of the array", text, place)
        if (end := _after_blank(text, place + 1)) != len(text):
            raise json.JSONDecodeError("Something follows the end of the array", text, end)
    except (ValueError, RecursionError) as error:
        if is_whole:
            raise DataError(f"{path}: a damaged JSON array ({error})") from error


def _after_blank(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    return found.end() if found else place


def not_lines(start: bytes) -> str | None:
    """Return the error for a file whose first object spans several lines; None for others."""
    text = _text(start)
    line, _, rest = text.partition("\n")
    try:
        _, end = _LENIENT.raw_decode(text)
    except (ValueError, RecursionError):
        end = 0
    if text.startswith("{") and (end > len(line) or (not end and rest.strip() and _OPENING.fullmatch(line))):
        return "JSON objects over several lines; needed is an object a line: `jq -c . FILE > rows.jsonl`"
    return None


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
        return (
            f"half of a surrogate pair, \\u{ord(text[error.start]):04x}, is no character "
            f"(character {error.start + 1} of the text)"
        )
    return None


def as_text(value: Any) -> str:
    """Return a value as text, numbers and truth values as in JSON. Raises TypeError for lists and objects."""
    if not isinstance(value, str | int | float | decimal.Decimal | datetime.date | datetime.time):
        raise TypeError(type(value).__name__)
    return json.dumps(value) if isinstance(value, bool | float) else str(value)
