"""Examples for fine-tuning: a record of a data set becomes an input text and an output text, both tokenized. Makers of
other examples of records (preferences.py) share all of it, and have more outputs.

Two templates are filled from a record, or its messages go through the tokenizer's chat template. The encoder reads the
input, without EOS; the decoder's target is the output and EOS. Special tokens in a template become special ids, but in
a field or a message they are ordinary text: `_MARK` breaks them before the template is filled in, and is removed after
the search for special tokens. The text between these is tokenized as a whole, like a user's at inference.

Turns of a conversation have `role` and `content`, or ShareGPT's `from` and `value`. Those of weight 0 are read, but
never learnt.
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_encdec.base.plugins import converter_digest, load_plugin
from ds_encdec.base.types import ConfigError, DataError, Document, Example
from ds_encdec.config.file_rows import as_text, field_value, not_unicode, present
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.protocol import ALL, ExampleMaker, Made
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.registry.objectives import CHAT, SYSTEM, TEMPLATES, columns_by_field, conversation_column, template_parts
from ds_encdec.tokenizer.sentinels import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The input and the outputs of an example, int32 each; an output ends with EOS.
Sides: TypeAlias = Sequence[np.ndarray]

# A private-use character: it follows the first character of a special token that a user has written.
_MARK = "\U000f0000"

# The fields in which data sets (of OpenAI, axolotl, ms-swift) mark whether a turn is learnt.
_TURN_WEIGHTS = ("weight", "train", "trainable", "training", "loss", "loss_scale")
# Fields that mark it in another way: for parts of a turn, or for those that are not learnt.
_OTHER_MASKS = ("train_detail", "training_detail", "loss_mask", "mask", "masked")
# The role of each speaker in ShareGPT's form.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}
# Written weights, and whether they mean "learnt"; no weight does.
_WEIGHTS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True, "": True, "none": True}


class UnusableError(ValueError):
    """An example cannot be made of a record; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat templates of a tokenizer by their names, and the special tokens that they may use."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate | None:
        """Return the chat templates of `tokenizer`, or None if it has none."""
        found: Any = tokenizer.chat_template
        templates = found if isinstance(found, dict) else {"default": found}
        return cls(templates, dict(tokenizer.special_tokens_map)) if found else None

    def render(self, messages: list[Any], tools: list[Any] | None, *, is_prompt: bool) -> str:
        """Return the conversation as text; `is_prompt`: the assistant's turn is begun. Raises `UnusableError`."""
        # Imported here: it takes half a second, and most runs have no chat rows.
        from transformers.utils.chat_template_utils import render_jinja_template

        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        template = self.templates.get(name) or next(iter(self.templates.values()))
        try:
            (text,), _ = render_jinja_template(
                [messages], tools=tools, chat_template=template, add_generation_prompt=is_prompt, **self.special_tokens
            )
        except Exception as error:  # jinja's, or any error in the template's expressions
            raise UnusableError(f"the chat template fails ({type(error).__name__}: {error})") from error
        return text


class PairMaker(ExampleMaker):
    """The `ExampleMaker` of fine-tuning. Raises ConfigError for a converter that cannot be imported."""

    tokenize: TextTokenizer
    pieces = 2
    task = "SFT"

    def __init__(
        self, data: DataConfig, _seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
    ) -> None:
        self.data, self.vocabulary = data, vocabulary
        self.tokenize = TextTokenizer(tokenizer.backend_tokenizer)
        self.chat = ChatTemplate.of(tokenizer)
        self._facts = {} if data.converter is None else {"converter": converter_digest(data.converter)}
        if self.chat is not None:
            self._facts["chat template"] = hashlib.sha256(repr(self.chat.templates).encode()).hexdigest()[:12]
        self._templates = [template_parts(template) for template in (data.input_template, data.output_template)]
        # A weight in a template is an ordinary column.
        self._weight_column = None if data.weight_column in columns_by_field(data).values() else data.weight_column
        # A single character cannot be broken up, so it is always ordinary text.
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        self._specials = {token.content: number for number, token in added if token.special and len(token.content) > 1}
        longest_first = sorted(map(re.escape, self._specials), key=len, reverse=True)
        token = f"({'|'.join(longest_first) or '(?!)'})"
        broken = (re.escape(token[0] + _MARK + token[1:]) for token in self._specials)
        self._special, self._broken = re.compile(token), re.compile("|".join(broken) or "(?!)")
        self._ending = re.compile(rf"{token}(?:\s*{token})*\s*\Z")

    @property
    def why_empty(self) -> str:
        data = self.data
        return (
            "held out, not readable, of weight 0"
            f"{'' if data.converter is None else ', made into nothing by data.converter'}, or above "
            f"data.max_encoder_length={data.max_encoder_length} or "
            f"data.max_decoder_length={data.max_decoder_length} with data.on_long_row={data.on_long_row}. Check these "
            "and data.train_split_ratio"
        )

    def read(self, document: Document) -> Sequence[Sides] | BadRow:
        """Return the examples of a record, or a bad row. Raises ConfigError for messages without a chat template."""
        if document.token_ids is not None or document.record is None:
            return document.token_ids or ()
        try:
            texts = [sides for record in self._converted(document.record) for sides in self._texts(record)]
        except UnusableError as error:
            return BadRow(document.key, f"{document.key}: {error}")
        if broken := next(filter(None, map(not_unicode, chain.from_iterable(texts))), None):
            return BadRow(document.key, f"{document.key}: {broken}")
        return [(self._begun(self._encode(source)), *map(self._ended, targets)) for source, *targets in texts]

    def form(self, document: Document) -> str | None:
        if document.record is None:
            return None
        is_chat = any(self._messages(record)[1] is not None for record in self._converted(document.record))
        return CHAT if is_chat else TEMPLATES

    def size(self, ids: Sequence[Sides]) -> int:
        return sum(len(source) * len(targets) + sum(map(len, targets)) for source, *targets in ids)

    def ratio(self, read: Sequence[Sequence[Sides]]) -> float:
        longest, longest_target = self.data.max_encoder_length, self.data.max_decoder_length
        made = [sides for ids in read for sides in ids]
        encoder_tokens = sum(min(len(source), longest) * len(targets) for source, *targets in made)
        return encoder_tokens / sum(min(len(target), longest_target) for _, *targets in made for target in targets)

    def examples(self, ids: Sequence[Sides], document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        longest, longest_target = self.data.max_encoder_length, self.data.max_decoder_length
        for number, (source, *targets) in enumerate(ids):
            if number not in wanted:
                continue
            problems = []
            if len(source) > longest:
                problems.append(f"the input has {len(source)} tokens, above data.max_encoder_length={longest}")
            if (length := max(map(len, targets))) > longest_target:
                problems.append(
                    f"the output has {length}, EOS included, above data.max_decoder_length={longest_target}"
                )
            if problems and self.data.on_long_row == "stop":
                fix = "Raise that, or set data.on_long_row=skip or truncate"
                raise DataError(f"{document}: {'; '.join(problems)}. {fix}")
            kept = [(source[:longest], target[:longest_target]) for target in targets]
            is_kept = not problems or (self.data.on_long_row == "truncate" and self._teaches(kept))
            example = Example(*kept[0], self.task, document, tuple(kept[1:])) if is_kept else None
            yield Made(number, example, number + 1 == len(ids), bool(problems))

    def _teaches(self, cut: Sequence[Sides]) -> bool:
        """Return whether something can be learnt from the inputs and outputs of an example that were cut off."""
        return True

    def checked(self, ids: Sequence[Sides], document: str) -> Iterator[tuple[str, bool]]:
        empty = len(self.vocabulary.beginning())
        for source, *targets in ids:
            ends = all(len(target) > 1 and target[-1] == self.vocabulary.eos_id for target in targets)
            yield self.task, len(source) > empty and ends

    def facts(self) -> dict[str, Any]:
        return self._facts

    def _encode(self, marked: str) -> np.ndarray:
        """Return the ids of a text in which special tokens that users wrote are broken up, int32 [n]."""
        ids = [np.empty(0, dtype=np.int32)]
        for number, piece in enumerate(self._special.split(marked)):
            if number % 2:
                ids.append(np.array([self._specials[piece]], dtype=np.int32))
            elif piece:
                ids.append(self.tokenize.encode(self._broken.sub(lambda match: match[0].replace(_MARK, "", 1), piece)))
        return np.concatenate(ids)

    def _begun(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of an input with BOS before them where texts begin with it; a chat template may write one."""
        beginning = np.array(self.vocabulary.beginning(), dtype=np.int32)
        return ids if np.array_equal(ids[: len(beginning)], beginning) else np.concatenate([beginning, ids])

    def _ended(self, target: str) -> np.ndarray:
        ids, eos = self._encode(target), self.vocabulary.eos_id
        return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))

    def _break(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._break(inner) for name, inner in value.items()}
        return [self._break(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _converted(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if self.data.converter is None:
            return [record]
        convert = load_plugin("data.converter", self.data.converter)
        named = f"data.converter={self.data.converter}"
        try:
            made = convert(dict(record))
        except Exception as error:
            raise UnusableError(f"{named} raised {type(error).__name__}: {error}") from error
        made = made if isinstance(made, list) else [made]
        if wrong := [type(one).__name__ for one in made if not isinstance(one, dict)]:
            raise UnusableError(f"{named} returned {wrong[0]}, and must return a dict or a list of dicts")
        return made

    def _texts(self, record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        weight = None if self._weight_column is None else present(record.get(self._weight_column))
        try:
            if weight is not None and not _is_learnt(weight, f"its {self._weight_column}"):
                return
        except UnusableError as error:
            raise UnusableError(f"{error}. If that column is not a weight, set data.weight_column=null") from error
        yield from self._sides(record)

    def _sides(self, record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        """Yield the input and the outputs of each example of a record, in which special tokens are marked."""
        column, messages = self._messages(record)
        if messages is None:
            (source, _), (target, has_text) = self._filled(record)
            yield _not_empty(source, target if has_text else "")
        else:
            yield from self._turns(self._chat_of(f"data.messages_column={column}"), messages, record)

    def _filled(self, record: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the text of each template, and whether any of its fields is more than blanks."""
        filled = []
        for parts in self._templates:
            values = [(literal, "" if name is None else self._value(record, name)) for literal, name in parts]
            text = "".join(literal + self._break(value) for literal, value in values)
            filled.append((text, any(value.strip() for _, value in values)))
        return filled

    def _chat_of(self, field: str) -> ChatTemplate:
        if self.chat is None:
            raise ConfigError(
                f"{field}: the rows are conversations, and the tokenizer has no chat template. "
                "Name one that has (model.tokenizer_name_or_path), or another column for rows of fields"
            )
        return self.chat

    def _messages(self, record: Mapping[str, Any]) -> tuple[str | None, Any]:
        column = conversation_column(self.data, record)
        return column, None if column is None else present(record.get(column))

    def _value(self, record: Mapping[str, Any], name: str) -> str:
        column = self.data.field_mapping.get(name, name)
        value = field_value(record, column)
        if value is None:
            meant = f"{{{name}}}" if name == column else f"{{{name}}} (data.field_mapping: {column})"
            way_out = f"; set data.field_mapping.{name}=COLUMN, or name another field in the template"
            raise UnusableError(
                f"its field {meant} has no value, and a template uses it; it has {', '.join(record):.300}"
                + ("" if column.partition(".")[0] in record else way_out)
            )
        try:
            return as_text(value)
        except TypeError as error:
            raise UnusableError(f"its field {column} is of type {error}, and must be text or a number") from error
        except ValueError as error:  # more digits than Python writes
            raise UnusableError(f"its field {column} cannot be written as text ({error})") from error

    def _turns(self, chat: ChatTemplate, messages: Any, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the learnt turns of the assistant (or the last) with prompts; first or empty ones only if alone."""
        read = self._conversation(messages, record)
        conversation = [turn for turn, _ in read]
        turns = [number for number, turn in enumerate(conversation) if turn["role"] == "assistant"]
        if not turns:
            roles = ", ".join(dict.fromkeys(str(turn["role"]) for turn in conversation)) or "the list is empty"
            raise UnusableError(f"its messages have no turn of the assistant (role: {roles:.100})")
        turns = [number for number in turns if read[number][1]]
        if not turns:
            return
        pairs = []
        for number in [turn for turn in turns if turn] or turns if self.data.chat_targets == "every" else turns[-1:]:
            pairs.append(self._rendered(chat, conversation[: number + 1], record))
        yield from [pair for pair in pairs if pair[0] and pair[1].strip()] or [_not_empty(*pairs[-1])]

    def _conversation(self, messages: Any, record: Mapping[str, Any]) -> list[tuple[dict[str, Any], bool]]:
        """Return the turns with the row's system turn before them, and whether each is learnt."""
        return _read_conversation(self._break(_as_list(messages, "messages")), self._break(record.get(SYSTEM)))

    def _rendered(
        self, chat: ChatTemplate, conversation: list[dict[str, Any]], record: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Return the prompt before the last turn, and that turn without special tokens at its end."""
        tools = record.get(self.data.tools_column)
        tools = None if tools is None else self._break(_as_list(tools, "tools"))
        prompt = chat.render(conversation[:-1], tools or None, is_prompt=True)
        whole = chat.render(conversation, tools or None, is_prompt=False)
        target = whole.removeprefix(prompt) if whole.startswith(prompt) else conversation[-1].get("content")
        return prompt, self._ending.sub("", target) if isinstance(target, str) else ""


def _not_empty(source: str, target: str) -> tuple[str, str]:
    if not source or not target.strip():
        raise UnusableError(f"its {'output' if source else 'input'} is empty")
    return source, target


def _is_learnt(weight: Any, what: str) -> bool:
    written = str(weight).strip().lower()
    if written not in _WEIGHTS:
        raise UnusableError(f"{what} is {weight!r:.80}, and must be 0 (not learnt) or 1")
    return _WEIGHTS[written]


def _as_list(value: Any, name: str) -> list[Any]:
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"its {name} are not JSON ({error})") from error
    if not isinstance(items, list):
        raise UnusableError(f"its {name} are of type {type(items).__name__}, and must be a list")
    return items


def _read_conversation(messages: list[Any], system: Any) -> list[tuple[dict[str, Any], bool]]:
    turns = [_read_turn(message) for message in messages]
    if present(system) is None or system == "":
        return turns
    if not isinstance(system, str):
        raise UnusableError(f"its system is of type {type(system).__name__}, and must be text")
    own = next((turn.get("content") for turn, _ in turns[:1] if turn["role"] == "system"), None)
    if own is not None and own != system:
        raise UnusableError("its field `system` and the system turn of its conversation differ; remove one of them")
    return turns if own is not None else [({"role": "system", "content": system}, True), *turns]


def _read_turn(message: Any) -> tuple[dict[str, Any], bool]:
    # Tables fill in null if a message lacks a field.
    fields = message.items() if isinstance(message, Mapping) else ()
    turn = {name: value for name, part in fields if (value := present(part)) is not None}
    if masks := [name for name in _OTHER_MASKS if name in turn]:
        raise UnusableError(f"a turn has `{masks[0]}`, which is not read; write `weight` 0 (not learnt) or 1")
    weights = [_is_learnt(turn.pop(name), f"`{name}` of a turn") for name in _TURN_WEIGHTS if name in turn]
    if "role" not in turn and {"from", "value"} <= turn.keys():
        speaker, content = str(turn["from"]).lower(), turn["value"]
        if speaker not in _ROLES:
            raise UnusableError(f"a turn is from {turn['from']!r:.80}; known are {', '.join(_ROLES)}")
        turn = {"role": _ROLES[speaker], "content": content}
        if speaker == "function_call":
            with suppress(TypeError, ValueError):
                call = json.loads(content)
                if isinstance(call, dict) and "name" in call:
                    turn |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    if "role" not in turn:
        raise UnusableError(
            "its messages are not objects with roles; give each `role` and `content`, or ShareGPT's `from` and `value`"
        )
    if isinstance(turn.get("content"), int | float):
        turn["content"] = as_text(turn["content"])
    return turn, all(weights)
