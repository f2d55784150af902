"""Fill and speed of packing on web-like documents: python scripts/bench/packing.py [--batches 300] [--json rows.json]

Documents have log-normal lengths with a median of 620 tokens. For each configuration it prints the filled shares of
both token budgets, the examples of a micro-batch, the longest wait in batches, and the CPU time of packing one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from turns import report

from ds_encdec.config.schema import DataConfig
from ds_encdec.config.shares import token_budgets
from ds_encdec.data.examples.chunks import Chunker, documents_ratio
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.tokenizer.sentinels import Vocabulary

VOCABULARY = Vocabulary(tuple(range(1000, 1100)), eos_id=998, pad_id=999, mode_token_ids=(), vocab_size=1100)
DEFAULT, SHORT = DataConfig(), DataConfig(max_seq_length=512, max_encoder_length=256, max_decoder_length=256)
CASES = [(DEFAULT, 4), (DEFAULT, 2), (DEFAULT, 8), (SHORT, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report("packing", [packed(data, size, options.batches) for data, size in CASES], options.json)


def packed(data: DataConfig, micro_batch_size: int, batches: int) -> dict[str, Any]:
    chunker = Chunker.from_config(data, seed=1, vocabulary=VOCABULARY)
    budgets = token_budgets(data, micro_batch_size, documents_ratio(lengths(256, seed=1), chunker))
    packer: Packer[tuple[int, int]] = Packer(
        budgets, pool_examples=data.packing_pool_examples, max_wait_batches=data.packing_max_wait_batches
    )
    arrivals, filled, examples, longest_wait = arriving(chunker), np.zeros(2), 0, 0
    began = time.process_time()
    for _ in range(batches):
        batch = packer.pack(arrivals)
        filled += np.sum(batch, axis=0)
        examples += len(batch)
        longest_wait = max([longest_wait, *(entry.waited_batches for entry in packer.waiting)])
    encoder_fill, decoder_fill = filled / (batches * np.array([budgets.encoder_tokens, budgets.decoder_tokens]))
    return {
        "micro-batch": f"{micro_batch_size} x ({data.max_encoder_length} + {data.max_decoder_length})",
        "encoder %": 100 * encoder_fill,
        "decoder %": 100 * decoder_fill,
        "examples": examples / batches,
        "longest wait": longest_wait,
        "ms of CPU": 1e3 * (time.process_time() - began) / batches,
    }


def lengths(count: int, seed: int) -> list[int]:
    return np.maximum(2, 620 * np.exp(np.random.default_rng(seed).normal(size=count))).astype(int).tolist()


def arriving(chunker: Chunker) -> Iterator[Waiting[tuple[int, int]]]:
    for number, length in enumerate(lengths(200_000, seed=2)):
        for chunk in chunker.chunks(length, str(number), epoch=0):
            ends = chunk.start + chunk.length == length
            pair = chunker.example_lengths(chunk.length, chunk.denoiser, document_ends=ends)
            yield Waiting(pair, *pair)


if __name__ == "__main__":
    main()
