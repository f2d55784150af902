"""The objectives, a row each: how documents become examples, and what the rest of the program has to know of that.

It stands on the floor, beside the denoisers, so that the configuration's rules and the memory estimate ask a row
without numpy or torch. A function of a row that takes `data` is given the configuration's section.
"""

from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ds_encdec.denoisers import DENOISERS, expected_ratio

TASKS: Mapping[str, Any] = ChainMap({"SFT": None}, DENOISERS)
"""The kinds of examples by name, in the order of all sums by kind: the denoisers, and pairs of input and output."""


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """The parts of a template: a text, and the field behind it, None for none. Raises ValueError."""
    parts = []
    for text, name, form, conversion in Formatter().parse(template):
        if name == "" or form or conversion:
            raise ValueError("write fields as {name} and braces that are text as {{ and }}")
        parts.append((text, name))
    return parts


@dataclass(frozen=True, slots=True)
class Objective:
    """How a document becomes examples.

    `maker`: the dotted name of what makes them: a class with `from_config` that is a `data.examples.ExampleMaker`.
    `tasks`: the names of its kinds of examples; `weights`: how often each is drawn, relative. `columns`: where a
    document is a row and not a text, those that are read of a table with such columns. `own_fields`: those of `data`
    that no other objective reads; `read_fields`: of them, those that decide the token ids of a document. `held_out`:
    the shares of the documents that are for validation and for test, which `split_fields` decide; with `split_advice`
    there are some for validation. `expected_ratio`: encoder tokens per decoder token that are assumed before data is
    looked at. For the model card `described`: rows, which also depend on the forms of the inputs, `tag`: a tag,
    `taught_by`: words, `prompt`: an input to show, `prompt_is`: what that means.
    """

    maker: str
    tasks: Mapping[str, Any]
    weights: Callable[[Any], Sequence[float]]
    own_fields: tuple[str, ...]
    split_fields: tuple[str, ...]
    split_advice: str
    held_out: Callable[[Any], tuple[float, float]]
    expected_ratio: Callable[[Any], float]
    described: Callable[[Any, Sequence[str]], dict[str, str]]
    tag: str
    taught_by: str
    prompt: Callable[[Any], str]
    prompt_is: str
    columns: Callable[[Any, Sequence[str]], Sequence[str]] | None = None
    read_fields: tuple[str, ...] = ()

    @property
    def takes_records(self) -> bool:
        """True where a document is a row, with its columns, and not a text."""
        return self.columns is not None


TEMPLATES, CHAT = "templates", "chat template"
"""Forms of the inputs of fine-tuning: a row's fields in `input_template`, and a conversation."""


def is_chat_alone(forms: Sequence[str]) -> bool:
    """Return whether all inputs were conversations; false where their forms are not known."""
    return [*forms] == [CHAT]


def _described_mixture(data: Any, _: Sequence[str]) -> dict[str, str]:
    weights = ", ".join(f"{weight:g}" for weight in data.ul2_task_weights)
    return {f"UL2 weights ({', '.join(DENOISERS)})": weights}


def _held_out_of_records(data: Any) -> tuple[float, float]:
    rest = 1 - data.train_split_ratio
    return rest * data.val_test_split_ratio, rest * (1 - data.val_test_split_ratio)


def _described_inputs(data: Any, forms: Sequence[str]) -> dict[str, str]:
    names = () if is_chat_alone(forms) else ("input_template", "output_template")
    conversations = {"Conversations": "through the tokenizer's chat template"} if CHAT in forms else {}
    templates = {name: f"`{getattr(data, name)!r}`".replace("|", "\\|") for name in names}  # else a column ends there
    return {"Objective": "supervised fine-tuning (`data.objective: sft`)", **templates, **conversations}


def _shown_template(data: Any) -> str:
    parts = template_parts(data.input_template)
    return "".join(text if name is None else f"{text}{{{name}}}" for text, name in parts)


def columns_by_field(data: Any) -> dict[str, str]:
    """The columns that fill the templates, by the names of the templates' fields."""
    parts = [*template_parts(data.input_template), *template_parts(data.output_template)]
    return {name: data.field_mapping.get(name, name) for _, name in parts if name is not None}


_MESSAGES, _SHAREGPT = "messages", "conversations"
"""Columns of conversations in the formats of OpenAI, which is the default of `messages_column`, and of ShareGPT."""


SYSTEM = "system"
"""Column of the system's turn beside a conversation, as LLaMA-Factory and ms-swift have it."""


def conversation_column(data: Any, existing: Container[str]) -> str | None:
    """The column of the conversation in a row with these columns; None for a row of the templates' fields."""
    if data.messages_column in existing:
        return str(data.messages_column)
    may_be_other = data.messages_column == _MESSAGES and _SHAREGPT in existing
    return _SHAREGPT if may_be_other and not all(one in existing for one in _filling(data, existing)) else None


def _filling(data: Any, existing: Container[str]) -> set[str]:
    return {name if name in existing else name.partition(".")[0] for name in columns_by_field(data).values()}


def _columns_of_records(data: Any, existing: Sequence[str]) -> Sequence[str]:
    """All where a converter may read any, or where neither a template's columns nor conversations are there."""
    filling, conversation = _filling(data, existing), conversation_column(data, existing)
    needs_all = data.converter is not None or not (filling <= {*existing} or conversation)
    beside = {conversation, data.tools_column, SYSTEM} if conversation else {data.tools_column}
    read = {*filling, *beside, data.weight_column}
    return [name for name in existing if needs_all or name in read]


_RENDERED = (
    "input_template",
    "output_template",
    "field_mapping",
    "converter",
    "messages_column",
    "tools_column",
    "weight_column",
    "chat_targets",
)

OBJECTIVES = {
    "ul2": Objective(
        maker="ds_encdec.data.chunks:ChunkMaker",
        tasks=DENOISERS,
        weights=lambda data: data.ul2_task_weights,
        own_fields=("max_seq_length", "ul2_task_weights", "use_mode_tokens", "eval_fraction"),
        split_fields=("eval_fraction",),
        split_advice="eval_fraction > 0",
        held_out=lambda data: (data.eval_fraction, 0.0),
        expected_ratio=lambda data: expected_ratio(data.ul2_task_weights),
        described=_described_mixture,
        tag="ul2",
        taught_by="pre-training on UL2's mixture of denoisers",
        prompt=lambda _: "The capital of France is <extra_id_0>.",
        prompt_is="`<extra_id_0>`, `<extra_id_1>`, … in the input mark gaps; the output repeats each with the text "
        "that fills it. An input without them is a prefix, and the output continues it.",
    ),
    "sft": Objective(
        maker="ds_encdec.data.sft:PairMaker",
        tasks={"SFT": None},
        weights=lambda _: (1.0,),
        own_fields=(
            "objective",
            *_RENDERED,
            "on_long_row",
            "train_split_ratio",
            "val_test_split_ratio",
        ),
        split_fields=("train_split_ratio", "val_test_split_ratio"),
        split_advice="train_split_ratio < 1 and val_test_split_ratio > 0",
        held_out=_held_out_of_records,
        expected_ratio=lambda data: data.max_encoder_length / data.max_decoder_length,
        described=_described_inputs,
        tag="sft",
        taught_by="supervised fine-tuning",
        prompt=_shown_template,
        prompt_is="The input is the template of the training data: put a value in the place of each name in braces. "
        "Where the data had conversations (`data.messages_column`), these went through the tokenizer's chat template "
        "instead.",
        columns=_columns_of_records,
        read_fields=_RENDERED,
    ),
}
"""The rows by the value of `data.objective`."""
