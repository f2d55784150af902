"""A small byte-level BPE tokenizer trained on the built-in corpus, for runs without any download."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_encdec.types import ConfigError

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
BYTES = 256
"""Smallest alphabet of a byte-level tokenizer."""


def builtin_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` ids, trained on `texts` once and cached.

    Any text survives encoding and decoding unchanged. Training is deterministic. The cache,
    `$XDG_CACHE_HOME/ds_encdec/tokenizers`, is keyed by the texts, the size, and the versions of Python (whose own
    documentation is the corpus) and tokenizers; processes that race write the same file, atomically.
    Raises ConfigError if `vocab_size` leaves no room for the bytes and special tokens.
    """
    if vocab_size < BYTES + 2:
        raise ConfigError(
            f"model.architecture.vocab_size leaves {vocab_size} ids for the built-in tokenizer beside sentinels and "
            f"mode tokens; it needs at least {BYTES + 2}"
        )
    corpus = list(texts)
    cached = _cache_folder() / f"bpe-{_fingerprint(corpus, vocab_size)}.json"
    if not cached.is_file():
        _save_atomically(_train(corpus, vocab_size), cached)
    return PreTrainedTokenizerFast(tokenizer_file=str(cached), pad_token=PAD_TOKEN, eos_token=EOS_TOKEN)


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


def _fingerprint(corpus: list[str], vocab_size: int) -> str:
    python_version = ".".join(map(str, sys.version_info[:3]))
    digest = hashlib.sha256(f"{vocab_size} {python_version} {tokenizers.__version__}".encode())
    for text in corpus:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:32]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ds_encdec" / "tokenizers"


def _save_atomically(tokenizer: Tokenizer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(tokenizer.to_str())
    Path(name).replace(path)
