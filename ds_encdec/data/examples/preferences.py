"""Examples of preferences: a record becomes a prompt, the answer that was chosen, and the one that was rejected.

The answers are texts, which go through the templates (`{output}` is the one, then the other), or lists of messages,
which go through the tokenizer's chat template. As TRL has it, these hold the answer alone, behind a list of messages
`prompt`, or the whole conversation, whose turns before the last are the prompt; texts without a prompt begin with it.
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ds_encdec.base.types import Document
from ds_encdec.config.file_rows import field_value
from ds_encdec.data.examples.sft import PairMaker, Sides, UnusableError
from ds_encdec.registry.objectives import CHAT, PREFERENCE_COLUMNS, TEMPLATES, columns_by_field, preference_columns

_OUTPUT = "output"


class PreferenceMaker(PairMaker):
    """The `ExampleMaker` of preferences: both answers of a pair are in one example."""

    pieces = 3
    task = "DPO"

    def form(self, document: Document) -> str | None:
        if document.record is None:
            return None
        rows = self._converted(document.record)
        chosen = [field_value(row, preference_columns(self.data, row.keys())["chosen"]) for row in rows]
        return CHAT if any(isinstance(one, list | Mapping) for one in chosen) else TEMPLATES

    def _sides(self, record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        columns = preference_columns(self.data, record.keys())
        prompt, chosen, rejected = (field_value(record, column) for column in columns.values())
        for name, value in (("chosen", chosen), ("rejected", rejected)):
            if value is None:
                raise UnusableError(
                    f"it has no {name} answer (column {columns[name]}); it has {', '.join(record):.300}; set "
                    f"data.field_mapping.{name}=COLUMN"
                )
        answers = [[one] if isinstance(one, Mapping) else one for one in (chosen, rejected)]
        are_messages = [isinstance(one, list) for one in answers]
        if any(are_messages) and not all(are_messages):
            raise UnusableError(f"one of {columns['chosen']} and {columns['rejected']} is messages, the other is text")
        make = self._of_messages if all(are_messages) else self._of_texts
        source, *targets = make(prompt, answers, record, columns)
        if not source:
            raise UnusableError("its prompt is empty")
        for name, target in zip(("chosen", "rejected"), targets, strict=True):
            if not target.strip():
                raise UnusableError(f"its {name} answer is empty")
        if targets[0] == targets[1]:
            raise UnusableError("its chosen and its rejected answer are equal, so it prefers nothing")
        yield source, *targets

    def _of_texts(
        self, prompt: Any, answers: Sequence[Any], record: Mapping[str, Any], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        fields = columns_by_field(self.data)
        if prompt is None and "prompt" in fields:
            is_named = columns["prompt"] in record or "prompt" in self.data.field_mapping
            if is_named or not all(isinstance(one, str) for one in answers):
                raise UnusableError(f"it has no prompt (column {columns['prompt']})")
            shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
            end = re.search(r"\s+\S*\Z", shared)  # no word of the answers is cut
            if not (prompt := shared[: end.start()] if end else ""):
                raise UnusableError(
                    f"it has no prompt (column {columns['prompt']}), and its answers do not begin with the same words; "
                    "set data.field_mapping.prompt=COLUMN"
                )
            answers = [one[len(prompt) :] for one in answers]
        elif columns["prompt"] != "prompt" and "prompt" in fields and "prompt" not in self.data.field_mapping:
            others = [name for name in PREFERENCE_COLUMNS["prompt"] if name in record]
            if len(others) > 1:
                raise UnusableError(
                    f"its prompt may be in {' or '.join(others)}; set data.field_mapping.prompt=COLUMN, or name these "
                    "fields in data.input_template"
                )
        known = record if prompt is None else {**record, "prompt": prompt}
        sides = [self._filled({**known, _OUTPUT: answer}) for answer in answers]
        (source, has_prompt), _ = sides[0]
        return source if has_prompt else "", *(text if has_text else "" for _, (text, has_text) in sides)

    def _of_messages(
        self, prompt: Any, answers: Sequence[list[Any]], record: Mapping[str, Any], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        chat = self._chat_of(f"data.field_mapping.chosen={columns['chosen']}")
        before = prompt if isinstance(prompt, list) else []
        if prompt is not None and not before and all(len(one) == 1 for one in answers):
            before = [{"role": "user", "content": prompt}]
        # Beside a prompt of messages some data sets repeat it in both answers. A text beside conversations is their
        # first question once more, as UltraFeedback has it, and is not read.
        repeat = [bool(before) and one[: len(before)] == before for one in answers]
        if before and any(len(one) > 1 and not repeats for one, repeats in zip(answers, repeat, strict=True)):
            raise UnusableError("an answer has several messages, and does not begin with those of its prompt")
        whole = [one if repeats else [*before, *one] for one, repeats in zip(answers, repeat, strict=True)]
        chosen, rejected = ([turn for turn, _ in self._conversation(one, record)] for one in whole)
        for name, turns in (("chosen", chosen), ("rejected", rejected)):
            if not turns or turns[-1]["role"] != "assistant":
                role = turns[-1]["role"] if turns else "the list is empty"
                raise UnusableError(f"the last turn of its {name} messages is not the assistant's ({role!s:.100})")
        if chosen[:-1] != rejected[:-1]:
            raise UnusableError(
                f"the conversations of {columns['chosen']} and {columns['rejected']} differ before their last turns"
            )
        if all(turn["role"] == "system" for turn in chosen[:-1]):
            return "", "", ""
        (source, target), (_, other) = (self._rendered(chat, turns, record) for turns in (chosen, rejected))
        return source, target, other

    def _teaches(self, cut: Sequence[Sides]) -> bool:
        return not np.array_equal(cut[0][1], cut[1][1])
