"""The two downstream tasks of the study of quality, as pairs of token ids.

`docstring`: a function's code, and the first sentence of its docstring. `lookup`: lines `name = value` and one of the
names, and its value: nobody can know it without the input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from quality_text import rows
from transformers import PreTrainedTokenizerFast

from ds_encdec.tokenizer.sentinels import Vocabulary

Pair = tuple[list[int], list[int]]
TASKS = ("docstring", "lookup")
EXAMPLES = 16  # of a micro-batch
_LINES = 8  # of a list to look up in
_VALUE_WORDS = 2
_MOST_TOKENS = (200, 50)  # of a function and of a sentence


class Tasks:
    """The examples of both tasks: the first ones to test on, all others to train on."""

    def __init__(self, texts: Path, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary, tests: int) -> None:
        self._tokenizer, self._eos, self.tests = tokenizer, vocabulary.eos_id, tests
        self._functions = rows(texts / "pairs.jsonl")
        words = {
            word for row in rows(texts / "task.jsonl")[:500] for word in re.findall(r"\b[a-z]{4,9}\b", row["text"])
        }
        self._words = np.array(sorted(words))

    def test(self, task: str) -> Iterator[list[Pair]]:
        """The examples to test on, in micro-batches."""
        for start in range(0, self.tests, EXAMPLES):
            yield [self._pair(task, number) for number in range(start, min(start + EXAMPLES, self.tests))]

    def train(self, task: str, seed: int) -> Iterator[list[Pair]]:
        """Micro-batches without end, in the order of this seed."""
        rng = np.random.default_rng(seed)
        most = len(self._functions) if task == "docstring" else 10**9
        while True:
            yield [self._pair(task, int(number)) for number in rng.integers(self.tests, most, size=EXAMPLES)]

    def _pair(self, task: str, number: int) -> Pair:
        if task == "docstring":
            given, target = self._functions[number]["input"], self._functions[number]["output"]
        else:
            given, target = self._list(np.random.default_rng([number, 1]))
        ids, targets = (self._tokenizer(text)["input_ids"] for text in (given, target))
        return ids[: _MOST_TOKENS[0]], [*targets[: _MOST_TOKENS[1]], self._eos]

    def _list(self, rng: np.random.Generator) -> tuple[str, str]:
        names, *values = rng.choice(self._words, size=(1 + _VALUE_WORDS, _LINES), replace=False)
        values = [" ".join(words) for words in zip(*values, strict=True)]
        lines = [f"{name} = {value}\n" for name, value in zip(names, values, strict=True)]
        asked = int(rng.integers(_LINES))
        return f"{''.join(lines)}\n{names[asked]} =", f" {values[asked]}"
