"""The sizes of the study of quality: what the source decoder is, what it learns, and how long the arms train."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 32


@dataclass(frozen=True)
class Phase:
    """A part of the source's training: `tokens` in windows of `window` tokens. Of these a share `shuffled` repeats a
    few tokens, drawn one by one from the text, until it is full; a share `passages` has a passage twice, with other
    text between and behind; the others are plain text. `period`: the most tokens that are repeated when shuffled."""

    tokens: int
    window: int
    shuffled: float
    passages: float
    period: int


@dataclass(frozen=True)
class Size:
    """One size of the study. `documents`: the most that are read from this machine; 0: the built-in corpus, which each
    Python installation has. Tokens of arms count inputs and targets; `marks`: after which they are evaluated, for each
    mixture. `rates`: of arms that start from a source; from random weights they are four times as large."""

    documents: int
    vocab_size: int
    hidden: int
    layers: int
    heads: tuple[int, int]  # of queries, and of keys and values
    intermediate: int
    phases: tuple[Phase, ...]
    source_rate: float
    source_batch_tokens: int
    copied_tokens: int  # of a passage that is read twice to see whether the source copies
    chunk: int  # tokens of a text that become one example
    batch_examples: int  # of this length, in a micro-batch
    eval_examples: int
    rates: tuple[float, ...]
    rate_tokens: int
    seeds: int
    marks: dict[str, tuple[int, ...]]
    task_marks: tuple[int, ...]
    task_examples: int  # to test on

    @property
    def source_tokens(self) -> int:
        """All tokens that the source is trained on."""
        return sum(phase.tokens for phase in self.phases)


SIZES = {
    "ci": Size(
        documents=0,
        vocab_size=512,
        hidden=48,
        layers=6,
        heads=(2, 1),
        intermediate=128,
        phases=(Phase(300_000, 64, 0.3, 0.2, 12),),
        source_rate=0.01,
        source_batch_tokens=2048,
        copied_tokens=32,
        chunk=128,
        batch_examples=4,
        eval_examples=80,
        rates=(1e-3,),
        rate_tokens=0,
        seeds=1,
        marks={"ul2": (20_000,), "S": ()},
        task_marks=(),
        task_examples=0,
    ),
    "cpu": Size(
        documents=14_000,
        vocab_size=1024,
        hidden=96,
        layers=12,
        heads=(4, 2),
        intermediate=256,
        phases=(Phase(1_400_000, 64, 0.5, 0.2, 16), Phase(16_600_000, 256, 0.1, 0.25, 64)),
        source_rate=0.006,
        source_batch_tokens=2048,
        copied_tokens=128,
        chunk=256,
        batch_examples=4,
        eval_examples=200,
        rates=(2.5e-4, 5e-4, 1e-3),
        rate_tokens=50_000,
        seeds=3,
        marks={"ul2": (50_000, 100_000, 200_000), "S": (50_000, 100_000)},
        task_marks=(20_000, 40_000, 80_000),
        task_examples=256,
    ),
    "gpu": Size(
        documents=100_000,
        vocab_size=16_384,
        hidden=384,
        layers=24,
        heads=(12, 4),
        intermediate=1024,
        phases=(Phase(20_000_000, 64, 0.5, 0.2, 16), Phase(130_000_000, 512, 0.1, 0.2, 128)),
        source_rate=0.004,
        source_batch_tokens=65_536,
        copied_tokens=256,
        chunk=512,
        batch_examples=32,
        eval_examples=500,
        rates=(2.5e-4, 5e-4, 1e-3),
        rate_tokens=500_000,
        seeds=1,
        marks={"ul2": (1_000_000, 4_000_000), "S": (2_000_000,)},
        task_marks=(500_000,),
        task_examples=500,
    ),
}
