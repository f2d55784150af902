"""`ds-encdec init-model` and `generate`: a model's folder, made from a decoder-only Qwen3, and asked for text.

A new folder is ready to be trained; one that was exported generates, by filling sentinels or by continuing a prefix.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TextStreamer

from ds_encdec.checkpoint.export import export_hf
from ds_encdec.checkpoint.model_card import untrained_model_card
from ds_encdec.config.model_folder import MODEL_FILES, TOKENIZER_FILES, model_folder
from ds_encdec.config.schema import ModelConfig
from ds_encdec.evaluate.generation import GenerationSettings, generate_batch, text_of
from ds_encdec.evaluate.models import is_ours, open_model, open_tokenizer
from ds_encdec.launch.process_group import choose_device
from ds_encdec.launch.world import discover
from ds_encdec.memory.job import QWEN3_IDS, QWEN3_ROWS
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.model.source import read_config, resolve_model
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary
from ds_encdec.types import DENOISERS, CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SENTINEL = re.compile(r"<extra_id_\d+>")


def init_model(source: str, out: Path, num_sentinel_tokens: int = 100, *, seed: int = 42) -> str:
    """Write the folder `out` with the weights of `source` (a folder or hub id) on both sides, and new sentinel rows.

    Tensors are copied one at a time in the source's dtype: peak memory is about three times the embedding (its stored
    form, the one with sentinel rows, and pieces of its statistics), whatever the size of the model. Without a tokenizer
    in the source the weights are written all the same, with sentinels at the default ids. Returns the lines to show.
    Raises CheckpointError for a source that cannot be read and for an `out` that is not empty.
    """
    section = ModelConfig(model_name_or_path=source, num_sentinel_tokens=num_sentinel_tokens)
    folder = model_folder(source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    stored = read_config(folder)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer, vocabulary = load_tokenizer(
            section.model_copy(update={"model_name_or_path": str(folder)}), builtin_texts=tuple, mode_tokens=False
        )
    else:
        vocabulary = default_vocabulary(stored, num_sentinel_tokens)
    model = resolve_model(section, vocabulary, seed)
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    export_hf(
        model.weights,
        model.config,
        tokenizer,
        out,
        dtype={"float32": torch.float32, "float16": torch.float16}.get(str(dtype), torch.bfloat16),
        card=untrained_model_card(model.description, model.config),
    )
    ids, what = vocabulary.sentinel_ids, f"{model.description}, {count_parameters(model.config):,} parameters"
    warning = "\nThe source has no tokenizer: only weights were written. Name one to train with."
    return f"{out}: {what}, {len(ids)} sentinels (ids {ids[0]} to {ids[-1]}){'' if tokenizer is not None else warning}"


def default_vocabulary(stored: dict[str, Any], num_sentinels: int) -> Vocabulary:
    """The special ids of a model folder without a tokenizer, from its `config.json` (as a dict).

    Sentinels of a Qwen3 stand where its own tokenizer would get them, otherwise behind the vocabulary. Raises
    CheckpointError if the configuration names no end-of-sequence token.
    """
    rows = stored["vocab_size"]
    first = QWEN3_IDS if rows == QWEN3_ROWS else rows
    eos = stored.get("eos_token_id")
    if not isinstance(eos, int):
        raise CheckpointError(f"config.json: eos_token_id is {eos!r}; without a tokenizer it must be one id")
    # Qwen3 pads with <|endoftext|>, which its configuration calls bos_token_id.
    pad = next((stored[name] for name in ("pad_token_id", "bos_token_id") if stored.get(name) is not None), eos)
    return Vocabulary(
        sentinel_ids=tuple(range(first, first + num_sentinels)),
        eos_id=eos,
        pad_id=pad,
        mode_token_ids=(),
        vocab_size=first + num_sentinels,
    )


def generate_text(
    folder: Path, text: str, settings: GenerationSettings, *, raw: bool = False, stream: bool = False
) -> str | None:
    """`text` with its sentinels (`<extra_id_0>`…) filled in; or, if it has none, `text` and its continuation.

    `folder`: an exported one or one of `ds-encdec init-model`. A sentinel that the model does not answer stays in the
    text. `raw`: what the model writes, and nothing else. `stream`: print that while it is made; None where there is
    nothing more to show. Raises CheckpointError for a folder that is not such a model.
    """
    if stream and settings.num_beams > 1:
        raise ConfigError("--stream shows tokens as they are taken, and a search with beams takes them at its end")
    if not is_ours(folder):
        raise CheckpointError(f"--model: {folder} is not a model of ours; ds-encdec init-model makes one of a Qwen3")
    tokenizer = open_tokenizer(folder)
    model = open_model(folder, choose_device("auto", discover(os.environ)))
    continues = not raw and not _SENTINEL.search(text)
    if stream and continues:
        print(text, end="", flush=True)
    streamer = _Streamer(tokenizer, skip_prompt=True) if stream else None
    ids = generate_batch(model, [_encoder_ids(model, tokenizer, text)], [0], settings, streamer=streamer)[0]
    if stream and (raw or continues):
        return None
    target = text_of(tokenizer, ids)
    return target if raw else text + target if continues else fill_sentinels(text, target)


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
