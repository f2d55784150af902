"""Examples for embeddings: a record becomes a query, a positive text that answers it, and negative ones that do not.

A text is the query prefix or the document prefix and a field of the record, as sentence-transformers puts a prompt
before it. A record with several positives gives an example for each. Special tokens in a prefix become special ids; in
a field they are ordinary text.
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.types import DataError, Document, Example
from ds_encdec.config.file_rows import as_text, field_value
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.protocol import ALL, Made
from ds_encdec.data.examples.sft import PairMaker, UnusableError
from ds_encdec.registry.objectives import text_columns
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NO_TARGET = np.empty(0, dtype=np.int32)


class ContrastMaker(PairMaker):
    """The `ExampleMaker` of embeddings: all texts of a query are in one example."""

    task = "CONTRASTIVE"

    def __init__(self, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary) -> None:
        super().__init__(data, seed, tokenizer, vocabulary)
        self.pieces = 2 + data.num_negatives

    @property
    def why_empty(self) -> str:
        data = self.data
        return (
            f"held out, not readable, of weight 0, or above data.max_encoder_length={data.max_encoder_length} with "
            f"data.on_long_row={data.on_long_row}. Check these and data.train_split_ratio"
        )

    def form(self, document: Document) -> str | None:
        return None

    def size(self, ids: Sequence[Sequence[np.ndarray]]) -> int:
        return sum(len(text) for texts in ids for text in texts)

    def ratio(self, read: Sequence[Any]) -> float:
        return 1.0

    def examples(
        self, ids: Sequence[Sequence[np.ndarray]], document: str, epoch: int, wanted: Container[int] = ALL
    ) -> Iterator[Made]:
        most, on_long = self.data.max_encoder_length, self.data.on_long_row
        for number, texts in enumerate(ids):
            if number not in wanted:
                continue
            longest = max(map(len, texts))
            if longest > most and on_long == "stop":
                raise DataError(
                    f"{document}: a text has {longest} tokens, above data.max_encoder_length={most}. Raise that, or "
                    "set data.on_long_row=skip or truncate"
                )
            cut = [(text[:most], _NO_TARGET) for text in texts]
            is_kept = longest <= most or (on_long == "truncate" and not np.array_equal(cut[0][0], cut[1][0]))
            example = Example(*cut[0], self.task, document, tuple(cut[1:])) if is_kept else None
            yield Made(number, example, number + 1 == len(ids), longest > most)

    def checked(self, ids: Sequence[Sequence[np.ndarray]], document: str) -> Iterator[tuple[str, bool]]:
        for texts in ids:
            yield self.task, min(map(len, texts)) > len(self.vocabulary.beginning())

    def _ended(self, target: str) -> np.ndarray:
        return self._begun(self._encode(target))  # a text like the query

    def _sides(self, record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        columns = text_columns(self.data, record.keys())
        found = {name: [text for one in columns[name] for text in _texts_in(record, one)] for name in columns}
        number, has = self.data.num_negatives, len(found["negative"])
        if lacking := next((name for name in ("query", "positive") if not found[name]), None):
            raise UnusableError(
                f"it has no {lacking} text (column {columns[lacking][0]}); it has {', '.join(record):.300}; set "
                f"data.field_mapping.{lacking}=COLUMN"
            )
        if has < number:
            raise UnusableError(
                f"it has {has} negatives (column {columns['negative'][0]}), and data.num_negatives={number} needs as "
                f"many; set data.num_negatives={has}, or data.field_mapping.negative=COLUMN"
            )
        query, negatives = found["query"][0], found["negative"][:number]
        for name, texts in (("query", [query]), ("positive", found["positive"]), ("negative", negatives)):
            if not all(text.strip() for text in texts):
                raise UnusableError(f"its {name} is empty")
        for positive in found["positive"]:
            if positive in (query, *negatives):
                what = "query" if positive == query else "negative"
                raise UnusableError(f"its positive and its {what} are equal, so it teaches nothing")
            prefix = self.data.document_prefix
            texts = [prefix + self._break(text) for text in (positive, *negatives)]
            yield self.data.query_prefix + self._break(query), *texts


def _texts_in(record: Mapping[str, Any], column: str) -> Iterator[str]:
    """Yield the texts of a column: one, or a list of them, which may be objects with a `title` and a `text`."""
    value = field_value(record, column)
    for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        parts = [one.get("title"), one.get("text")] if isinstance(one, Mapping) else [one]
        try:
            yield " ".join(as_text(part) for part in parts if part not in (None, ""))
        except TypeError as error:
            raise UnusableError(
                f"its field {column} is of type {error}, and must be text or a list of texts"
            ) from error
