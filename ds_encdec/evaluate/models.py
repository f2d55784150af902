"""The model that is judged: an export of ours, or another encoder-decoder that transformers can load by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ds_encdec.evaluate.folders import is_ours
from ds_encdec.model.cache_check import check_cache
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def open_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder. Raises CheckpointError."""
    if is_ours(folder):
        return pretrained_tokenizer(str(folder), field="--model")
    return AutoTokenizer.from_pretrained(folder)


def open_model(folder: Path, device: torch.device, dtype: str | None = None) -> PreTrainedModel:
    """The model of a folder on `device`, in evaluation mode. No code out of the folder is run. Raises CheckpointError.

    ConfigError: the installed transformers generates otherwise with a cache than without.

    `dtype`: a name of torch's; None is the stored one on a GPU, and float32 on a CPU, where it is as fast or faster.
    """
    disable_progress_bar()
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run: `launch.process_group.choose_device` says why
    wanted = getattr(torch, dtype) if dtype else ("auto" if device.type == "cuda" else torch.float32)
    kind = Qwen3ForSeq2SeqLM if is_ours(folder) else AutoModelForSeq2SeqLM
    try:
        if is_ours(folder):
            check_cache(Qwen3Seq2SeqConfig.from_pretrained(folder))
        return kind.from_pretrained(folder, dtype=wanted).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"--model: {folder} could not be loaded: {error}") from error
