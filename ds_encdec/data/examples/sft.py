"""Examples for fine-tuning: a record of a data set becomes an input text and an output text, both tokenized.

Two templates are filled from a record, or its messages go through the tokenizer's chat template. The encoder reads the
input, without EOS; the decoder's target is the output and EOS. Special tokens in a template become special ids, but in
a field or a message they are ordinary text: `_MARK` breaks them before the template is filled in, and is removed after
the search for special tokens. The text between these is tokenized as a whole, like a user's at inference.
"""

# ruff: noqa: D102  (protocol.ExampleMaker documents the methods)

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_encdec.base.plugins import converter_digest, load_plugin
from ds_encdec.base.types import ConfigError, DataError, Document, Example
from ds_encdec.config.row_values import as_text, field_value, not_unicode, present
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.examples.conversations import UnusableError, is_learnt, read_conversation
from ds_encdec.data.examples.protocol import ALL, Made
from ds_encdec.data.sources.sources import BadRow
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.registry.objectives import CHAT, SYSTEM, TEMPLATES, columns_by_field, conversation_column, template_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ds_encdec.tokenizer.sentinels import Vocabulary

Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Input and output of an example, int32 each; the output ends with EOS."""

_MARK = "\U000f0000"
"""A private-use character: it follows the first character of a special token that a user has written."""

_TASK = "SFT"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat templates of a tokenizer by their names, and the special tokens that they may use."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate | None:
        """Return the chat templates of `tokenizer`, or None if it has none."""
        chat_template: Any = tokenizer.chat_template
        templates = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
        return cls(templates, dict(tokenizer.special_tokens_map)) if chat_template else None

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


@dataclass(frozen=True)
class PairMaker:
    """The `ExampleMaker` of fine-tuning."""

    tokenize: TextTokenizer
    vocabulary: Vocabulary
    data: DataConfig
    special_ids: Mapping[str, int]  # of the tokenizer's special tokens
    chat: ChatTemplate | None

    @classmethod
    def from_config(
        cls, data: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
    ) -> PairMaker:
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder().items()
        # A single character cannot be broken up, so it is always ordinary text.
        specials = {token.content: number for number, token in added if token.special and len(token.content) > 1}
        if data.converter is not None:
            converter_digest(data.converter)
        return cls(TextTokenizer(backend), vocabulary, data, specials, ChatTemplate.of(tokenizer))

    @property
    def why_empty(self) -> str:
        data = self.data
        made_nothing = "" if data.converter is None else ", made into nothing by data.converter"
        return (
            f"held out, not readable, of weight 0{made_nothing}, or above "
            f"data.max_encoder_length={data.max_encoder_length} or "
            f"data.max_decoder_length={data.max_decoder_length} with data.on_long_row={data.on_long_row}. Check these "
            "and data.train_split_ratio"
        )

    def read(self, document: Document) -> Sequence[Pair] | BadRow:
        """Return the pairs of a record, or a bad row. Raises ConfigError for a conversation without a chat template."""
        if document.token_ids is not None or document.record is None:
            return document.token_ids or ()
        try:
            texts = [pair for record in self._converted(document.record) for pair in self._texts(record)]
        except UnusableError as error:
            return BadRow(document.key, f"{document.key}: {error}")
        if broken := next(filter(None, map(not_unicode, chain.from_iterable(texts))), None):
            return BadRow(document.key, f"{document.key}: {broken}")
        eos = self.vocabulary.eos_id
        pairs = [(self._encode(source), self._encode(target)) for source, target in texts]
        return [
            (source, target if len(target) and target[-1] == eos else np.append(target, np.int32(eos)))
            for source, target in pairs
        ]

    def form(self, document: Document) -> str | None:
        if document.record is None:
            return None
        is_chat = any(self._messages(record)[1] is not None for record in self._converted(document.record))
        return CHAT if is_chat else TEMPLATES

    def size(self, ids: Sequence[Pair]) -> int:
        return sum(len(source) + len(target) for source, target in ids)

    def ratio(self, read: Sequence[Sequence[Pair]]) -> float:
        """Return the input tokens per output token, long ones counted up to their maximum."""
        most = (self.data.max_encoder_length, self.data.max_decoder_length)
        source, target = (
            sum(min(len(pair[side]), most[side]) for pairs in read for pair in pairs) for side in range(len(most))
        )
        return source / target

    def examples(self, ids: Sequence[Pair], document: str, epoch: int, wanted: Container[int] = ALL) -> Iterator[Made]:
        """Yield an example of each pair. Raises DataError for a long one if `data.on_long_row` is "stop"."""
        longest, longest_target = self.data.max_encoder_length, self.data.max_decoder_length
        for number, (source, target) in enumerate(ids):
            if number not in wanted:
                continue
            is_long = len(source) > longest or len(target) > longest_target
            if is_long and self.data.on_long_row == "stop":
                input_problem = f"the input has {len(source)} tokens, above data.max_encoder_length={longest}"
                output_problem = (
                    f"the output has {len(target)}, EOS included, above data.max_decoder_length={longest_target}"
                )
                problems = [input_problem] * (len(source) > longest) + [output_problem] * (len(target) > longest_target)
                way_out = "Raise that, or set data.on_long_row=skip or truncate"
                raise DataError(f"{document}: {'; '.join(problems)}. {way_out}")
            is_kept = not is_long or self.data.on_long_row == "truncate"
            example = Example(source[:longest], target[:longest_target], _TASK, document) if is_kept else None
            yield Made(number, example, number + 1 == len(ids), is_long)

    def of_evaluation(self) -> PairMaker:
        return self

    def checked(self, ids: Sequence[Pair], document: str) -> Iterator[tuple[str, bool]]:
        """Yield for each pair whether its input is not empty, and its output has tokens before EOS."""
        for source, target in ids:
            yield _TASK, len(source) > 0 and len(target) > 1 and target[-1] == self.vocabulary.eos_id

    def facts(self) -> dict[str, Any]:
        digests = {}
        if self.chat is not None:
            digests["chat template"] = hashlib.sha256(repr(self.chat.templates).encode()).hexdigest()[:12]
        if self.data.converter is not None:
            digests["converter"] = converter_digest(self.data.converter)
        return digests

    @cached_property
    def _templates(self) -> list[list[tuple[str, str | None]]]:
        return [template_parts(template) for template in (self.data.input_template, self.data.output_template)]

    @cached_property
    def _weight_column(self) -> str | None:
        """Return the column of the rows' weights; None if a template uses it, as an ordinary column then."""
        is_field = self.data.weight_column in columns_by_field(self.data).values()
        return None if is_field else self.data.weight_column

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(tokens) or '(?!)'})")

    @cached_property
    def _ending(self) -> re.Pattern[str]:
        token = self._special.pattern
        return re.compile(rf"{token}(?:\s*{token})*\s*\Z")

    @cached_property
    def _broken(self) -> re.Pattern[str]:
        tokens = (re.escape(token[0] + _MARK + token[1:]) for token in self.special_ids)
        return re.compile("|".join(tokens) or "(?!)")

    @cached_property
    def _convert(self) -> Callable[[dict[str, Any]], Any]:
        convert: Callable[[dict[str, Any]], Any] = load_plugin("data.converter", str(self.data.converter))
        return convert

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def _encode(self, text: str) -> np.ndarray:
        """Return the ids of a text in which special tokens that users wrote are broken up, int32 [n]."""
        pieces = self._special.split(text)
        ids = [np.empty(0, dtype=np.int32)]
        for number, piece in enumerate(pieces):
            if number % 2:
                ids.append(np.array([self.special_ids[piece]], dtype=np.int32))
            elif piece:
                ids.append(self.tokenize.encode(self._broken.sub(lambda match: match[0].replace(_MARK, "", 1), piece)))
        return np.concatenate(ids)

    def _break(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._break(inner) for name, inner in value.items()}
        return [self._break(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _converted(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if self.data.converter is None:
            return [record]
        named = f"data.converter={self.data.converter}"
        try:
            made = self._convert(dict(record))
        except Exception as error:
            raise UnusableError(f"{named} raised {type(error).__name__}: {error}") from error
        made = made if isinstance(made, list) else [made]
        for one in made:
            if not isinstance(one, dict):
                raise UnusableError(f"{named} returned {type(one).__name__}; needed is a dict, or a list of dicts")
        return made

    def _texts(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield inputs and outputs of a record; none if its weight is 0."""
        weight = None if self._weight_column is None else present(record.get(self._weight_column))
        if weight is not None and not self._is_learnt(weight):
            return
        column, messages = self._messages(record)
        if messages is None:
            source, target = (self._filled(parts, record) for parts in self._templates)
            fields = [self._value(record, name) for _, name in self._templates[1] if name is not None]
            yield _not_empty(source, target if any(field.strip() for field in fields) else "")
        elif self.chat is None:
            raise ConfigError(
                f"data.messages_column={column}: the rows are conversations, and the tokenizer has "
                "no chat template. Name one that has (model.tokenizer_name_or_path), or another column for rows of "
                "fields"
            )
        else:
            yield from self._turns(self.chat, _list(messages, "messages"), record)

    def _messages(self, record: Mapping[str, Any]) -> tuple[str | None, Any]:
        column = conversation_column(self.data, record)
        return column, None if column is None else present(record.get(column))

    def _is_learnt(self, weight: Any) -> bool:
        try:
            return is_learnt(weight, f"its {self._weight_column}")
        except UnusableError as error:
            raise UnusableError(
                f"{error}. Where that column is no weight in training, set data.weight_column=null"
            ) from error

    def _filled(self, parts: list[tuple[str, str | None]], record: Mapping[str, Any]) -> str:
        return "".join(
            literal + ("" if name is None else self._break(self._value(record, name))) for literal, name in parts
        )

    def _value(self, record: Mapping[str, Any], name: str) -> str:
        column = self.data.field_mapping.get(name, name)
        value = field_value(record, column)
        if value is None:
            meant = f"{{{name}}}" if name == column else f"{{{name}}} (data.field_mapping: {column})"
            is_there = column.partition(".")[0] in record
            way_out = f"; set data.field_mapping.{name}=COLUMN, or name another field in the template"
            raise UnusableError(
                f"there is nothing in its field {meant}, which a template asks for; it has {', '.join(record):.300}"
                + ("" if is_there else way_out)
            )
        try:
            return as_text(value)
        except TypeError as error:
            raise UnusableError(f"its field {column} is of type {error}; needed is text or a number") from error
        except ValueError as error:  # more digits than Python writes
            raise UnusableError(f"its field {column} cannot be written as text ({error})") from error

    def _turns(self, chat: ChatTemplate, messages: list[Any], record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the learnt turns of the assistant (or the last) with prompts; first or empty ones only if alone."""
        tools = record.get(self.data.tools_column)
        tools = None if tools is None else self._break(_list(tools, "tools"))
        read = read_conversation(self._break(messages), self._break(record.get(SYSTEM)))
        conversation, learnt = zip(*read, strict=True) if read else ((), ())
        turns = [number for number, message in enumerate(conversation) if message["role"] == "assistant"]
        if not turns:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in conversation)) or "there are none"
            raise UnusableError(f"its messages have no turn of the assistant (role: {roles:.100})")
        turns = [turn for turn in turns if learnt[turn]]
        if not turns:
            return
        pairs = []
        for number in [turn for turn in turns if turn] or turns if self.data.chat_targets == "every" else turns[-1:]:
            prompt = chat.render([*conversation[:number]], tools or None, is_prompt=True)
            whole = chat.render([*conversation[: number + 1]], tools or None, is_prompt=False)
            content = conversation[number].get("content")
            target = whole.removeprefix(prompt) if whole.startswith(prompt) else content
            pairs.append((prompt, self._ending.sub("", target) if isinstance(target, str) else ""))
        yield from [pair for pair in pairs if pair[0] and pair[1].strip()] or [_not_empty(*pairs[-1])]


def _not_empty(source: str, target: str) -> tuple[str, str]:
    if not source or not target.strip():
        raise UnusableError(f"its {'output' if source else 'input'} is empty")
    return source, target


def _list(value: Any, name: str) -> list[Any]:
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"its {name} are no JSON ({error})") from error
    if not isinstance(items, list):
        raise UnusableError(f"its {name} are of type {type(items).__name__}; needed is a list")
    return items
