"""The sizes of a run's model without torch and without the network: what the estimate needs of `model/source.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ds_encdec.config.plain_files import read_json
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.settings import closest
from ds_encdec.model.parameter_count import ModelSizes, count_layer_parameters, num_encoder_layers, parameter_shapes
from ds_encdec.tokenizer.sentinels import MODE_TOKENS
from ds_encdec.types import ConfigError

ROWS_MULTIPLE = 128
"""The same as `EMBEDDING_ROWS_MULTIPLE` of model/source.py, which cannot be imported without transformers."""
QWEN3_IDS = 151_669
"""Ids that Qwen3's tokenizer has before sentinels are added (tokenizer/sentinels.py)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an encoder-decoder; see `config.schema.ArchitectureConfig`. `vocab_size` in rows."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_encoder_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool

    @classmethod
    def of(cls, sizes: ModelSizes) -> Sizes:
        """The same sizes, whatever holds them."""
        own: dict[str, Any] = {"num_encoder_layers": num_encoder_layers(sizes)}
        return cls(**own, **{field.name: getattr(sizes, field.name) for field in fields(cls) if field.name not in own})

    # An answer asks for these thousands of times, of one model.

    @property
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter by its canonical name, in the model's order."""
        return _parameter_shapes(self)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        return _parameters(self)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, of the encoder or the decoder."""
        return _layer_parameters(self)


_parameter_shapes = lru_cache(parameter_shapes)
_layer_parameters = lru_cache(count_layer_parameters)


@lru_cache
def _parameters(sizes: Sizes) -> int:
    return sum(map(prod, sizes.parameter_shapes.values()))


# hidden, layers, query heads, intermediate, tied embeddings; of each published config.json, on
# https://huggingface.co/Qwen/<name>. All have 151,936 rows, 8 key/value heads and heads of 128.
_PUBLISHED = {
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen/Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 12288, False),
    "Qwen/Qwen3-14B": (5120, 40, 40, 17408, False),
    "Qwen/Qwen3-32B": (5120, 64, 64, 25600, False),
}
QWEN3_ROWS = 151_936
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def run_sizes(config: FullConfig) -> Sizes:
    """The sizes of the model that a run of `config` trains, sentinels included.

    From `model.architecture`, a local folder, a published Qwen3's sizes, or the Hugging Face cache. Raises
    ConfigError for a model that is none of these, or that a run would refuse.
    """
    section = config.model
    if section.architecture is not None:
        return Sizes.of(section.architecture)  # its rows are fixed: a run refuses a tokenizer that needs more
    name = section.model_name_or_path
    assert name is not None  # the configuration has one of the two
    folder, published = Path(name).expanduser(), published_sizes(name)
    if folder.is_dir() or published is None:
        sizes = _stored_sizes(folder if folder.is_dir() else _cached_folder(name))
    else:
        sizes = published
    return replace(sizes, vocab_size=_rows_needed(config)) if sizes.vocab_size == QWEN3_ROWS else sizes


def published_sizes(name: str) -> Sizes | None:
    """The sizes of the encoder-decoder made from a Qwen3 of that hub id; None for an unknown one."""
    known = _PUBLISHED.get(name.removesuffix("-Base"))
    if known is None or name == "Qwen/Qwen3-32B-Base":  # never published
        return None
    hidden, layers, heads, intermediate, tied = known
    return Sizes(QWEN3_ROWS, hidden, layers, layers, heads, 8, 128, intermediate, tied)


def adapter_parameters(sizes: ModelSizes, rank: int) -> int:
    """Parameters of LoRA adapters of `rank` on all seven projections of all layers (LoRA, arXiv 2106.09685).

    A projection from m to n numbers gets two matrices, of m x rank and rank x n.
    """
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    query, key = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    query_and_output = 2 * (hidden + query)
    key_and_value = 2 * (hidden + key)
    gate_up_and_down = 3 * (hidden + inner)
    layers = num_encoder_layers(sizes) + sizes.num_hidden_layers
    return rank * layers * (query_and_output + key_and_value + gate_up_and_down)


def _stored_sizes(folder: Path) -> Sizes:
    """The sizes in the `config.json` of a decoder-only Qwen3 or of an encoder-decoder made here."""
    file = folder / "config.json"
    try:
        stored = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.model_name_or_path: {file} cannot be read: {error}") from error
    kind = stored.get("model_type") if isinstance(stored, dict) else None
    if kind not in ("qwen3", "qwen3_seq2seq"):
        raise ConfigError(
            f"model.model_name_or_path: {file}: model_type is {kind!r}; needed is 'qwen3' (a dense decoder-only "
            "Qwen3) or 'qwen3_seq2seq' (an encoder-decoder made here)"
        )
    if kind == "qwen3" and stored.get("attention_bias"):
        raise ConfigError(f"model.model_name_or_path: {file}: attention_bias is not supported")
    wrong = [key for key in _SIZE_KEYS if not (isinstance(stored.get(key), int) and stored[key] > 0)]
    if wrong:
        raise ConfigError(f"model.model_name_or_path: {file} lacks {', '.join(wrong)} (whole numbers above 0)")
    layers = stored["num_hidden_layers"]
    return Sizes(
        **{key: stored[key] for key in _SIZE_KEYS},
        num_encoder_layers=(stored.get("num_encoder_layers") if kind == "qwen3_seq2seq" else None) or layers,
        head_dim=stored.get("head_dim") or stored["hidden_size"] // stored["num_attention_heads"],
        tie_word_embeddings=bool(stored.get("tie_word_embeddings", False)),
    )


def _rows_needed(config: FullConfig) -> int:
    """Rows of Qwen3's embedding, or as many as it grows to where the sentinels and mode tokens do not fit in.

    Other models' tokenizers are not looked at: their rows are taken to have room.
    """
    added = config.model.num_sentinel_tokens + (len(MODE_TOKENS) if config.data.use_mode_tokens else 0)
    return max(QWEN3_ROWS, -(-(QWEN3_IDS + added) // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def _cached_folder(name: str) -> Path:
    """The folder of a hub repository's newest commit in the Hugging Face cache. Raises ConfigError if it has none."""
    from huggingface_hub import try_to_load_from_cache  # takes a tenth of a second
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name of a repository
        found = None
    if not isinstance(found, str):
        raise ConfigError(_not_found(name))
    return Path(found).parent


def _not_found(name: str) -> str:
    known = [f"{base}{suffix}" for base in _PUBLISHED for suffix in ("", "-Base") if published_sizes(base + suffix)]
    meant = closest(name, known)
    suggestion = f" Did you mean {meant}?" if meant else ""
    return (
        f"model.model_name_or_path: {name} is not a local folder, not in the Hugging Face cache, and not one of the "
        f"models whose sizes are known here ({', '.join(known)}); nothing is downloaded for an estimate.{suggestion} "
        "Give a folder that holds its config.json, or its sizes: model.architecture.hidden_size=… and so on, with "
        "model.tokenizer_name_or_path=builtin"
    )
