"""`ds-encdec generate`: fill the sentinels of one text, or continue it, by an exported model."""

import ast
import json
import os
import re
import sys
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.data.examples.sft import ChatTemplate
from ds_encdec.evaluate.generation import generate_batch, text_of
from ds_encdec.evaluate.models import open_model, open_tokenizer, require_ours
from ds_encdec.launch.process_group import choose_device
from ds_encdec.launch.world import discover
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.objectives import template_parts

_SENTINEL = re.compile(r"<extra_id_\d+>")


def generate_text(
    folder: Path, text: str, settings: GenerationSettings, *, raw: bool = False, stream: bool = False
) -> str | None:
    """Return `text` with its sentinels (`<extra_id_0>`…) filled in or, if it has none, `text` and its continuation.

    `folder`: an export, or a folder of `ds-encdec init-model`. A sentinel that the model does not answer stays in the
    text. Fillings have blanks for runs of white space; a continuation has no sentinels, and one empty line at most
    instead of several; stderr reports if this changed anything. `raw`: return the model's output alone, as always for a
    fine-tuned model. Unless `raw`, a model of conversations reads `text` as the user's turn of its chat template, which
    stderr reports, like an input of another form than the model was trained on. `stream`: print the output while it is
    made; returns None if nothing more is to be shown. Raises CheckpointError for a folder without such a model.
    """
    require_ours(folder)
    tokenizer = open_tokenizer(folder)
    if (taught := _taught_inputs(folder)) is not None:
        text, note = _prepare_input(text, *taught, tokenizer, is_raw=raw)
        raw = True
        if note:
            print(note, file=sys.stderr)
    model = open_model(folder, choose_device("auto", discover(os.environ)))
    continues = not raw and not _SENTINEL.search(text)
    if stream and continues:
        print(text, end="", flush=True)
    encoder_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if model.config.mode_token_ids:  # it was trained with them before each input
        modes = zip(DENOISERS.values(), model.config.mode_token_ids, strict=False)
        has_spans = _SENTINEL.search(text) is not None
        encoder_ids.insert(0, next(token for row, token in modes if row.has_spans == has_spans))
    streamer = _Streamer(tokenizer, skip_prompt=True) if stream else None
    ids = generate_batch(model, [encoder_ids], [0], settings, streamer=streamer)[0]
    if stream and (raw or continues):
        return None
    target = text_of(tokenizer, ids)
    if raw:
        return target
    shown = readable(target, continues)
    if shown != target.rstrip():
        print("white space and special tokens of the output are left out (--raw shows all)", file=sys.stderr)
    if continues:
        return text + shown
    if unanswered := [sentinel for sentinel in _SENTINEL.findall(text) if sentinel not in _SENTINEL.findall(target)]:
        print(f"nothing was written for {', '.join(unanswered)}", file=sys.stderr)
    return fill_sentinels(text, shown)


def _taught_inputs(folder: Path) -> tuple[str | None, bool] | None:
    """Return the input template of a fine-tuned model's training, if any, and whether it had conversations, from the
    model's card; None for any other model."""
    try:
        card = (folder / "README.md").read_text("utf-8")
        row = re.search(r"^\| input_template \| `(.+)` \|$", card, re.MULTILINE)
        template = row and str(ast.literal_eval(row[1].replace("\\|", "|")))
    except (OSError, ValueError, SyntaxError):  # somebody has written another card
        return None
    has_chat = re.search(r"^\| Conversations \| .+ \|$", card, re.MULTILINE) is not None
    return (template, has_chat) if has_chat or template is not None else None


def _prepare_input(
    text: str, template: str | None, has_chat: bool, tokenizer: PreTrainedTokenizerFast, *, is_raw: bool
) -> tuple[str, str]:
    """Return the input for `text` of a model that was fine-tuned on `template` or conversations, and a note to print,
    which may be empty. Raises CheckpointError."""
    chat = ChatTemplate.of(tokenizer)
    if chat is not None:
        # Special tokens of a chat template begin and end turns: a text with them is rendered already.
        marks = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        if any(mark in text and any(mark in one for one in chat.templates.values()) for mark in marks):
            return text, ""
        if template is None and not is_raw:
            try:
                rendered = chat.render([{"role": "user", "content": text}], None, is_prompt=True)
            except ValueError as error:
                message = f"--model: {error} for a user's turn alone; --raw takes a text of any form"
                raise CheckpointError(message) from error
            return rendered, "The text is the user's turn in the model's chat template (--raw: it is all)."
    forms = ["conversations in its chat template"] * has_chat
    if template is not None:
        words = (part.strip() for part, _ in template_parts(template))
        if re.search(".*".join(map(re.escape, words)), text, re.DOTALL):  # has the parts that are no fields, in order
            return text, ""
        forms.insert(0, json.dumps(template))
    return text, f"The model was fine-tuned on inputs of another form: {', or '.join(forms)}"


def readable(target: str, continues: bool) -> str:
    """Return the model's `target` for people: spans on one line; or a continuation, without sentinels."""
    if continues:
        return re.sub(r"\n\s*\n\s*\n", "\n\n", _SENTINEL.sub("", target)).rstrip()
    return re.sub(r"\s+", " ", target).rstrip()


class _Streamer(TextStreamer):
    def put(self, value: Tensor) -> None:
        if self.next_tokens_are_prompt or text_of(self.tokenizer, value.tolist()):
            super().put(value)


def fill_sentinels(text: str, target: str) -> str:
    """Replace the sentinels of `text` by the spans of `target` ("<extra_id_0> span <extra_id_1> span …")."""
    spans = dict(zip(_SENTINEL.findall(target), _SENTINEL.split(target)[1:], strict=True))
    return _SENTINEL.sub(lambda match: spans.get(match.group(), match.group()), text)
