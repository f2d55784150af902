"""Masked next-token prediction of an encoder (LLM2Vec, arXiv 2404.05961), in which a decoder learns to look both ways.

A document is cut into chunks of equal length. Some of a chunk's tokens become `<extra_id_0>`, and each is predicted
from the state before it, as a decoder does; so the first one is never masked. The draws follow from (seed, epoch,
document key, chunk).
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ds_encdec.base.types import Example
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.chunks import Chunker, ChunkMaker
from ds_encdec.data.examples.protocol import ALL, Made
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class MaskMaker(ChunkMaker):
    """The `ExampleMaker` of masked texts; `share`: of a chunk's tokens."""

    share: float = 0.2

    @classmethod
    def from_config(
        cls, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
    ) -> MaskMaker:
        chunker = Chunker.from_config(data, seed, vocabulary)
        return cls(vocabulary, TextTokenizer(tokenizer.backend_tokenizer), chunker, data.mask_share)

    def ratio(self, read: Sequence[np.ndarray]) -> float:
        return 1.0  # the decoder's side is empty

    def examples(self, ids: np.ndarray, document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        beginning = np.array(self.vocabulary.beginning(), dtype=np.int32)
        bounds = self.chunker.bounds
        chunks = -(-self.size(ids) // min(bounds.max_encoder_tokens, bounds.max_raw_tokens))
        for number, (start, stop) in enumerate(pairwise(len(ids) * cut // max(chunks, 1) for cut in range(chunks + 1))):
            if number in wanted:
                text = np.concatenate([beginning, ids[start:stop]])
                yield Made(number, self._masked(text, document, epoch, number), number + 1 == chunks)

    def _masked(self, text: np.ndarray, document: str, epoch: int, number: int) -> Example:
        rng = keyed_generator(self.chunker.seed, "mask", epoch, document, number)
        masks = max(1, round(self.share * (len(text) - 1)))
        places = np.sort(rng.choice(len(text) - 1, masks, replace=False, shuffle=False) + 1)
        targets = text[places]
        text[places] = self.vocabulary.sentinel_ids[0]
        return Example(text, targets, "MNTP", document)

    def checked(self, ids: np.ndarray, document: str) -> Iterator[tuple[str, bool]]:
        restored = []
        for example in (made.example for made in self.examples(ids, document, 0) if made.example):
            text = example.encoder_ids.copy()
            text[text == self.vocabulary.sentinel_ids[0]] = example.decoder_ids
            restored.append(text[len(self.vocabulary.beginning()) :])
        yield "MNTP", bool(np.array_equal(np.concatenate(restored), ids))
