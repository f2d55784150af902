"""Small real parts for the data tests: a byte tokenizer with sentinels, a corpus on disk, a configuration."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_encdec.config.schema import DataConfig, FullConfig, TrainingConfig
from ds_encdec.data.build import TrainingData, build_data, example_maker
from ds_encdec.data.examples.protocol import ExampleMaker
from ds_encdec.tokenizer.sentinels import Vocabulary, add_sentinels

WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as")


@cache
def byte_tokenizer(num_sentinels: int = 24) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    """One token per byte; ids 256 and 257 are pad and EOS, then the sentinels."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    return tokenizer, add_sentinels(tokenizer, num_sentinels, mode_tokens=False)


def byte_maker(data: DataConfig) -> ExampleMaker:
    """What makes examples of the documents of `data`, with the byte tokenizer."""
    return example_maker(data, 0, *byte_tokenizer())


def texts(count: int, median_characters: int = 150, seed: int = 0) -> list[str]:
    """Texts of words, of log-normal length, each different."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(2, median_characters / 4 * np.exp(rng.normal(size=count) * 0.8)).astype(int)
    return [f"{number}: " + " ".join(rng.choice(WORDS, length)) for number, length in enumerate(lengths)]


def write_json_lines(path: Path, documents: list[str], column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(documents)))
    return str(path)


def write_parquet(path: Path, documents: list[str], *, row_group_size: int, column: str = "text") -> str:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({column: documents, "id": list(range(len(documents)))})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def make_config(training: dict[str, Any] | None = None, **data: Any) -> FullConfig:
    """Micro-batches of 4 x (96 + 64) tokens, no workers."""
    defaults: dict[str, Any] = {
        "max_seq_length": 128,
        "max_encoder_length": 96,
        "max_decoder_length": 64,
        "preprocessing_num_workers": 0,
        "packing_pool_examples": 16,
        "max_examples_per_micro_batch": 32,
        "shuffle_buffer_size": 7,
        **({} if data.get("objective") == "sft" else {"eval_fraction": 0.05}),
    }
    section = DataConfig(**{**defaults, **data})
    eval_samples = 10 if section.eval_fraction else 0
    training = {"per_device_train_batch_size": 4, "eval_samples": eval_samples, **(training or {})}
    return FullConfig(data=section, training=TrainingConfig(**training))


def make_data(
    config: FullConfig, *, rank: int = 0, world_size: int = 1, num_lanes: int = 4, **more: Any
) -> TrainingData:
    tokenizer, vocabulary = byte_tokenizer()
    return build_data(config, tokenizer, vocabulary, rank=rank, world_size=world_size, num_lanes=num_lanes, **more)
