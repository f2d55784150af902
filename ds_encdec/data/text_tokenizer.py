"""Turn documents into token ids by the Rust half of a fast tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.types import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Texts that tokenizers treat differently: scripts, code, white space, emoji, normal forms, recent characters.
SAMPLE = (
    "It's what they'll've DONE'S, I'D say: 'ſ we\u212are don't\u2019s\u00a0!? #$%^&*()_+ -- ---...\u2026 <|endoftext|>",
    "def f(x):\n\tif x:\r\n\r\n        return {'a': [1, 22, 333, 4_444.5e-6]}  # \t \n\n\n    \n \t x  ",
    "0123456789 \u0661\u0662\u0663 \u4e00\u4e8c \u216b\u00bd\u00b2 1st 2nd x86_64 \U0001d7d8",
    "naïve café nai\u0308ve cafe\u0301 \u1e9b\u0323 \ufb01 \u037e \u1100\u1161\u11a8 \u0958 q\u0323\u0307 \u0301",
    "日本語テキスト 中文 繁體 ไทย हिन्दी العربية עברית Ελληνικά русский Tiếng Việt İstanbul ǅ አማርኛ ქართული 한글",
    "🙂\U0001f469\u200d\U0001f467 \ufe0f\u200b\ufeff\u0085\u1680\u2003\u2028\u202f\u3000\x00\x1c\x7f \ufffd\U0010ffff",
    "\u0870 \u1c89 \u0897a \ua7cb \U00010d6f \U0001e4d0 \U00011bc0 \U00016d63\U00016d67 \U000323af \U0002ebf0",
    "Donaudampfschifffahrtsgesellschaftskapitän" * 3 + "a" * 999 + " " * 99 + "\n" * 99 + "^" * 99 + "\t " * 50 + "x",
)


class TextTokenizer:
    """Turns documents into token ids, and is loaded without transformers. Special tokens in a text are split into
    ordinary ones, so a document's `<|endoftext|>` ends no sequence."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def __call__(self, document: Document) -> np.ndarray:
        """Return the token ids of `document`, int32 [n]."""
        return self.encode(document.text) if document.token_ids is None else document.token_ids

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, int32 [n]; half a surrogate pair (JSON can hold it) is read as `?`."""
        text = text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            encodings: list[Any] = self.backend.encode_batch_fast([text], add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = before
        return np.array(encodings[0].ids, dtype=np.int32)
