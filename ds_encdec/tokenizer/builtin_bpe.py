"""A small byte-level BPE tokenizer trained on the built-in corpus, for runs without any download."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_encdec.launch.user_cache import cached
from ds_encdec.types import ConfigError

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
BYTES = 256
"""Smallest alphabet of a byte-level tokenizer."""


def builtin_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` ids, trained on `texts` once and cached.

    Any text survives encoding and decoding unchanged. Training is deterministic. The user's cache
    (launch/user_cache.py) is keyed by the texts, the size, and the version of tokenizers.
    Raises ConfigError if `vocab_size` leaves no room for the bytes and special tokens.
    """
    if vocab_size < BYTES + 2:
        raise ConfigError(
            f"model.architecture.vocab_size leaves {vocab_size} ids for the built-in tokenizer beside sentinels and "
            f"mode tokens; it needs at least {BYTES + 2}"
        )
    corpus = list(texts)
    made_from = (part.encode() for part in (f"{vocab_size} {tokenizers.__version__}", *corpus))
    trained = Tokenizer.from_str(cached("tokenizer", made_from, lambda: _train(corpus, vocab_size).to_str()))
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN)


def _train(corpus: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
