"""Conversations in a data set's rows: their turns, which of these are learnt, and their text by a chat template.

Turns have `role` and `content`, or ShareGPT's `from` and `value`; those of weight 0 are read, but never learnt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_encdec.config.row_values import as_text, present

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The fields in which data sets (of OpenAI, axolotl, ms-swift) mark whether a turn is learnt.
TURN_WEIGHTS = ("weight", "train", "trainable", "training", "loss", "loss_scale")
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


def is_learnt(weight: Any, what: str) -> bool:
    """Return whether an item of this weight (null: no weight) is learnt. Raises `UnusableError` naming `what`."""
    written = str(weight).strip().lower()
    if written not in _WEIGHTS:
        raise UnusableError(f"{what} is {weight!r:.80}, and must be 0 (not learnt) or 1")
    return _WEIGHTS[written]


def as_list(value: Any, name: str) -> list[Any]:
    """Return a list, or the list that a text holds as JSON. Raises `UnusableError` naming `name`."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"its {name} are not JSON ({error})") from error
    if not isinstance(items, list):
        raise UnusableError(f"its {name} are of type {type(items).__name__}, and must be a list")
    return items


def read_conversation(messages: list[Any], system: Any) -> list[tuple[dict[str, Any], bool]]:
    """Return all turns, the row's `system` first, and whether each is learnt. Raises `UnusableError`."""
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
    """Return a turn with a `role`, without weights and empty fields, and whether it is learnt."""
    # Tables fill in null if a message lacks a field.
    fields = message.items() if isinstance(message, Mapping) else ()
    turn = {name: value for name, part in fields if (value := present(part)) is not None}
    if masks := [name for name in _OTHER_MASKS if name in turn]:
        raise UnusableError(f"a turn has `{masks[0]}`, which is not read; write `weight` 0 (not learnt) or 1")
    weights = [is_learnt(turn.pop(name), f"`{name}` of a turn") for name in TURN_WEIGHTS if name in turn]
    if "role" not in turn and {"from", "value"} <= turn.keys():
        turn = _from_sharegpt(str(turn["from"]), turn["value"])
    if "role" not in turn:
        raise UnusableError(
            "its messages are not objects with roles; give each `role` and `content`, or ShareGPT's `from` and `value`"
        )
    if isinstance(turn.get("content"), int | float):
        turn["content"] = as_text(turn["content"])
    return turn, all(weights)


def _from_sharegpt(speaker: str, content: Any) -> dict[str, Any]:
    role = _ROLES.get(speaker.lower())
    if role is None:
        raise UnusableError(f"a turn is from {speaker!r:.80}; known are {', '.join(_ROLES)}")
    if speaker.lower() == "function_call":
        try:
            call = json.loads(content)
        except (TypeError, ValueError):
            call = None
        if isinstance(call, dict) and "name" in call:
            return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": content}
