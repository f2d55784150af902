"""Turn documents into token ids, by tiktoken if it gives the tokenizer's own ids: it is several times faster.

It does for byte-level BPE with one of `PATTERNS` and no normalizer but NFC. tiktoken merges neighbours in the order of
the tokens, tokenizers by a list of pairs. Both give the same ids if each token's pairs stand together in the list,
behind those of its parts, and the list leads to every token; this is checked, and tried on `SAMPLE`.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_encdec.base.types import Document
from ds_encdec.launch.disk import cached

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer

# GPT-2's pattern, which tokenizers' `ByteLevel` has built in.
BYTE_LEVEL_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns by which tiktoken and tokenizers cut a text at the same places, around each of Unicode's characters.
PATTERNS = (BYTE_LEVEL_PATTERN, QWEN_PATTERN)

# Texts in which implementations could differ: scripts, code, white space, emoji, normal forms, recent characters.
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

# Characters of a text that are checked together. If they hold no white space, or nothing behind it, a piece may be too
# long for tiktoken: before version 0.14 its time grows with the square of the length, and in any version a very long
# run of spaces overflows its stack.
_WINDOW = 8192

logger = logging.getLogger(__name__)


class TextTokenizer:
    """Turns documents into token ids as a fast tokenizer's Rust half does, and is loaded without transformers. Special
    tokens in a text are split into ordinary ones, so a document's `<|endoftext|>` ends no sequence."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.faster = tiktoken_form(backend)

    def __call__(self, document: Document) -> np.ndarray:
        """Return the token ids of `document`, int32 [n]."""
        return self.encode(document.text) if document.token_ids is None else document.token_ids

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, int32 [n]; half a surrogate pair (JSON can hold it) is read as `?`."""
        text = text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self.faster.encode(text, self.backend) if self.faster else None
        return slow_ids(self.backend, text) if ids is None else ids


@dataclass(frozen=True, slots=True)
class TiktokenForm:
    """A tokenizer as an encoding of tiktoken, whose ids are ranks of tokens."""

    encoding: tiktoken.Encoding
    ids: np.ndarray  # the tokenizer's id of each rank, int32
    added: tuple[str, ...]  # ordinary tokens that the tokenizer matches before it cuts the rest of a text

    def encode(self, text: str, backend: Tokenizer) -> np.ndarray | None:
        """Return the token ids of `text`, int32 [n]; None if only the tokenizer itself (`backend`) can encode it."""
        normal = text
        # Python's check is faster, and valid if Python knows every character.
        if backend.normalizer is not None and not text.isascii():
            is_known = text.replace("\n", "").isprintable() and unicodedata.is_normalized("NFC", text)
            normal = text if is_known else backend.normalizer.normalize_str(text)
        windows = (normal[at : at + _WINDOW] for at in range(0, len(normal) - _WINDOW + 1, _WINDOW))
        is_slow = any(len(window.split(None, 1)) < 2 for window in windows)
        if is_slow or any(token in form for form in {text, normal} for token in self.added):
            return None
        return self.ids[self.encoding.encode_ordinary(normal)]


def slow_ids(backend: Tokenizer, text: str) -> np.ndarray:
    """Return the ids that the tokenizer itself gives, int32 [n]."""
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        encodings: list[Any] = backend.encode_batch_fast([text], add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    return np.array(encodings[0].ids, dtype=np.int32)


def tiktoken_form(backend: Tokenizer) -> TiktokenForm | None:
    """Return a tokenizer's form for tiktoken; log why and return None if its ids are not known to be the same."""
    spec: dict[str, Any] = json.loads(backend.to_str())
    model, pattern, others = spec["model"], _pattern(spec), ("continuing_subword_prefix", "end_of_word_suffix")
    is_other = model["type"] != "BPE" or any(model.get(name) for name in ("dropout", "byte_fallback", *others))
    lacks = (
        "its model is not plain BPE"
        if is_other or not all(character in model["vocab"] for character in _byte_characters())
        else "it cuts texts by other rules"
        if pattern not in PATTERNS
        else "it has a normalizer other than NFC"
        if spec["normalizer"] not in (None, {"type": "NFC"})
        else "it cuts off or pads"
        if spec["truncation"] or spec["padding"]
        else cached("merges", [backend.to_str().encode(), version("tokenizers").encode()], lambda: _unlike(spec))
    )
    if not lacks:
        form = _form(spec, str(pattern))
        encoded = ((text, form.encode(text, backend)) for text in SAMPLE)
        differs = [text for text, ids in encoded if not (ids is None or np.array_equal(ids, slow_ids(backend, text)))]
        if not differs:
            return form
        lacks = f"tiktoken's ids differ for {differs[0]!r:.40}"
    logger.info("texts are tokenized by Hugging Face's tokenizers, since tiktoken's ids may differ: %s", lacks)
    return None


def _form(spec: dict[str, Any], pattern: str) -> TiktokenForm:
    # Imported here: a TextTokenizer without this form does not need it.
    import tiktoken

    to_byte = {character: byte for byte, character in enumerate(_byte_characters())}
    tokens = [*to_byte, *dict.fromkeys(left + right for left, right in spec["model"]["merges"])]
    ranks = {bytes(map(to_byte.__getitem__, token)): rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("equal", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ids = np.array([spec["model"]["vocab"][token] for token in tokens], dtype=np.int32)
    ordinary = [token["content"] for token in spec["added_tokens"] if not token["special"]]
    added = {form for token in ordinary for form in (token, unicodedata.normalize("NFC", token))}
    return TiktokenForm(encoding, ids, tuple(added))


def _pattern(spec: dict[str, Any]) -> str | None:
    """Return the regular expression that cuts a text into pieces; None if it is cut in another way."""
    cut = spec["pre_tokenizer"] or {}
    *splits, level = cut.get("pretokenizers", [cut])
    if level.get("type") != "ByteLevel" or level["add_prefix_space"]:
        return None
    if not splits:
        return BYTE_LEVEL_PATTERN if level["use_regex"] else None
    pattern = splits[0].get("pattern") or {}
    expected = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return pattern.get("Regex") if splits == [expected] and not level["use_regex"] else None


def _unlike(spec: dict[str, Any]) -> str:
    """Return why the list of merges may give other tokens than their order alone; empty if it cannot."""
    from tokenizers import Tokenizer

    merges: Sequence[tuple[str, str]] = spec["model"]["merges"]
    order = dict.fromkeys(left + right for left, right in merges)
    rank = {token: number for number, token in enumerate(order)}
    last = -1
    for left, right in merges:
        number = rank[left + right]
        if number < last or max(rank.get(left, -1), rank.get(right, -1)) >= number:
            return f"its merges are in another order than its tokens ({left} {right})"
        last = number
    bare = {**spec, "model": {**spec["model"], "ignore_merges": False}}
    alone = Tokenizer.from_str(json.dumps({**bare, "normalizer": None, "pre_tokenizer": None, "added_tokens": []}))
    pieces = alone.encode_batch_fast(list(order), add_special_tokens=False)
    lost = (token for token, made in zip(order, pieces, strict=True) if len(made.ids) != 1)
    return next((f"its merges do not lead to its token {token}" for token in lost), "")


def _byte_characters() -> list[str]:
    """Return the character for each byte in the vocabulary of byte-level BPE, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
