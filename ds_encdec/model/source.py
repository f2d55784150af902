"""The model that a run starts from: random weights, a decoder of a known family, or an encoder-decoder of our own."""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ds_encdec.base.types import CheckpointError, ConfigError, WeightSource
from ds_encdec.config.schema import ModelConfig
from ds_encdec.config.stored_model import COUNTS, model_folder, read_stored_model, too_few_rows, untrained_rows
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.cross_attention import encoder_norm, form_of
from ds_encdec.model.depth import depth_of, encoder_fields, form_fields, require_stored_form
from ds_encdec.model.parameter_count import EMBEDDING_ROWS_MULTIPLE, count_parameters, parameter_shapes
from ds_encdec.model.weights import random_weights, stored_weights
from ds_encdec.registry.families import FAMILIES, LAYER
from ds_encdec.registry.objectives import OBJECTIVES, Objective
from ds_encdec.tokenizer.sentinels import Vocabulary

# Fields of a decoder that ours has, too.
COPIED = (
    *COUNTS,
    *LAYER,
    *("head_dim", "hidden_act", "initializer_range", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
)


@dataclass(frozen=True)
class ModelSource:
    """A model before it is built: its configuration, its weights, and a description of their origin."""

    config: Qwen3Seq2SeqConfig
    weights: WeightSource
    description: str


def resolve_model(
    section: ModelConfig, vocabulary: Vocabulary, seed: int, objective: Objective = OBJECTIVES["ul2"]
) -> ModelSource:
    """Return the model of `section` for the token ids of `vocabulary`; download a hub model that is not cached. An
    `objective` of an encoder takes that of an encoder-decoder, or makes one of a decoder's layers.
    Tensors' names and shapes are checked at once, weights are read later. Raises ConfigError for an impossible
    architecture, CheckpointError for a model that cannot be reached, read or used."""
    if (sizes := section.architecture) is not None:
        if wrong := too_few_rows(sizes.vocab_size, vocabulary.vocab_size):
            raise ConfigError(f"model.architecture.vocab_size is {sizes.vocab_size}, but {wrong}")
        rope = {"rope_type": "default", "rope_theta": sizes.rope_theta}
        try:
            fields = sizes.model_dump(exclude={"rope_theta"}) | {"rope_parameters": rope}
            made = form_fields(section, sizes.num_hidden_layers, encoder_only=objective.encoder_only)
            config = _config(section, fields | made | _head(objective), vocabulary)
        except ValueError as error:
            raise ConfigError(f"model.architecture: {error}") from error
        origin = f"random weights (seed {seed}), {count_parameters(config):,} parameters"
        return ModelSource(config, random_weights(config, seed), origin)
    folder = model_folder(str(section.model_name_or_path), field="model.model_name_or_path")
    stored = read_stored_model(folder / "config.json")
    if family := FAMILIES.get(stored["model_type"]):
        sides = "encoder" if objective.encoder_only else "encoder and decoder"
        origin = f"{sides} from the decoder-only {family.title}"
        fields = {name: stored[name] for name in COPIED if name in stored}
        fields["tie_word_embeddings"] = stored.get("tie_word_embeddings", False)
        unrotated = stored["unrotated_layers"]
        fields |= form_fields(section, stored["num_hidden_layers"], unrotated, encoder_only=objective.encoder_only)
    else:
        require_stored_form(section, stored, encoder_only=objective.encoder_only)
        known = {*stored.get("sentinel_token_ids", ()), *stored.get("mode_token_ids", ())}
        if section.lora is not None and not known.issuperset((*vocabulary.sentinel_ids, *vocabulary.mode_token_ids)):
            # Their rows would be drawn and never trained, and peft, on the base as it is, would give other
            # probabilities than the merged model.
            asks_for_modes = bool(vocabulary.mode_token_ids)
            lacks = untrained_rows(str(section.model_name_or_path), stored, asks_for_modes=asks_for_modes)
            raise ConfigError(f"model.num_sentinel_tokens is {len(vocabulary.sentinel_ids)}, but {lacks}")
        fields = {name: stored[name] for name in stored.keys() - {"auto_map", "architectures", "dtype", "code_sha256"}}
        fields |= encoder_fields(stored) if objective.encoder_only else {}
        origin = "the encoder" if objective.encoder_only else "the encoder-decoder"
    try:
        config = _config(section, fields | _head(objective), vocabulary)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    weights = _weights_in(section, folder, stored, config, seed)
    return ModelSource(config, weights, f"{origin} in {section.model_name_or_path}")


@dataclass(frozen=True)
class Base:
    """The model that a run started from: `folder`, None for random weights, and `drawn`, which decides those."""

    weights: WeightSource
    folder: Path | None
    drawn: dict[str, Any]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return all that decides the weights: `drawn`, and the SHA-256 of each file, so that a folder may move."""
        if self.folder is None:
            return self.drawn
        paths = sorted(self.folder.glob("*.safetensors"))
        stats = [path.stat() for path in paths]
        hashes = [_sha256(path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
        return {**self.drawn, "files": dict(zip([path.name for path in paths], hashes, strict=True))}


def base_model(section: ModelConfig, config: Qwen3Seq2SeqConfig, seed: int) -> Base:
    """Return the base that `resolve_model` takes for `section` and this vocabulary. Raises CheckpointError."""
    drawn: dict[str, Any] = {"seed": seed, "shapes": {n: list(shape) for n, shape in parameter_shapes(config).items()}}
    if section.model_name_or_path is None:
        drawn["initializer_range"] = config.initializer_range
        return Base(random_weights(config, seed), None, drawn)
    folder = model_folder(section.model_name_or_path, field="model.model_name_or_path")
    return Base(_weights_in(section, folder, read_stored_model(folder / "config.json"), config, seed), folder, drawn)


def _weights_in(
    section: ModelConfig, folder: Path, stored: dict[str, Any], config: Qwen3Seq2SeqConfig, seed: int
) -> WeightSource:
    family, added_ids = FAMILIES.get(stored["model_type"]), {*config.sentinel_token_ids, *config.mode_token_ids}
    origin, norm, encoder_only = None, "encoder.norm.weight", config.num_hidden_layers == 0
    if family is not None:
        depth = depth_of(section, stored["num_hidden_layers"], form_of(config), encoder_only=encoder_only)
        origin = family, depth
    else:
        added_ids -= {*stored.get("sentinel_token_ids", ()), *stored.get("mode_token_ids", ())}
        norm = encoder_norm(SimpleNamespace(**stored)) if encoder_only else norm
    rows = stored["vocab_size"]
    return stored_weights(folder, config, added_ids, stored_rows=rows, seed=seed, origin=origin, encoder_norm=norm)


def _head(objective: Objective) -> dict[str, Any]:
    return {} if objective.has_head else {"tie_word_embeddings": True}  # no weights of its own


@cache
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def architecture(config: Qwen3Seq2SeqConfig) -> dict[str, Any]:
    """Return the fields in which two configurations of one model must agree: not the kernels, not versions."""
    others = ("loss_chunk_tokens", "use_flash_attention", "use_cache", "transformers_version", "dtype")
    return {name: value for name, value in config.to_dict().items() if name not in others}


def _config(section: ModelConfig, fields: dict[str, Any], vocabulary: Vocabulary) -> Qwen3Seq2SeqConfig:
    rows = fields["vocab_size"]
    if vocabulary.vocab_size > rows:
        rows = -(-vocabulary.vocab_size // EMBEDDING_ROWS_MULTIPLE) * EMBEDDING_ROWS_MULTIPLE
    of_this_run = {
        "vocab_size": rows,
        "pad_token_id": vocabulary.pad_id,
        "decoder_start_token_id": vocabulary.start_id,
        "eos_token_id": vocabulary.eos_id,
        "sentinel_token_ids": list(vocabulary.sentinel_ids),
        "mode_token_ids": list(vocabulary.mode_token_ids),
        "loss_chunk_tokens": section.loss_chunk_tokens,
        "use_flash_attention": section.use_flash_attention,
    }
    return Qwen3Seq2SeqConfig(**fields | of_this_run)
