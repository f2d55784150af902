"""A trained model as an ordinary Hugging Face folder.

The folder carries the modelling code, so `AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)` (or
`AutoModel`, for an encoder alone) loads it where ds_encdec and deepspeed are not installed.
"""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from ds_encdec.checkpoint.model_card import RunFacts, model_card
from ds_encdec.checkpoint.saved_state import open_saved_state, saved_weights
from ds_encdec.checkpoint.whole_folder import refuse_existing, written_whole
from ds_encdec.model import attention, configuration, loss, modeling, precision
from ds_encdec.model.configuration import Qwen3EncoderConfig, Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.safetensors_folder import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMOTE_CODE = (configuration, precision, attention, loss, modeling)
"""The modules copied into the folder. They import each other relatively, and nothing else of ds_encdec."""

AUTO_MAP = {
    "AutoConfig": "configuration.Qwen3Seq2SeqConfig",
    "AutoModelForSeq2SeqLM": "modeling.Qwen3ForSeq2SeqLM",
}
ENCODER_AUTO_MAP = {"AutoConfig": "configuration.Qwen3EncoderConfig", "AutoModel": "modeling.Qwen3EncoderModel"}


def export_hf(
    weights: WeightSource,
    config: Qwen3Seq2SeqConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    card: str,
    replace: bool = False,
) -> None:
    """Write the folder `out`: weights (safetensors, tied ones once), configuration, code, tokenizer and model card.

    Under a `Qwen3EncoderConfig` it is a `Qwen3EncoderModel`, otherwise a `Qwen3ForSeq2SeqLM`. Weights are fetched,
    converted to `dtype` and written one by one. The folder appears at `out` when it is complete, or not at all;
    `replace` and what is raised: see `written_whole`.
    """
    shapes = _model_shapes(config)
    with written_whole(out, replace=replace) as (unfinished, writing):
        writing.require_space(dtype.itemsize * sum(map(prod, shapes.values())))
        write_safetensors_folder(unfinished, shapes, weights, dtype=dtype, max_shard_bytes=max_shard_bytes)
        _write_configuration(config, dtype, unfinished)
        for module in REMOTE_CODE:
            shutil.copyfile(str(module.__file__), unfinished / Path(str(module.__file__)).name)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(card)


def export_checkpoint(
    checkpoint: Path, out: Path, *, dtype: torch.dtype, max_shard_bytes: int, encoder_only: bool = False
) -> None:
    """Export a committed checkpoint, whichever engine saved it, with a model card written from its run.

    `encoder_only`: the encoder and its embedding, as a `Qwen3EncoderModel`. Raises CheckpointError.
    """
    refuse_existing(out)  # before minutes of reading
    path = checkpoint.expanduser().resolve()
    weights = saved_weights(open_saved_state(path))
    config = Qwen3Seq2SeqConfig.from_pretrained(path / "model")
    facts = RunFacts.of(path, weights=f"checkpoint `{path.name}`")
    export_hf(
        weights,
        Qwen3EncoderConfig.of(config) if encoder_only else config,
        pretrained_tokenizer(str(path / "model"), field="CHECKPOINT"),
        out,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        card=model_card(facts, encoder_only=encoder_only),
    )


def _model_shapes(config: Qwen3Seq2SeqConfig) -> dict[str, tuple[int, ...]]:
    """Neutral name → shape of what the model of `config` consists of."""
    shapes = parameter_shapes(config)
    if isinstance(config, Qwen3EncoderConfig):
        return {name: shape for name, shape in shapes.items() if name.startswith(("shared.", "encoder."))}
    return shapes


def _write_configuration(config: Qwen3Seq2SeqConfig, dtype: torch.dtype, folder: Path) -> None:
    is_encoder = isinstance(config, Qwen3EncoderConfig)
    fields = {
        **config.to_dict(),
        "architectures": ["Qwen3EncoderModel" if is_encoder else "Qwen3ForSeq2SeqLM"],
        "auto_map": ENCODER_AUTO_MAP if is_encoder else AUTO_MAP,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    if not is_encoder:
        GenerationConfig(
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        ).save_pretrained(folder)
