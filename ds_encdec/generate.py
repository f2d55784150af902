"""`ds-encdec generate`: text from an exported model, by filling sentinels or by continuing a prefix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.source import read_config
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import DENOISERS, CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SENTINEL = re.compile(r"<extra_id_\d+>")


def generate_text(
    model_dir: Path | str,
    text: str,
    *,
    max_new_tokens: int = 64,
    num_beams: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """`text` with its sentinels (`<extra_id_0>`…) filled in; or, if it has none, `text` and its continuation.

    `model_dir`: an exported folder or one of `ds-encdec init-model`. `temperature` 0 is greedy (or beam) search, above
    it sampling seeded with `seed`. A sentinel that the model does not answer stays in the text. Raises CheckpointError
    for a folder that is not such a model.
    """
    folder = Path(model_dir)
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"--model: {folder} is a checkpoint; make it a model with ds-encdec export {folder} OUT")
    disable_progress_bar()  # a bar for loading would stand between the text and its continuation
    if (model_type := read_config(folder)["model_type"]) != Qwen3Seq2SeqConfig.model_type:
        raise CheckpointError(
            f"--model: {folder} is a {model_type}; make it an encoder-decoder with ds-encdec init-model"
        )
    tokenizer = pretrained_tokenizer(str(folder), field="--model")
    model = Qwen3ForSeq2SeqLM.from_pretrained(folder).eval()
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    torch.manual_seed(seed)
    generated = model.generate(
        _encoder_ids(model, tokenizer, text), max_new_tokens=max_new_tokens, num_beams=num_beams, **sampling
    )[0]
    target = tokenizer.decode(_without_special(model, generated), skip_special_tokens=False)
    return fill_sentinels(text, target) if _SENTINEL.search(text) else text + target


def fill_sentinels(text: str, target: str) -> str:
    """Put the spans of `target` ("<extra_id_0> span <extra_id_1> span …") in the place of the sentinels of `text`."""
    pieces = _SENTINEL.split(target)[1:]
    spans = dict(zip(_SENTINEL.findall(target), pieces, strict=True))
    return _SENTINEL.sub(lambda match: spans.get(match.group(), match.group()), text)


def _encoder_ids(model: Qwen3ForSeq2SeqLM, tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """int64 [1, Le]: the text's ids, behind the mode token of a model that was trained with them."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if model.config.mode_token_ids:
        has_spans = _SENTINEL.search(text) is not None
        modes = zip(DENOISERS.values(), model.config.mode_token_ids, strict=False)
        ids.insert(0, next(token for row, token in modes if row.has_spans == has_spans))
    return torch.tensor([ids], device=model.device)


def _without_special(model: Qwen3ForSeq2SeqLM, ids: Tensor) -> list[int]:
    """The generated ids without start, padding and end; sentinels stay."""
    special = {model.config.pad_token_id, model.config.decoder_start_token_id, model.config.eos_token_id}
    return [token for token in ids.tolist() if token not in special]
