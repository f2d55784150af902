"""A tiny exported encoder-decoder with random weights and a tokenizer of words."""

from pathlib import Path

import torch
from tiny_models import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.model.weights import random_weights

WORDS = [f"word{number}" for number in range(60)]


def export_tiny(folder: Path, seed: int = 0) -> Path:
    """Write the model folder; its tokenizer knows `WORDS`, and four sentinels behind them."""
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    backend = Tokenizer(WordLevel(ids, "<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    sentinels = [f"<extra_id_{number}>" for number in range(4)]
    tokenizer.add_special_tokens({"additional_special_tokens": sentinels})
    config = tiny_config(sentinel_token_ids=tokenizer.convert_tokens_to_ids(sentinels), vocab_size=66)
    export_hf(random_weights(config, seed), config, tokenizer, folder, dtype=torch.float32, card="")
    return folder
