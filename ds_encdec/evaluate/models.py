"""The model that is judged: an export of ours, or another encoder-decoder that transformers can load by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def is_ours(folder: Path) -> bool:
    """True for a model of our own kind. Raises CheckpointError where `folder` holds no encoder-decoder's export."""
    for name, what in (("manifest.json", "a checkpoint"), ("adapter_config.json", "an adapter without its model")):
        if (folder / name).exists():
            raise CheckpointError(f"--model: {folder} is {what}; make it a model with ds-encdec export CHECKPOINT OUT")
    if not (folder / "config.json").is_file():
        what = "has no config.json: it is no model folder" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"--model: {folder} {what}")
    try:
        stored, _ = PretrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model: {folder} is no model folder: {error}") from error
    if not stored.get("is_encoder_decoder"):
        raise CheckpointError(
            f"--model: {folder} is a {stored.get('model_type')}, which is no encoder-decoder; ds-encdec init-model "
            "makes one of a Qwen3"
        )
    return bool(stored.get("model_type") == Qwen3Seq2SeqConfig.model_type)


def open_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder. Raises CheckpointError."""
    if is_ours(folder):
        return pretrained_tokenizer(str(folder), field="--model")
    return AutoTokenizer.from_pretrained(folder)


def open_model(folder: Path, device: torch.device, dtype: str | None = None) -> PreTrainedModel:
    """The model of a folder on `device`, in evaluation mode. No code out of the folder is run. Raises CheckpointError.

    `dtype`: a name of torch's; None is the stored one on a GPU, and float32 on a CPU, where it is as fast or faster.
    """
    disable_progress_bar()
    wanted = getattr(torch, dtype) if dtype else ("auto" if device.type == "cuda" else torch.float32)
    kind = Qwen3ForSeq2SeqLM if is_ours(folder) else AutoModelForSeq2SeqLM
    try:
        return kind.from_pretrained(folder, dtype=wanted).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"--model: {folder} could not be loaded: {error}") from error
