"""Read CSV as rows, by the same strict rules in a run and in `ds-encdec validate`."""

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from ds_encdec.base.types import DataError

# The delimiter that splits the first line into the most fields is taken, of equal ones the first.
_DELIMITERS = ",;\t|"
_FOREIGN_QUOTES = ("''", "``", '""', "“”", "‘’", "„“", "«»")


def csv_rows(lines: Iterable[str], path: str, *, is_whole: bool = True) -> Iterator[dict[str, str] | str]:
    """Yield each row below the column names, or a sentence that says why it cannot be read; skip empty lines. `lines`
    keep their ends, as with `open(newline="")`; `is_whole` is False if they stop within the file. Raises DataError for
    missing, empty or repeated names, and for a wrong quote, because nothing after one can be trusted."""
    csv.field_size_limit(sys.maxsize)
    rest, row_lines, names = iter(lines), list[str](), list[str]()
    head = list(islice(rest, 1))
    delimiter = max(_DELIMITERS, key=lambda one: len(next(csv.reader(head, delimiter=one), ())))

    def recorded() -> Iterator[str]:
        for line in chain(head, rest):
            row_lines.append(line)
            yield line

    reader, first_line = csv.reader(recorded(), delimiter=delimiter, strict=True), 1
    try:
        for row in reader:
            if row and not names:
                names = row
                _check_names(names, path)
            elif row and (reason := _wrong(row, names, row_lines, delimiter)):
                yield f"{reason} (line {first_line} of the file)"
            elif row:
                yield dict(zip(names, row, strict=True))
            first_line = reader.line_num + 1
            row_lines.clear()
    except csv.Error as error:
        reason = f"not a CSV file ({error})"
        if "end of data" in str(error):
            if not is_whole:
                return
            reason = "a quote opens a field and is never closed. Close it, or write quotes within fields twice"
        elif "expected after" in str(error):
            foreign = r" (\" is not CSV)" if any('\\"' in line for line in row_lines) else ""
            reason = (
                "text follows the quote that closes a field. Quotes within a quoted field are written twice, "
                f'""{foreign}; nothing behind this place can be trusted'
            )
        where = f"{path}, line {first_line}" + f" to {reader.line_num}" * (reader.line_num > first_line)
        raise DataError(f"{where}: {reason}") from error


def _check_names(names: Sequence[str], path: str) -> None:
    for number, name in enumerate(names):
        bare, problem = name.strip(), None
        if not_utf8(name):
            problem = f"is {not_utf8(name)}"
        elif not bare or "\0" in name:
            problem = (
                f"has no name for column {number + 1}. Write one (pandas leaves out its row numbers with "
                "`to_csv(index=False)`)"
            )
        elif len(bare) > 1 and bare[0] + bare[-1] in _FOREIGN_QUOTES:
            problem = f'quotes {bare:.80}. CSV quotes by ", with no blank before it: write the file so'
        elif bare in map(str.strip, names[:number]):
            problem = f"has {bare:.80} twice. Rename or remove one of these columns"
        if problem is not None:
            raise DataError(f"{path}: the first line, which names the columns, {problem}")


def not_utf8(text: str) -> str | None:
    """Return an error message if a text, decoded with `surrogateescape`, was not UTF-8, else None."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "not UTF-8 text. Convert the file, for example with `iconv -f latin1 -t utf-8`"
    return None


def _wrong(row: Sequence[str], names: Sequence[str], lines: Sequence[str], delimiter: str) -> str | None:
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
