"""The protocol of what makes examples of documents, which the lanes, the evaluation and every look at the data ask.

A maker works in two steps. `read` gives the token ids of a document, which depend on the document and the tokenizer
alone; `examples` makes of them, in one pass over the data, the examples to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ds_encdec.base.types import Document, Example
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.sources.sources import BadRow, Row, check_bad_rows

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from ds_encdec.tokenizer.sentinels import Vocabulary

ALL = range(1 << 62)
"""Every example of a document."""


class Made(NamedTuple):
    """Example `number` of its document; None for one that is left out. `is_long`: a side was above its maximum."""

    number: int
    example: Example | None
    is_last: bool
    is_long: bool = False


class ExampleMaker(Protocol):
    """Makes examples of documents. It is pickled into worker processes, and imports no torch."""

    @classmethod
    def from_config(
        cls, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
    ) -> ExampleMaker:
        """The maker of a run. Raises ConfigError."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The special ids."""

    @property
    def tokenize(self) -> Callable[[Document], np.ndarray]:
        """The ids of a document's text, int32 [n], special tokens in it taken apart."""

    @property
    def why_empty(self) -> str:
        """Say what documents may be of which there is no example, and which fields to check."""

    def read(self, document: Document) -> Any | BadRow:
        """The ids that `examples` takes; a bad row where none can be made of the document."""

    def form(self, document: Document) -> str | None:
        """`objectives.TEMPLATES` or `CHAT`, as the input is made of the document; None where there is but one form."""

    def size(self, ids: Any) -> int:
        """Tokens of a document that was read, on both sides; 0 where nothing is to be learnt from it."""

    def ratio(self, read: Sequence[Any]) -> float:
        """Encoder tokens per decoder token of documents that were read, each of a size above 0."""

    def examples(self, ids: Any, document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        """The `wanted` examples of the document of that key in one pass over the data. Raises DataError."""

    def of_evaluation(self) -> ExampleMaker:
        """The maker of examples to evaluate on, which are the same in all runs."""

    def checked(self, ids: Any, document: str) -> Iterator[tuple[str, bool]]:
        """Examples of a document by their kind, and whether each holds what it was made of."""

    def facts(self) -> dict[str, Any]:
        """JSON-able facts beside the configuration's that decide what is made."""


def with_ids(rows: Iterable[Row], maker: ExampleMaker) -> Iterator[tuple[Row, Any | BadRow]]:
    """Each row with the ids that `maker` reads of it, or the bad row that it is."""
    return ((row, row if isinstance(row, BadRow) else maker.read(row)) for row in rows)


def usable_documents(rows: Iterable[tuple[Row, Any | BadRow]], bad_row_limit: int) -> Iterator[tuple[Document, Any]]:
    """The documents among the rows `with_ids`. Raises DataError for more bad rows than the limit."""
    bad = count(1)
    for row, ids in rows:
        if isinstance(row, BadRow) or isinstance(ids, BadRow):
            check_bad_rows(next(bad), bad_row_limit, ids.problem)
        else:
            yield row, ids
