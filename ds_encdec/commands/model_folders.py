"""Make a model folder, ready for training, from a decoder (`ds-encdec init-model`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_encdec.base.quantities import count
from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import ModelConfig
from ds_encdec.config.stored_model import MODEL_FILES, TOKENIZER_FILES, model_folder, read_stored_model
from ds_encdec.evaluate.conversion import measure_conversion, read_passages
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.exports.model_card import untrained_model_card
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import form_of
from ds_encdec.model.depth import depth_of
from ds_encdec.model.parameter_count import count_parameters
from ds_encdec.model.source import resolve_model
from ds_encdec.registry.families import FAMILIES, OWN
from ds_encdec.tokenizer.load import load_tokenizer


def init_model(section: ModelConfig, out: Path, *, seed: int = 42, text: Path | None = None) -> Iterator[str]:
    """Write the folder `out` with the model of `section`, tensor by tensor, and yield the lines to print: what was made
    and, with `text`, what the conversion costs on it. Raises ConfigError for a `text` that is too short,
    CheckpointError for a source or `out` that cannot be used."""
    source = str(section.model_name_or_path)
    folder = model_folder(source, (*MODEL_FILES, *TOKENIZER_FILES), field="--from")
    stored = read_stored_model(folder / "config.json")
    here = section.model_copy(update={"model_name_or_path": str(folder)})
    tokenizer, vocabulary = load_tokenizer(here, builtin_texts=tuple, mode_tokens=False)
    if text is not None and stored["model_type"] not in FAMILIES:
        raise ConfigError(f"--check: {source} is an encoder-decoder already: give --from the decoder that it began as")
    passages = [] if text is None else read_passages(text, tokenizer)
    model = resolve_model(section, vocabulary, seed)
    dtypes = {"float32": torch.float32, "float16": torch.float16}
    dtype = dtypes.get(str(stored.get("dtype") or stored.get("torch_dtype")), torch.bfloat16)
    facts = _facts(section, stored, model.config) | {"dtype": str(dtype).removeprefix("torch.")}
    card = untrained_model_card(model.description, model.config, facts)
    export_hf(model.weights, model.config, tokenizer, out, dtype=dtype, card=card)
    yield f"{out}: an encoder-decoder"
    yield from (f"  {name:16}  {fact}" for name, fact in facts.items())
    if text is not None:
        yield from measure_conversion(folder, out, passages, vocabulary.beginning())


def _facts(section: ModelConfig, stored: dict[str, Any], config: Qwen3Seq2SeqConfig) -> dict[str, str]:
    """Return what was made of the model with the fields `stored`, in words."""
    encoder, decoder = str(config.num_encoder_layers), str(config.num_hidden_layers)
    family = FAMILIES.get(stored["model_type"], OWN)
    if family is not OWN:
        depth = depth_of(section, stored["num_hidden_layers"], form_of(config))
        encoder, decoder = map(_copies, (depth.encoder, depth.decoder))
    heights, ids = config.encoder_heights or [], config.sentinel_token_ids
    is_plain = heights == list(range(len(heights)))  # each decoder layer reads at its own number
    return {
        "source": f"{section.model_name_or_path} ({family.title}, {count(stored['num_hidden_layers'], 'layer')})",
        "cross-attention": f"{config.cross_attention}, positions {config.encoder_positions}",
        "encoder layers": encoder,
        "decoder layers": decoder,
        **({} if is_plain else {"they read behind": f"{', '.join(map(str, heights))} encoder layers"}),
        "parameters": f"{count_parameters(config):,}",
        "embedding": f"{config.vocab_size:,} rows, {config.vocab_size - stored['vocab_size']:,} of them added",
        "sentinels": f"{len(ids)} (ids {ids[0]} to {ids[-1]})",
    }


def _copies(layers: Sequence[int]) -> str:
    is_row = len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1))
    named = f"{layers[0]} to {layers[-1]}" if is_row else ", ".join(map(str, layers))
    return f"{len(layers)}, copies of {named}" if layers else "0, so that the decoder reads embeddings alone"
