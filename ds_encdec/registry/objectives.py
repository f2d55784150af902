"""Lists the objectives, a row of facts each: how documents become examples, and examples losses and figures. The
configuration's rules and the memory estimate read the rows, so nothing here needs numpy or torch. `data` is the
configuration's section. `exports.model_card` has the card's texts."""

import re
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from itertools import chain
from string import Formatter
from typing import Any

from ds_encdec.registry.denoisers import DENOISERS, expected_ratio


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of examples. `per_example`: it has a loss per example, not per label. `continues`: the output goes on with
    the input, in one text that a decoder alone can read. `on_encoder`: its labels stand at the encoder's positions."""

    per_example: bool = False
    continues: bool = False
    on_encoder: bool = False


# The kinds of examples, in the order of all sums by kind. New rows go to the end.
TASKS: dict[str, Task] = {
    **{name: Task(continues=row.mean_span is None) for name, row in DENOISERS.items()},
    "SFT": Task(continues=True),
    "CONTRASTIVE": Task(per_example=True),
    "MNTP": Task(on_encoder=True),
    "DPO": Task(per_example=True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that an objective has beside its loss; `chart`: the report's chart that shows it, such as `rewards`."""

    chart: str
    higher_is_better: bool = True


TEACHERS_FIGURE = "distillation_loss"  # of any objective with `training.teacher`
# Logged as `train/NAME` and `eval/NAME`.
FIGURES: dict[str, Figure] = {
    "retrieval_accuracy": Figure("retrieval"),
    "mrr": Figure("retrieval"),
    TEACHERS_FIGURE: Figure("distillation", higher_is_better=False),
    "reward_accuracy": Figure("reward accuracy"),
    "reward_margin": Figure("rewards"),
    "reward_chosen": Figure("rewards"),
    "reward_rejected": Figure("rewards", higher_is_better=False),
    "logp_chosen": Figure("log-probabilities"),
    "logp_rejected": Figure("log-probabilities", higher_is_better=False),
}

# What a `LossSum` counts: the losses by task, and the figures.
COLUMNS = (*TASKS, *FIGURES)


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Return the parts of a template: a text, and the field behind it, or None. Raises ValueError."""
    parts = list(Formatter().parse(template))
    if any(name == "" or form or conversion for _, name, form, conversion in parts):
        raise ValueError("write fields as {name} and braces that are text as {{ and }}")
    return [(text, name) for text, name, _, _ in parts]


@dataclass(frozen=True, slots=True)
class Objective:
    """The facts of an objective.

    `maker`, called with the section `data`, the seed, the tokenizer and its vocabulary, returns the
    `data.examples.protocol.ExampleMaker`; `losses`, called with the configuration and the collectives, the
    `objectives.protocol.Losses`. `figures`: those of `FIGURES` that it has. `segments`: of an example, at most.
    `encoder_only`: no decoder is trained. `has_reference`: losses compare the model with the one that a run began as.

    `tasks`: its kinds of examples; `weights`: how often each is drawn, relative. `columns`: if documents are rows and
    not texts, the columns to read of a table that has these; `needed`: those without which a row gives no example, by
    field. `own_fields`: fields of `data` that not all objectives read; `read_fields`: those of them that decide a
    document's token ids. `held_out`: the shares of documents for validation and for test, which `split_fields` decide;
    with `split_advice` there are some for validation. `expected_ratio`: encoder tokens per decoder token that are
    assumed before data is read.
    """

    maker: str
    tasks: Collection[str]
    weights: Callable[[Any], Sequence[float]]
    own_fields: tuple[str, ...]
    split_fields: tuple[str, ...]
    split_advice: str
    held_out: Callable[[Any], tuple[float, float]]
    expected_ratio: Callable[[Any], float]
    columns: Callable[[Any, Sequence[str]], Sequence[str]] | None = None
    needed: Callable[[Any, Collection[str]], dict[str, str]] = lambda *_: {}
    read_fields: tuple[str, ...] = ()
    losses: str = "ds_encdec.objectives.tokens:token_losses"
    figures: tuple[str, ...] = ()
    segments: Callable[[Any], int] = lambda _: 1
    encoder_only: bool = False
    has_reference: bool = False

    def continues(self, data: Any) -> bool:
        """Return whether examples are drawn whose output goes on with their input."""
        drawn = zip(self.tasks, self.weights(data), strict=False)
        return any(weight > 0 and TASKS[task].continues for task, weight in drawn)

    @property
    def has_head(self) -> bool:
        """True if the model predicts tokens, as all do but encoders whose states alone are used."""
        return not self.encoder_only or any(TASKS[task].on_encoder for task in self.tasks)

    @property
    def takes_records(self) -> bool:
        """True if a document is a row, with its columns, and not a text."""
        return self.columns is not None

    @property
    def weighs_tokens(self) -> bool:
        """True if the loss is no sum over the decoder's tokens: it needs a gradient for each token's."""
        return not self.encoder_only and any(TASKS[task].per_example for task in self.tasks)


# Forms of the inputs of fine-tuning: a row's fields in `input_template`, and a conversation.
TEMPLATES, CHAT = "templates", "chat template"


def columns_by_field(data: Any) -> dict[str, str]:
    """Return the columns that fill the templates, by the names of the templates' fields."""
    parts = template_parts(data.input_template) + template_parts(data.output_template)
    return {name: data.field_mapping.get(name, name) for _, name in parts if name is not None}


# Columns of conversations in the formats of OpenAI, which is the default of `messages_column`, and of ShareGPT.
_MESSAGES, _SHAREGPT = "messages", "conversations"


# Column of the system's turn beside a conversation, as LLaMA-Factory and ms-swift have it.
SYSTEM = "system"


def conversation_column(data: Any, existing: Container[str]) -> str | None:
    """Return the column of the conversation in a row with these columns; None for a row of the templates' fields."""
    if data.messages_column in existing:
        return str(data.messages_column)
    may_be_other = data.messages_column == _MESSAGES and _SHAREGPT in existing
    return _SHAREGPT if may_be_other and not all(one in existing for one in _filling(data, existing)) else None


def _filling(data: Any, existing: Container[str]) -> set[str]:
    return {name if name in existing else name.partition(".")[0] for name in columns_by_field(data).values()}


def _columns_of_records(data: Any, existing: Sequence[str]) -> Sequence[str]:
    filling, conversation = _filling(data, existing), conversation_column(data, existing)
    needs_all = data.converter is not None or not (filling <= {*existing} or conversation)
    read = {*filling, data.tools_column, data.weight_column, *((conversation, SYSTEM) if conversation else ())}
    return [name for name in existing if needs_all or name in read]


# The columns that data sets of preferences have, by what they hold, in the order in which they are looked for.
PREFERENCE_COLUMNS = {
    "prompt": ("prompt", "question", "instruction", "input", "conversations"),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
}


def preference_columns(data: Any, existing: Collection[str]) -> dict[str, str]:
    """Return the columns of `prompt`, `chosen` and `rejected` in a row with these columns; one that it lacks by its
    first name."""
    return {
        name: data.field_mapping.get(name) or next((one for one in names if one in existing), names[0])
        for name, names in PREFERENCE_COLUMNS.items()
    }


def _columns_of_preferences(data: Any, existing: Sequence[str]) -> Sequence[str]:
    named = preference_columns(data, existing)
    filling = {*named.values(), *columns_by_field(data).values()}
    heads = {name if name in existing else name.partition(".")[0] for name in filling}
    read = {*heads, *PREFERENCE_COLUMNS["prompt"], SYSTEM, data.tools_column, data.weight_column}
    needs_all = data.converter is not None or not {named["chosen"], named["rejected"]} <= {*existing}
    return [name for name in existing if needs_all or name in read]


# The columns that data sets of queries and texts have, by what they hold, in the order in which they are looked for.
TEXT_COLUMNS = {
    "query": ("query", "anchor", "question", "sentence1", "sent0", "text1"),
    "positive": (
        "positive",
        "pos",
        "positives",
        "positive_passages",
        "answer",
        "passage",
        "sentence2",
        "sent1",
        "text2",
    ),
    "negative": ("negative", "neg", "negatives", "negative_passages", "hard_neg", "sentence3"),
}


def text_columns(data: Any, existing: Collection[str]) -> dict[str, list[str]]:
    """Return the columns of `query`, `positive` and `negative` in a row with these columns: one, or those that its name
    has with numbers (`negative_1`, …); one that it lacks by its first name."""
    columns = {}
    for name, known in TEXT_COLUMNS.items():
        names = [data.field_mapping[name]] if name in data.field_mapping else known
        numbers = {
            one: sorted(
                int(found[2])
                for column in existing
                if (found := re.fullmatch(r"(.+)_(\d+)", column)) and found[1] == one
            )
            for one in names
        }
        chosen = next((one for one in names if one in existing or numbers[one]), names[0])
        columns[name] = [chosen] if chosen in existing else [f"{chosen}_{n}" for n in numbers[chosen]] or [chosen]
    return columns


def _needed_texts(data: Any, existing: Collection[str]) -> dict[str, str]:
    found = text_columns(data, existing)
    return {name: found[name][0] for name in found if name != "negative" or data.num_negatives}


def _columns_of_texts(data: Any, existing: Sequence[str]) -> Sequence[str]:
    read = {*chain(*text_columns(data, existing).values()), data.weight_column}
    heads = {name if name in existing else name.partition(".")[0] for name in filter(None, read)}
    needs_all = data.converter is not None or not {*_needed_texts(data, existing).values()} <= {*existing}
    return [name for name in existing if needs_all or name in heads]


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

# How rows are divided, whatever examples are made of them.
_ROW_SPLITS: dict[str, Any] = {
    "split_fields": ("train_split_ratio", "val_test_split_ratio"),
    "split_advice": "train_split_ratio < 1 and val_test_split_ratio > 0",
    "held_out": lambda data: (
        (1 - data.train_split_ratio) * data.val_test_split_ratio,
        (1 - data.train_split_ratio) * (1 - data.val_test_split_ratio),
    ),
}

# The fields that preferences read.
_PREFERRED = tuple(name for name in _RENDERED if name not in ("messages_column", "chat_targets"))

# The fields that texts for embeddings read.
_CONTRASTED = ("field_mapping", "converter", "weight_column", "query_prefix", "document_prefix", "num_negatives")

# How texts are divided.
_TEXT_SPLITS: dict[str, Any] = {
    "split_fields": ("eval_fraction",),
    "split_advice": "eval_fraction > 0",
    "held_out": lambda data: (data.eval_fraction, 0.0),
}

# The rows by the value of `data.objective`.
OBJECTIVES = {
    "ul2": Objective(
        maker="ds_encdec.data.examples.chunks:ChunkMaker.from_config",
        tasks=DENOISERS,
        weights=lambda data: data.ul2_task_weights,
        own_fields=("max_seq_length", "ul2_task_weights", "use_mode_tokens", "eval_fraction"),
        **_TEXT_SPLITS,
        expected_ratio=lambda data: expected_ratio(data.ul2_task_weights),
    ),
    "sft": Objective(
        maker="ds_encdec.data.examples.sft:PairMaker",
        tasks=("SFT",),
        weights=lambda _: (1.0,),
        own_fields=("objective", *_RENDERED, "on_long_row", "train_split_ratio", "val_test_split_ratio"),
        **_ROW_SPLITS,
        expected_ratio=lambda data: data.max_encoder_length / data.max_decoder_length,
        columns=_columns_of_records,
        needed=lambda data, existing: {} if conversation_column(data, existing) else columns_by_field(data),
        read_fields=_RENDERED,
    ),
    "dpo": Objective(
        maker="ds_encdec.data.examples.preferences:PreferenceMaker",
        tasks=("DPO",),
        weights=lambda _: (1.0,),
        own_fields=("objective", *_PREFERRED, "on_long_row", "train_split_ratio", "val_test_split_ratio"),
        **_ROW_SPLITS,
        expected_ratio=lambda data: data.max_encoder_length / data.max_decoder_length,
        columns=_columns_of_preferences,
        needed=lambda data, existing: {
            name: column for name, column in preference_columns(data, existing).items() if name != "prompt"
        },
        read_fields=_PREFERRED,
        losses="ds_encdec.objectives.preferences:PreferenceLosses",
        has_reference=True,
        figures=(
            "reward_chosen",
            "reward_rejected",
            "reward_margin",
            "reward_accuracy",
            "logp_chosen",
            "logp_rejected",
        ),
        segments=lambda _: 2,
    ),
    "contrastive": Objective(
        maker="ds_encdec.data.examples.contrastive:ContrastMaker",
        tasks=("CONTRASTIVE",),
        weights=lambda _: (1.0,),
        own_fields=("objective", *_CONTRASTED, "on_long_row", "train_split_ratio", "val_test_split_ratio"),
        **_ROW_SPLITS,
        expected_ratio=lambda _: 1.0,
        columns=_columns_of_texts,
        needed=_needed_texts,
        read_fields=_CONTRASTED,
        losses="ds_encdec.objectives.contrastive:ContrastiveLosses",
        figures=("retrieval_accuracy", "mrr"),
        segments=lambda data: 2 + data.num_negatives,
        encoder_only=True,
    ),
    "mntp": Objective(
        maker="ds_encdec.data.examples.mntp:MaskMaker.from_config",
        tasks=("MNTP",),
        weights=lambda _: (1.0,),
        own_fields=("objective", "max_seq_length", "mask_share", "eval_fraction"),
        **_TEXT_SPLITS,
        expected_ratio=lambda _: 1.0,
        encoder_only=True,
    ),
}
