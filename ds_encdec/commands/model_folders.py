"""Make a model folder, ready for training, from a decoder-only Qwen3 (`ds-encdec init-model`)."""

from pathlib import Path
from typing import Any

import torch

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.schema import ModelConfig
from ds_encdec.config.stored_model import MODEL_FILES, TOKENIZER_FILES, model_folder, read_stored_model
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.exports.model_card import untrained_model_card
from ds_encdec.memory.job import QWEN3_IDS, QWEN3_ROWS
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.model.source import resolve_model
from ds_encdec.tokenizer.load import load_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary


def init_model(source: str, out: Path, num_sentinel_tokens: int = 100, *, seed: int = 42) -> str:
    """Write the folder `out` with the weights of `source` (a folder or hub id) on both sides and new sentinel rows, and
    return the lines to print. Tensors are copied one at a time. Without a tokenizer in the source only weights are
    written, with sentinels at the default ids. Raises CheckpointError for a source or `out` that cannot be used."""
    section = ModelConfig(model_name_or_path=source, num_sentinel_tokens=num_sentinel_tokens)
    folder = model_folder(source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    stored = read_stored_model(folder / "config.json")
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer, vocabulary = load_tokenizer(
            section.model_copy(update={"model_name_or_path": str(folder)}), builtin_texts=tuple, mode_tokens=False
        )
    else:
        vocabulary = default_vocabulary(stored, num_sentinel_tokens)
    model = resolve_model(section, vocabulary, seed)
    dtypes = {"float32": torch.float32, "float16": torch.float16}
    dtype = dtypes.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.bfloat16)
    card = untrained_model_card(model.description, model.config)
    export_hf(model.weights, model.config, tokenizer, out, dtype=dtype, card=card)
    ids, what = vocabulary.sentinel_ids, f"{model.description}, {count_parameters(model.config):,} parameters"
    warning = "\nThe source has no tokenizer: only weights were written. Name one to train with."
    return f"{out}: {what}, {len(ids)} sentinels (ids {ids[0]} to {ids[-1]}){'' if tokenizer is not None else warning}"


def default_vocabulary(stored: dict[str, Any], num_sentinels: int) -> Vocabulary:
    """Return the special ids of a model folder without a tokenizer, from its `config.json`. A Qwen3's sentinels get the
    ids of its own tokenizer, others follow the vocabulary. Raises CheckpointError without an end-of-sequence id."""
    rows = stored["vocab_size"]
    first = QWEN3_IDS if rows == QWEN3_ROWS else rows
    eos = stored.get("eos_token_id")
    if not isinstance(eos, int):
        raise CheckpointError(f"config.json: eos_token_id is {eos!r}; without a tokenizer it must be one id")
    # Qwen3 pads with <|endoftext|>, which its configuration calls bos_token_id.
    pad = next((stored[name] for name in ("pad_token_id", "bos_token_id") if stored.get(name) is not None), eos)
    ids = range(first, first + num_sentinels)
    return Vocabulary(sentinel_ids=tuple(ids), eos_id=eos, pad_id=pad, mode_token_ids=(), vocab_size=ids.stop)
