"""Sentinels as real tokens with explicit ids, on Qwen3's own vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from qwen3_vocabulary import oracle, qwen3_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ds_encdec.config.schema import ModelConfig
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import MODE_TOKENS, add_sentinels
from ds_encdec.types import CheckpointError

TEXTS = (
    "The quick brown fox doesn't jump over 12345 lazy dogs.",
    "  indented\n\n\tcode = {'a': 1}  # naïve café — 日本語テキスト 🙂\r\n",
    "İstanbul ǅ ﬁ combining: é",
)


def test_the_fixture_is_qwen3s_tokenizer() -> None:
    """Against tiktoken, an implementation of its own, over the same vocabulary; and the ids Qwen3 documents."""
    tokenizer = qwen3_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle().encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 151669
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 151643
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    assert tokenizer.convert_tokens_to_ids("</think>") == 151668


def test_sentinels_take_qwen3s_spare_rows() -> None:
    tokenizer = qwen3_tokenizer()
    vocabulary = add_sentinels(tokenizer, 100, mode_tokens=False)
    assert vocabulary.sentinel_ids == tuple(range(151669, 151769))
    assert (vocabulary.eos_id, vocabulary.pad_id) == (151645, 151643)
    assert vocabulary.vocab_size == 151769 <= 151936
    ids = tokenizer.encode("Hello<extra_id_0> world <extra_id_99>.")
    assert [token for token in ids if token >= 151669] == [151669, 151768]
    assert tokenizer.decode(ids) == "Hello<extra_id_0> world <extra_id_99>."
    for text in TEXTS:  # without sentinels, and encoded as before
        assert tokenizer.encode(text) == oracle().encode(text)


def test_256_sentinels_and_the_mode_tokens_fit_without_a_resize() -> None:
    """Of a base model's tokenizer, which ends with the pad token."""
    vocabulary = add_sentinels(qwen3_tokenizer("<|endoftext|>"), 256, mode_tokens=True)
    assert vocabulary.sentinel_ids[-1] == 151924
    assert vocabulary.mode_token_ids == tuple(range(151925, 151930))
    assert vocabulary.vocab_size <= 151936
    assert vocabulary.eos_id == vocabulary.pad_id == 151643


def test_adding_twice_keeps_the_ids_and_adding_more_appends() -> None:
    tokenizer = qwen3_tokenizer()
    first = add_sentinels(tokenizer, 4, mode_tokens=True)
    assert add_sentinels(tokenizer, 4, mode_tokens=True) == first
    more = add_sentinels(tokenizer, 6, mode_tokens=False)
    assert more.sentinel_ids == (*range(151669, 151673), 151678, 151679)


def test_a_saved_tokenizer_loads_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer()
    expected = add_sentinels(tokenizer, 100, mode_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    section = ModelConfig(model_name_or_path=str(tmp_path))
    loaded, vocabulary = load_tokenizer(section, builtin_texts=tuple, mode_tokens=True)
    assert vocabulary == expected
    text = f"{MODE_TOKENS[4]}Hello <extra_id_7> 日本"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    with pytest.raises(CheckpointError, match="eos_token"):
        add_sentinels(bare, 4, mode_tokens=False)
