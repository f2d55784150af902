"""`ds-encdec generate`: one text, whose sentinels an exported model fills, or which it continues."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import TextStreamer

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.data.examples.sft import ChatTemplate
from ds_encdec.evaluate.generation import generate_batch, text_of
from ds_encdec.evaluate.models import Inputs, open_model, open_tokenizer, require_ours, taught_inputs
from ds_encdec.launch.process_group import choose_device
from ds_encdec.launch.world import discover
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.objectives import template_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SENTINEL = re.compile(r"<extra_id_\d+>")


def generate_text(
    folder: Path, text: str, settings: GenerationSettings, *, raw: bool = False, stream: bool = False
) -> str | None:
    """`text` with its sentinels (`<extra_id_0>`…) filled in; or, if it has none, `text` and its continuation.

    `folder`: an exported one or one of `ds-encdec init-model`. A sentinel that the model does not answer stays in the
    text. What is filled in has blanks for its runs of white space, and a continuation has no sentinels and one empty
    line at most where there are several; standard error says where this changed anything. `raw`: what the model writes,
    and nothing else, as is always shown of a fine-tuned one. What a model of conversations reads is `text` as the
    user's turn of its chat template, unless `raw`; standard error says so, and where the input is not of the form that
    another one was trained on. `stream`: print that while it is made; None where there is nothing more to show. Raises
    CheckpointError for a folder that is not such a model.
    """
    require_ours(folder)
    tokenizer = open_tokenizer(folder)
    if (taught := taught_inputs(folder)) is not None:
        text, note = _as_taught(text, taught, tokenizer, is_raw=raw)
        raw = True
        if note:
            print(note, file=sys.stderr)
    model = open_model(folder, choose_device("auto", discover(os.environ)))
    continues = not raw and not _SENTINEL.search(text)
    if stream and continues:
        print(text, end="", flush=True)
    streamer = _Streamer(tokenizer, skip_prompt=True) if stream else None
    ids = generate_batch(model, [_encoder_ids(model, tokenizer, text)], [0], settings, streamer=streamer)[0]
    if stream and (raw or continues):
        return None
    target = text_of(tokenizer, ids)
    if raw:
        return target
    shown = readable(target, continues)
    if shown != target.rstrip():
        print("white space and special tokens are left out of what the model wrote (--raw shows all)", file=sys.stderr)
    if continues:
        return text + shown
    if unanswered := [sentinel for sentinel in _SENTINEL.findall(text) if sentinel not in _SENTINEL.findall(target)]:
        print(f"nothing was written for {', '.join(unanswered)}", file=sys.stderr)
    return fill_sentinels(text, shown)


def _as_taught(text: str, taught: Inputs, tokenizer: PreTrainedTokenizerFast, *, is_raw: bool) -> tuple[str, str]:
    """Return what the model reads for `text`, and a note where there is one to print. Raises CheckpointError."""
    chat = ChatTemplate.of(tokenizer)
    if chat is not None and _is_rendered(text, chat, tokenizer):
        return text, ""
    if taught.template is None and chat is not None and not is_raw:
        return _of_user(text, chat), "The text is the user's turn in the model's chat template (--raw: it is all)."
    if taught.template is not None and _is_of(text, taught.template):
        return text, ""
    forms = [] if taught.template is None else [json.dumps(taught.template)]
    forms += ["conversations in its chat template"] * taught.has_chat
    return text, f"The model was fine-tuned on inputs of another form: {', or '.join(forms)}"


def _of_user(text: str, chat: ChatTemplate) -> str:
    """The prompt of a conversation in which the user has said `text`."""
    try:
        return chat.render([{"role": "user", "content": text}], None, is_prompt=True)
    except ValueError as error:
        raise CheckpointError(f"--model: {error} for a user's turn alone; --raw takes a text of any form") from error


def _is_rendered(text: str, chat: ChatTemplate, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether `text` has special tokens that are no sentinels: those that begin and end turns."""
    marks = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return any(mark in text and any(mark in one for one in chat.templates.values()) for mark in marks)


def _is_of(text: str, template: str) -> bool:
    """Return whether the parts of a template that are no fields are in `text`."""
    words = (part.strip() for part, _ in template_parts(template))
    return re.search(".*".join(map(re.escape, words)), text, re.DOTALL) is not None


def readable(target: str, continues: bool) -> str:
    """The model's `target` as people read it: spans on one line; or a continuation, without sentinels."""
    if continues:
        return re.sub(r"\n\s*\n\s*\n", "\n\n", _SENTINEL.sub("", target)).rstrip()
    return re.sub(r"\s+", " ", target).rstrip()


class _Streamer(TextStreamer):
    """Prints what `text_of` shows."""

    def put(self, value: Tensor) -> None:
        if self.next_tokens_are_prompt or text_of(self.tokenizer, value.tolist()):
            super().put(value)


def fill_sentinels(text: str, target: str) -> str:
    """Put the spans of `target` ("<extra_id_0> span <extra_id_1> span …") in the place of the sentinels of `text`."""
    spans = dict(zip(_SENTINEL.findall(target), _SENTINEL.split(target)[1:], strict=True))
    return _SENTINEL.sub(lambda match: spans.get(match.group(), match.group()), text)


def _encoder_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text's ids, behind the mode token of a model that was trained with them."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if model.config.mode_token_ids:
        has_spans = _SENTINEL.search(text) is not None
        modes = zip(DENOISERS.values(), model.config.mode_token_ids, strict=False)
        ids.insert(0, next(token for row, token in modes if row.has_spans == has_spans))
    return ids
