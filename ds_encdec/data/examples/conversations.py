"""Conversations in a data set's rows: their turns with roles, and which of these are learnt.

Turns have `role` and `content`, or ShareGPT's `from` and `value`; those of weight 0 are read, but never learnt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.config.row_values import as_text, present

TURN_WEIGHTS = ("weight", "train", "trainable", "training", "loss", "loss_scale")
"""The fields in which data sets (of OpenAI, axolotl, ms-swift) mark whether a turn is learnt."""

_OTHER_MASKS = ("train_detail", "training_detail", "loss_mask", "mask", "masked")
"""Fields that mark it in another way: for parts of a turn, or for those that are not learnt."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}
"""The role of each speaker in ShareGPT's form."""

_WEIGHTS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True, "": True, "none": True}
"""Written weights, and whether they mean "learnt"; no weight does."""


class UnusableError(ValueError):
    """An example cannot be made of a record; the message gives the reason."""


def is_learnt(weight: Any, what: str) -> bool:
    """Return whether an item of this weight (null: no weight) is learnt. Raises `UnusableError` naming `what`."""
    written = str(weight).strip().lower()
    if written not in _WEIGHTS:
        raise UnusableError(f"{what} is {weight!r:.80}; needed is 0 (not learnt) or 1")
    return _WEIGHTS[written]


def read_turn(message: Any) -> tuple[dict[str, Any], bool]:
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
            "its messages are no objects with a role each; needed are `role` and `content`, or ShareGPT's `from` and "
            "`value`"
        )
    if isinstance(turn.get("content"), int | float):
        turn["content"] = as_text(turn["content"])
    return turn, all(weights)


def read_conversation(messages: Sequence[Any], system: Any) -> list[tuple[dict[str, Any], bool]]:
    """Return all turns, the row's `system` first. Raises `UnusableError`, also if they have another system turn."""
    turns = [read_turn(message) for message in messages]
    if present(system) is None or system == "":
        return turns
    if not isinstance(system, str):
        raise UnusableError(f"its system is of type {type(system).__name__}; needed is text")
    own = next((turn.get("content") for turn, _ in turns[:1] if turn["role"] == "system"), None)
    if own is not None and own != system:
        raise UnusableError("its field `system` and the system turn of its conversation differ; remove one of them")
    return turns if own is not None else [({"role": "system", "content": system}, True), *turns]


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
