"""Text to token ids, as ordinary text: a document that spells out a special token does not get one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Tokenize = Callable[[list[str]], list[np.ndarray]]
"""Texts to token ids (int32 arrays), one for one, without any special token."""


class TextTokenizer:
    """A `Tokenize` made of a fast tokenizer's Rust half, which worker processes load without transformers.

    Special tokens in the text are split into ordinary ones (`encode_special_tokens`). So `<extra_id_0>` or
    `<|endoftext|>` written in a document can neither be taken for a sentinel nor end a sequence.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> TextTokenizer:
        """The tokenizer of a run. It is shared, not copied."""
        return cls(tokenizer.backend_tokenizer)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, int32."""
        texts = [_encodable(text) for text in texts]
        before = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = True
        try:
            encodings: list[Any] = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = before
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def _encodable(text: str) -> str:
    """`text`, with surrogates that have no partner (JSON can hold them, UTF-8 cannot) as question marks."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
