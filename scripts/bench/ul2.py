"""Denoising speed on one core, keyed randomness included: python scripts/bench/ul2.py

Prints the millions of raw tokens per second of each denoiser and of the default mixture, on chunks of
4,096 tokens (the best of several rounds, so that a busy machine disturbs it least).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.chunks import denoise
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.tokenizer.sentinels import Vocabulary
from ds_encdec.types import DENOISERS

# As many sentinels as R1 needs for a chunk of 4,096 tokens.
VOCABULARY = Vocabulary(
    tuple(range(151_669, 151_925)), eos_id=151_645, pad_id=151_643, mode_token_ids=(), vocab_size=151_925
)


def tokens_per_second(denoisers: list[str], chunk_tokens: int, rounds: int, chunks_per_round: int) -> float:
    tokens = np.random.default_rng(0).integers(151_643, size=chunk_tokens).astype(np.int32)
    best = float("inf")
    for turn in range(rounds):
        started = time.perf_counter()
        for chunk in range(chunks_per_round):
            rng = keyed_generator(0, "denoise", turn, "document", chunk)
            denoise(tokens, denoisers[chunk % len(denoisers)], VOCABULARY, rng, document_ends=True)
        best = min(best, time.perf_counter() - started)
    return chunk_tokens * chunks_per_round / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    weights = DataConfig().ul2_task_weights
    mixture = [name for name, weight in zip(DENOISERS, weights, strict=True) for _ in range(int(weight))]
    for name, denoisers in [*((name, [name]) for name in DENOISERS), ("mixture", mixture)]:
        speed = tokens_per_second(denoisers, arguments.chunk_tokens, arguments.rounds, chunks_per_round=200)
        print(f"{name:8} {speed / 1e6:7.1f} Mtokens/s")


if __name__ == "__main__":
    main()
