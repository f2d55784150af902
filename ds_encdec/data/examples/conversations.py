"""Conversations as data sets write them: the turns of a row with their roles, and which of them are to be learnt.

Turns are objects with `role` and `content`, or ShareGPT's with `from` and `value`. A turn or a row may have a weight of
0 or 1. With 0 it is never learnt; a turn is still read by the model. A row's `system` is its first turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.config.row_values import as_text, present

TURN_WEIGHTS = ("weight", "train", "trainable", "training", "loss", "loss_scale")
"""The names under which data sets (of OpenAI, axolotl, ms-swift) say of a turn whether it is learnt."""

_OTHER_MASKS = ("train_detail", "training_detail", "loss_mask", "mask", "masked")
"""Fields that say it in another way: of parts of a turn, or of those that are not learnt."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}
"""The role of each speaker in ShareGPT's form."""

_WEIGHTS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True, "": True, "none": True}
"""A weight as it is written, and if what has it is learnt; what has none is."""


class UnusableError(ValueError):
    """An example cannot be made of a record; the message says why."""


def is_learnt(weight: Any, what: str) -> bool:
    """Return whether something of this weight, null for none, is learnt. Raises `UnusableError` naming `what`."""
    written = str(weight).strip().lower()
    if written not in _WEIGHTS:
        raise UnusableError(f"{what} is {weight!r:.80}; needed is 0 (not learnt) or 1")
    return _WEIGHTS[written]


def read_turn(message: Any) -> tuple[dict[str, Any], bool]:
    """A turn with a `role`, without weights and fields that hold nothing, and whether it is learnt.

    Raises `UnusableError`.
    """
    # Tables fill in null where a message has no such field.
    fields = message.items() if isinstance(message, Mapping) else ()
    turn = {name: held for name, part in fields if (held := present(part)) is not None}
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
    """The turns of `messages` as `read_turn` gives them, behind one of the row's `system`, null or empty for none.

    Raises `UnusableError`, also where both have a system turn and these differ.
    """
    turns = [read_turn(message) for message in messages]
    if present(system) is None or system == "":
        return turns
    if not isinstance(system, str):
        raise UnusableError(f"its system is of type {type(system).__name__}; needed is text")
    own = next((turn.get("content") for turn, _ in turns[:1] if turn["role"] == "system"), None)
    if own is not None and own != system:
        raise UnusableError("its field `system` and the system turn of its conversation differ; remove one of them")
    return turns if own is not None else [({"role": "system", "content": system}, True), *turns]


def _from_sharegpt(speaker: str, said: Any) -> dict[str, Any]:
    role = _ROLES.get(speaker.lower())
    if role is None:
        raise UnusableError(f"a turn is from {speaker!r:.80}; known are {', '.join(_ROLES)}")
    if speaker.lower() == "function_call":
        try:
            call = json.loads(said)
        except (TypeError, ValueError):
            call = None
        if isinstance(call, dict) and "name" in call:
            return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": said}
