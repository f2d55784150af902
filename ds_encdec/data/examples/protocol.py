"""The base of example makers, which the lanes, the evaluation and every look at the data use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np

from ds_encdec.base.types import Document, Example
from ds_encdec.data.sources.sources import BadRow, Row, check_bad_rows
from ds_encdec.tokenizer.sentinels import Vocabulary

ALL = range(1 << 62)  # every example of a document


class Made(NamedTuple):
    """Example `number` of its document, None if it is left out; `is_long`: a side was above its maximum."""

    number: int
    example: Example | None
    is_last: bool
    is_long: bool = False


class ExampleMaker(Protocol):
    """Makes examples of documents; it is pickled into worker processes, and imports no torch."""

    vocabulary: Vocabulary
    tokenize: Callable[[Document], np.ndarray]  # a text's ids, int32 [n]; special tokens in the text are split
    pieces: int = 1  # arrays of ids that `read` returns for an example; 1: the document's ids alone

    @property
    def why_empty(self) -> str:
        """Describe documents without examples, and name the fields to check."""

    def read(self, document: Document) -> Any | BadRow:
        """Return the ids for `examples`, which depend on the document and the tokenizer alone, or a bad row."""

    def form(self, document: Document) -> str | None:
        """Return the form of the document's input, `objectives.TEMPLATES` or `CHAT`; None if there is only one form."""
        return None

    def size(self, ids: Any) -> int:
        """Return the tokens of a document on both sides; 0 if there is nothing to learn from it."""

    def ratio(self, read: Sequence[Any]) -> float:
        """Return the encoder tokens per decoder token of documents of sizes above 0."""

    def examples(self, ids: Any, document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        """Yield the `wanted` examples of the document with this key, in one pass over the data. Raises DataError."""

    def of_evaluation(self) -> ExampleMaker:
        """Return the maker of evaluation examples, which are the same in all runs."""
        return self

    def checked(self, ids: Any, document: str) -> Iterator[tuple[str, bool]]:
        """Yield the kind of each example of a document, and whether it holds the text that it was made of."""

    def facts(self) -> dict[str, Any]:
        """Return JSON-able facts beside the configuration's that decide which examples are made."""
        return {}


def with_ids(rows: Iterable[Row], maker: ExampleMaker) -> Iterator[tuple[Row, Any | BadRow]]:
    """Yield each row with its ids; a bad row comes with itself."""
    return ((row, row if isinstance(row, BadRow) else maker.read(row)) for row in rows)


def usable_documents(rows: Iterable[tuple[Row, Any | BadRow]], bad_row_limit: int) -> Iterator[tuple[Document, Any]]:
    """Yield the documents among the rows `with_ids`. Raises DataError for more bad rows than the limit."""
    bad = count(1)
    for row, ids in rows:
        if isinstance(row, BadRow) or isinstance(ids, BadRow):
            check_bad_rows(next(bad), bad_row_limit, ids.problem)
        else:
            yield row, ids
