"""Make a model folder, ready for training, from a decoder (`ds-encdec init-model`)."""

from pathlib import Path

import torch

from ds_encdec.config.schema import ModelConfig
from ds_encdec.config.stored_model import MODEL_FILES, TOKENIZER_FILES, model_folder, read_stored_model
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.exports.model_card import untrained_model_card
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.model.source import resolve_model
from ds_encdec.tokenizer.load import load_tokenizer


def init_model(source: str, out: Path, num_sentinel_tokens: int = 100, *, seed: int = 42) -> str:
    """Write the folder `out` with the weights of `source` (a folder or hub id) on both sides and new sentinel rows, and
    return the line to print. Tensors are copied one at a time. Raises CheckpointError for a source or `out` that cannot
    be used."""
    section = ModelConfig(model_name_or_path=source, num_sentinel_tokens=num_sentinel_tokens)
    folder = model_folder(source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    stored = read_stored_model(folder / "config.json")
    here = section.model_copy(update={"model_name_or_path": str(folder)})
    tokenizer, vocabulary = load_tokenizer(here, builtin_texts=tuple, mode_tokens=False)
    model = resolve_model(section, vocabulary, seed)
    dtypes = {"float32": torch.float32, "float16": torch.float16}
    dtype = dtypes.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.bfloat16)
    card = untrained_model_card(model.description, model.config)
    export_hf(model.weights, model.config, tokenizer, out, dtype=dtype, card=card)
    ids, what = vocabulary.sentinel_ids, f"{model.description}, {count_parameters(model.config):,} parameters"
    return f"{out}: {what}, {len(ids)} sentinels (ids {ids[0]} to {ids[-1]})"
