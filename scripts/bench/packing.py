"""Fill and speed of packing on web-like documents: python scripts/bench/packing.py

Documents have log-normal lengths with a median of 620 tokens. For several configurations it prints the share of
both token budgets that is filled, examples per micro-batch, the longest wait, and the time to pack one micro-batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.budgets import token_budgets
from ds_encdec.data.examples.chunks import Chunker, documents_ratio
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.tokenizer.sentinels import Vocabulary

VOCABULARY = Vocabulary(tuple(range(1000, 1100)), eos_id=998, pad_id=999, mode_token_ids=(), vocab_size=1100)

CASES = {
    "default": (DataConfig(), 4),
    "micro-batch 2": (DataConfig(), 2),
    "micro-batch 8": (DataConfig(), 8),
    "1024 + 1024": (DataConfig(max_encoder_length=1024, max_decoder_length=1024), 8),
    "quickstart": (DataConfig(max_seq_length=512, max_encoder_length=256, max_decoder_length=256), 8),
}


def web_like_lengths(count: int, seed: int) -> list[int]:
    return np.maximum(2, 620 * np.exp(np.random.default_rng(seed).normal(size=count))).astype(int).tolist()


def waiting_chunks(chunker: Chunker) -> Iterator[Waiting[tuple[int, int]]]:
    for number, length in enumerate(web_like_lengths(200_000, seed=2)):
        for chunk in chunker.chunks(length, str(number), epoch=0):
            ends = chunk.start + chunk.length == length
            pair = chunker.example_lengths(chunk.length, chunk.denoiser, document_ends=ends)
            yield Waiting(pair, *pair)


def report(name: str, data: DataConfig, micro_batch_size: int, num_batches: int) -> str:
    chunker = Chunker.from_config(data, seed=1, vocabulary=VOCABULARY)
    ratio = documents_ratio(web_like_lengths(256, seed=1), chunker)
    budgets = token_budgets(data, micro_batch_size, ratio)
    packer: Packer[tuple[int, int]] = Packer(
        budgets, pool_examples=data.packing_pool_examples, max_wait_batches=data.packing_max_wait_batches
    )
    arrivals = waiting_chunks(chunker)
    examples = longest_wait = 0
    filled = np.zeros(2)
    started = time.perf_counter()
    for _ in range(num_batches):
        batch = packer.pack(arrivals)
        filled += np.sum(batch, axis=0)
        examples += len(batch)
        longest_wait = max([longest_wait, *(entry.waited_batches for entry in packer.waiting)])
    milliseconds = 1e3 * (time.perf_counter() - started) / num_batches
    encoder_fill, decoder_fill = filled / (num_batches * np.array([budgets.encoder_tokens, budgets.decoder_tokens]))
    return (
        f"{name:14} {budgets.encoder_tokens:6} + {budgets.decoder_tokens:6} tokens: filled {encoder_fill:6.1%} "
        f"{decoder_fill:6.1%}, {examples / num_batches:5.1f} examples, waits <= {longest_wait}, {milliseconds:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    for name, (data, micro_batch_size) in CASES.items():
        print(report(name, data, micro_batch_size, arguments.batches))


if __name__ == "__main__":
    main()
