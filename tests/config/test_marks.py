"""The marks on the fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from ds_encdec.config.schema import Mark, marked
from ds_encdec.config.sections import fields


def test_fields_of_each_mark(golden: Callable[[object], None]) -> None:
    """Mark.ORDER makes the fingerprint of the data: with a field more or less no earlier checkpoint can be resumed."""
    golden("\n".join(f"{mark.name}: {' '.join(marked(mark))}" for mark in Mark))


def test_marks_change_neither_types_nor_the_json_schema() -> None:
    for path, info in fields().items():
        assert Mark not in {type(part) for part in get_args(info.annotation)}, path
