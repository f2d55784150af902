"""CSV, JSON and compressed files as people have them: read strictly, or named as what they are."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.base.types import DataError
from ds_encdec.config.file_rows import (
    RowError,
    array_rows,
    as_text,
    csv_rows,
    field_value,
    is_array,
    json_object,
    json_row,
    not_lines,
)
from ds_encdec.config.packed_files import first_bytes, packing


def rows_of(text: str) -> list[Any]:
    return list(csv_rows(io.StringIO(text, newline=""), "a.csv"))


def strict_rows(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]


@given(st.text(alphabet=',"\n\r ab\\;é\u2028', max_size=60))
def test_a_csv_that_a_strict_reader_refuses_never_trains(body: str) -> None:
    text = f"x,y\n{body}"
    try:
        expected: list[list[str]] | None = strict_rows(text)[1:]
    except csv.Error:
        expected = None
    try:
        read = rows_of(text)
    except DataError:
        assert expected is None
        return
    assert expected is not None
    assert len(read) == len(expected)
    for row, fields in zip(read, expected, strict=True):
        if not isinstance(row, str):
            assert [*row.values()] == fields
        else:
            assert len(fields) != 2 or ("blank" in row and ' "' in body)


@given(
    st.lists(st.lists(st.text(max_size=8).filter(lambda field: "\0" not in field), min_size=2, max_size=2), max_size=5),
    st.sampled_from(",;\t|"),
    st.sampled_from([("\r\n", csv.QUOTE_MINIMAL), ("\n", csv.QUOTE_ALL), ("\r", csv.QUOTE_ALL)]),
)
def test_what_a_writer_writes_is_read(rows: list[list[str]], delimiter: str, style: tuple[str, Any]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, lineterminator=style[0], quoting=style[1]).writerows([["my x", "y"], *rows])
    assert rows_of(out.getvalue()) == [{"my x": x, "y": y} for x, y in rows]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x,y, x\n", "has x twice"),
        ("x,y,\n", "no name for column 3"),
        ("x,\udce9\n", "is not UTF-8 text"),
        ('x,y\na,"b\nc,d\n', "line 2 to 3: a quote opens a field and is never closed"),
        ('x,y\n\na,b\n"say \\"hi\\"",c\n', "line 4: text follows the quote .* twice"),
    ],
)
def test_names_and_quotes_that_end_a_csv_file(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"a.csv.*{problem}"):
        rows_of(text)


def test_a_bad_row_of_a_csv_file_says_why_and_where() -> None:
    read = rows_of('x,y\n1,2,3\n\n4\n5,6\n7, "8"\n9\0,0\n"a\nb","  ""c"\n')
    assert [(row[:8], row[-23:]) if isinstance(row, str) else row for row in read] == [
        ("3 fields", "es (line 2 of the file)"),
        ("1 fields", "es (line 4 of the file)"),
        {"x": "5", "y": "6"},
        ("a blank ", "xt (line 6 of the file)"),
        ("a NUL ch", "er (line 7 of the file)"),
        {"x": "a\nb", "y": '  "c'},
    ]
    assert rows_of("") == rows_of("x,y\n") == []
    (again, row) = rows_of("x,y\n\ufeffx,y\n1,2\n")
    assert again.startswith("the names of the columns once more")
    assert row == {"x": "1", "y": "2"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=5), st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["", "\ufeff"]))
def test_elements_of_an_array_are_lines(rows: list[Any], indent: int | None, ascii_only: bool, mark: str) -> None:
    content = (mark + json.dumps(rows, indent=indent, ensure_ascii=ascii_only)).encode(errors="surrogatepass")
    assert is_array(content)
    lines = list(array_rows(content, "a.json"))
    assert not any(b"\n" in line or b"\r" in line for line in lines)
    assert [json_row(line) for line in lines] == rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[\n{},\n{]", "line 3 column 2"),
        ('[{"a": 1},]', "A comma before the end"),
        ('[{"a": 1} {}]', "Expecting a comma"),
        ("[{}] x", "Something follows"),
    ],
)
def test_a_damaged_array_is_named(text: str, problem: str) -> None:
    assert is_array(text.encode())
    with pytest.raises(DataError, match=f"a damaged JSON array .*{problem}"):
        list(array_rows(text.encode(), "a.json"))


def test_a_row_with_a_field_twice_is_bad() -> None:
    assert json_object(b'{"a": 1, "b": {"a": 2}}\r\n') == {"a": 1, "b": {"a": 2}}
    for row in (b'{"a": 1, "a": 2}', b'{"b": [{"a": 1, "a": 1}]}'):
        with pytest.raises(RowError, match="an object has the field a twice"):
            json_object(row)
    with pytest.raises(RowError, match=r"not UTF-8 text.*iconv -f latin1"):
        json_object(b'{"a": "\xe9"}')


def test_an_object_over_several_lines_is_named() -> None:
    for text in (
        '\ufeff{\n "data": [\n  {"a": 1}\n ]\n}\n',
        '{"a": 1,\n "b": 2}\n',
        '{\n "a": [\n' + '  {"a": 1},\n' * 999,
    ):
        assert "JSON objects over several lines" in str(not_lines(text.encode()))
    for text in ('{"a": "cut\n{"a": 1}\n', '{"a": 1}\n', "[1,\n2]"):
        assert not_lines(text.encode()) is None


@given(st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_and_truth_values_are_spelled_as_json(value: Any) -> None:
    assert as_text(value) == json.dumps(value)
    assert json.loads(as_text(value)) == value
    assert field_value({"a": [{"b": value}]}, "a.0.b") == value


def test_what_is_not_finite_is_nothing() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e400"):
        record = json_object(f'{{"a": {number}, "b": {{"c": {number}}}}}'.encode())
        assert not math.isfinite(record["a"])
        assert field_value(record, "a") is field_value(record, "b.c") is None


FORMATS = {
    "UTF-16 text.*utf-16 ": 'question,answer\n"é",b\n'.encode("utf-16"),
    "UTF-16 text.*utf-16le": "question,answer\n".encode("utf-16-le"),
    "UTF-32 text.*utf-32 ": "question".encode("utf-32"),
    "a tar archive.*tar -xf": b"a.jsonl".ljust(257, b"\0") + b"ustar\0" + bytes(300),
    "an Arrow file": b"ARROW1\0\0\xff\xff\xff\xff",
}


def test_a_format_that_is_not_read_is_named_with_the_way_out(tmp_path: Path) -> None:
    for named, content in FORMATS.items():
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match=f"a: .*{named}"):
            packing(str(tmp_path / "a"))
    for text in ("x^2", "]", "BZh9 is a plane", "LZIP", "ORC", "Obj", "sep=;", "P*M", "déjà", "x", ""):
        (tmp_path / "a").write_text(text)
        assert packing(str(tmp_path / "a")) is None
        assert first_bytes(str(tmp_path / "a"), 9) == (text.encode()[:9], len(text.encode()) <= 9)
