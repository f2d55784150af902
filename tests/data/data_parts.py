"""Small real parts for the data tests: a byte tokenizer with sentinels, a corpus on disk, a configuration."""

import copy
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import Batch, Example
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
    return example_maker(data, 0, *byte_tokenizer())


def texts(count: int, median_characters: int = 150, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(2, median_characters / 4 * np.exp(rng.normal(size=count) * 0.8)).astype(int)
    return [f"{number}: " + " ".join(rng.choice(WORDS, length)) for number, length in enumerate(lengths)]


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_json_lines(path: Path, documents: list[str]) -> str:
    return write_rows(path, ({"text": text, "id": i} for i, text in enumerate(documents)))


def write_parquet(path: Path, documents: list[str], *, row_group_size: int) -> str:
    table = pyarrow.table({"text": documents, "id": list(range(len(documents)))})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def damage_row_group(path: Path, group: int) -> None:
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(group).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)


def make_config(training: dict[str, Any] | None = None, **data: Any) -> FullConfig:
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


def json_config(path: str | Path, documents: list[str] | None = None, **fields: Any) -> FullConfig:
    if documents is not None:
        write_json_lines(Path(path), documents)
    return make_config(dataset_name="json", data_files=str(path), **fields)


def make_data(
    config: FullConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_lanes: int = 4,
    parts: tuple[PreTrainedTokenizerFast, Vocabulary] | None = None,
    **more: Any,
) -> TrainingData:
    parts = parts or byte_tokenizer()
    return build_data(config, *parts, rank=rank, world_size=world_size, num_lanes=num_lanes, **more)


@cache
def chat_tokenizer() -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    tokenizer, vocabulary = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = (
        "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
        "{% for message in messages %}# {{ message.role }}\n{{ message.content }}"
        "{% if message.tool_calls %}<call>{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}# assistant\n{% endif %}"
    )
    return tokenizer, vocabulary


SFT_ROWS = [{"instruction": f"add {i}", "input": i, "output": "x" * (i % 30) + f" is {i}"} for i in range(120)]


def sft_config(path: str, **fields: Any) -> FullConfig:
    defaults = {"objective": "sft", "dataset_name": "json", "data_files": path}
    return make_config(**{**defaults, **fields})


def read_until(data: TrainingData, epoch: int) -> set[str]:
    seen: set[str] = set()
    while data.loader.epoch < epoch:
        seen |= documents_of(next(data.loader))
    return seen


def documents_of(batches: Iterable[Batch | Example]) -> set[str]:
    return {key for one in batches for key in (one.documents if isinstance(one, Batch) else [one.document])}


def plain_batches(batches: Iterable[Batch]) -> list[Any]:
    return [(b.documents, b.encoder_ids.tolist(), b.labels.tolist(), b.denoiser_ids.tolist()) for b in batches]


def plain_examples(examples: Iterable[Example]) -> list[Any]:
    return [(e.document, e.denoiser, e.encoder_ids.tolist(), e.decoder_ids.tolist()) for e in examples]
