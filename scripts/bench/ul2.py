"""Denoising speed on one core, keyed randomness included: python scripts/bench/ul2.py

Prints the millions of raw tokens per second of each denoiser and of the default mixture, on chunks of
4,096 tokens (the best of several rounds, so that a busy machine disturbs it least). With --shares instead: how often
each denoiser corrupts the first token, the last and any one of a text, and its share of the chunks, of the tokens read
and of the targets, which are what the loss is averaged over, of documents of many lengths.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from ds_encdec.config.schema import DataConfig
from ds_encdec.data.chunks import Chunker, denoise
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


def corrupted(denoiser: str, tokens: int, draws: int) -> tuple[float, float, float]:
    """The shares of `draws` in which a text's first token, its last and its mean one are corrupted."""
    hidden = np.zeros(tokens)
    for chunk in range(draws):
        rng = keyed_generator(0, "denoise", 0, "document", chunk)
        kept, _ = denoise(np.arange(tokens, dtype=np.int32), denoiser, VOCABULARY, rng, document_ends=True)
        hidden += ~np.isin(np.arange(tokens), kept)
    return hidden[0] / draws, hidden[-1] / draws, float(hidden.mean()) / draws


def shares(lengths: list[int]) -> dict[str, tuple[float, float, float]]:
    """Each denoiser's share of the chunks, of their tokens and of the targets, of documents of these `lengths`."""
    chunker = Chunker.from_config(DataConfig(), 0, replace(VOCABULARY, sentinel_ids=VOCABULARY.sentinel_ids[:100]))
    sums = {name: np.zeros(3) for name in DENOISERS}
    for document, length in enumerate(lengths):
        for chunk in chunker.chunks(length, str(document), 0):
            ends = chunk.start + chunk.length == length
            _, targets = chunker.example_lengths(chunk.length, chunk.denoiser, document_ends=ends)
            sums[chunk.denoiser] += 1, chunk.length, targets
    total = sum(sums.values())
    return {name: tuple(counted / total) for name, counted in sums.items()}


def print_shares() -> None:
    for name in DENOISERS:
        first, last, mean = corrupted(name, 700, 20_000)
        print(f"{name:2} of 700 tokens: first {first:.3f}, last {last:.3f}, mean {mean:.3f}")
    web = np.random.default_rng(0).lognormal(6.5, 1.0, 20_000).astype(int) + 2
    for what, lengths in (("web pages, median 665 tokens", web.tolist()), ("books of 200,000 tokens", [200_000] * 40)):
        for name, row in shares(lengths).items():
            print(f"{what}: {name:2} chunks {row[0]:.1%}, tokens {row[1]:.1%}, targets {row[2]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shares", action="store_true", help="where, and how much, each denoiser corrupts")
    arguments = parser.parse_args()
    if arguments.shares:
        print_shares()
        return
    weights = DataConfig().ul2_task_weights
    mixture = [name for name, weight in zip(DENOISERS, weights, strict=True) for _ in range(int(weight))]
    for name, denoisers in [*((name, [name]) for name in DENOISERS), ("mixture", mixture)]:
        speed = tokens_per_second(denoisers, arguments.chunk_tokens, arguments.rounds, chunks_per_round=200)
        print(f"{name:8} {speed / 1e6:7.1f} Mtokens/s")


if __name__ == "__main__":
    main()
