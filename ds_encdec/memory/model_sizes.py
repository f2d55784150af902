"""The sizes of a run's model without torch and without the network: what the estimate needs of `model/source.py`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
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


@dataclass(frozen=True)
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
        if isinstance(sizes, cls):
            return sizes
        own: dict[str, Any] = {"num_encoder_layers": num_encoder_layers(sizes)}
        return cls(**own, **{field.name: getattr(sizes, field.name) for field in fields(cls) if field.name not in own})

    # An answer asks for these thousands of times, of one model.

    @cached_property
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter by its canonical name, in the model's order."""
        return parameter_shapes(self)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        return sum(map(prod, self.parameter_shapes.values()))

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer, of the encoder or the decoder."""
        return count_layer_parameters(self)


QWEN3_ROWS = 151_936
_BOTH = ("", "-Base")
PUBLISHED = {
    f"Qwen/Qwen3-{name}{suffix}": Sizes(QWEN3_ROWS, hidden, layers, layers, heads, 8, 128, inner, tied)
    for name, suffixes, hidden, layers, heads, inner, tied in (
        ("0.6B", _BOTH, 1024, 28, 16, 3072, True),
        ("1.7B", _BOTH, 2048, 28, 16, 6144, True),
        ("4B", _BOTH, 2560, 36, 32, 9728, True),
        ("8B", _BOTH, 4096, 36, 32, 12288, False),
        ("14B", _BOTH, 5120, 40, 40, 17408, False),
        ("32B", ("",), 5120, 64, 64, 25600, False),  # its base was never published
    )
    for suffix in suffixes
}
"""The sizes of the encoder-decoder made from each Qwen3 by its hub id, from its config.json on
https://huggingface.co/Qwen/<name>. All have 151,936 rows, 8 key/value heads and heads of 128."""
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
    folder = Path(name).expanduser()
    if folder.is_dir():
        sizes = _stored_sizes(folder / "config.json")
    else:
        sizes = PUBLISHED.get(name) or _stored_sizes(_cached_config(name))
    if sizes.vocab_size != QWEN3_ROWS:
        return sizes  # other models' tokenizers are not looked at: their rows are taken to have room
    # Qwen3's embedding grows where the sentinels and mode tokens do not fit in.
    ids = QWEN3_IDS + section.num_sentinel_tokens + len(MODE_TOKENS) * config.data.use_mode_tokens
    return replace(sizes, vocab_size=max(QWEN3_ROWS, -(-ids // ROWS_MULTIPLE) * ROWS_MULTIPLE))


def adapter_parameters(sizes: ModelSizes, rank: int) -> int:
    """Parameters of LoRA adapters of `rank` on all seven projections of all layers (LoRA, arXiv 2106.09685).

    A projection from m to n numbers gets two matrices, of m x rank and rank x n.
    """
    shapes = parameter_shapes(sizes).items()
    return rank * sum(sum(shape) for name, shape in shapes if name.endswith("_proj.weight"))


def _stored_sizes(file: Path) -> Sizes:
    """The sizes in the `config.json` of a decoder-only Qwen3 or of an encoder-decoder made here."""
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


def _cached_config(name: str) -> Path:
    """The config.json of a hub repository's newest commit in the Hugging Face cache. ConfigError if it has none."""
    from huggingface_hub import try_to_load_from_cache  # takes a tenth of a second
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # no name of a repository
        if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
            return Path(found)
    meant = closest(name, PUBLISHED)
    raise ConfigError(
        f"model.model_name_or_path: {name} is not a local folder, not in the Hugging Face cache, and not one of the "
        f"models whose sizes are known here ({', '.join(PUBLISHED)}); nothing is downloaded for an estimate."
        f"{f' Did you mean {meant}?' if meant else ''} Give a folder that holds its config.json, or its sizes: "
        "model.architecture.hidden_size=… and so on, with model.tokenizer_name_or_path=builtin"
    )
