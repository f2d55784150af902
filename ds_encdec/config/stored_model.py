"""Read the `config.json` of a model folder as transformers does, and refuse models that the engine cannot train. It
needs neither torch nor transformers, so an estimate and a run read the same sizes by the same rules."""

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.yaml.plain_files import read_json

DECODER_ONLY = "qwen3"
OF_OUR_OWN = "qwen3_seq2seq"
COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Sizes that every `config.json` has: whole numbers above 0."""
_HEAD_DIM = 128
"""The width that transformers' Qwen3 uses if `head_dim` is missing, whatever the hidden size."""


def read_stored_model(file: Path) -> dict[str, Any]:
    """Return the fields of the `config.json` of a decoder-only Qwen3, or of an encoder-decoder made here. Fields that
    may be missing or written in two ways are normalized: `num_key_value_heads`, `head_dim`, and `rope_parameters` with
    its `rope_theta`. Raises CheckpointError for an unreadable file, another model, and unsupported features."""
    try:
        stored: dict[str, Any] = read_json(file)
        if not isinstance(stored, dict):
            raise ValueError("it is no { ... } block")
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}: it is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    if (found := stored.get("model_type")) not in (DECODER_ONLY, OF_OUR_OWN):
        raise CheckpointError(
            f"{file}: model_type is {found!r}; needed is {DECODER_ONLY!r} (a dense decoder-only Qwen3) or "
            f"{OF_OUR_OWN!r} (an encoder-decoder made here)"
        )
    if how := stored.get("quantization_config") or stored.get("compression_config"):
        method = how.get("quant_method") if isinstance(how, dict) else None
        raise CheckpointError(
            f"{file}: the weights are quantized ({method or 'quantization_config'}), which is not trained here: take "
            "the unquantized folder"
        )
    if stored.get("num_key_value_heads", 0) is None:
        stored["num_key_value_heads"] = stored.get("num_attention_heads")
    stored.setdefault("head_dim", _HEAD_DIM)
    if wrong := [name for name in (*COUNTS, "head_dim") if not _is_count(stored.get(name))]:
        raise CheckpointError(f"{file} lacks {', '.join(wrong)} (whole numbers above 0)")
    if names := [name for name, present in _unsupported(stored) if present]:
        raise CheckpointError(f"{file}: not supported: {', '.join(names)}")
    try:
        rope = _rope(stored)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    kept = {name: value for name, value in stored.items() if name not in ("rope_scaling", "rope_theta")}
    return kept | {"rope_parameters": rope}


def untrained_rows(name: str, stored: Mapping[str, Any], *, asks_for_modes: bool) -> str:
    """Return a message that an encoder-decoder lacks special tokens which adapters would not train, and the fix."""
    sentinels, modes = (len(stored.get(field) or ()) for field in ("sentinel_token_ids", "mode_token_ids"))
    return (
        f"{name} has {sentinels} sentinels and {modes} mode tokens, and model.lora does not train rows of further "
        f"ones: set model.num_sentinel_tokens={sentinels}"
        + (" and data.use_mode_tokens=false" if asks_for_modes and not modes else "")
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unsupported(stored: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each unsupported feature, and whether the model has it."""
    yield "attention_bias", bool(stored.get("attention_bias"))
    kinds = stored.get("layer_types")
    if kinds is None:
        slides = stored.get("use_sliding_window") and stored.get("sliding_window", 4096) is not None
        first = stored.get("max_window_layers", 28)  # from this layer on
        sliding = bool(slides) and not (isinstance(first, int) and first >= stored["num_hidden_layers"])
    else:
        sliding = not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    yield "use_sliding_window (layers that attend over a window)", sliding


def _rope(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding, of type default, with its base `rope_theta`. Raises ValueError for any other, and if
    bases disagree: transformers 5 takes the first of `rope_scaling` (the older name), `rope_parameters` and the base
    beside them, but one is left over from an edit, and nobody can see which."""
    bases: dict[str, Any] = {"rope_theta": stored.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        if not (rope := stored.get(name)):
            continue
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"not supported: {name} = {rope!r}, which is not one block for all layers")
        for kind in (rope.get("rope_type", "default"), rope.get("type", "default")):
            if kind != "default":
                raise ValueError(f"not supported: rope type {kind!r} ({name})")
        bases[f"{name}.rope_theta"] = rope.get("rope_theta")
    if bases["rope_theta"] is None and bases.get("rope_scaling.rope_theta", 0) is None:
        beside = bases.get("rope_parameters.rope_theta")
        bases["rope_scaling.rope_theta"] = None if beside is None else 10_000.0
    known = {name: base for name, base in bases.items() if base is not None}
    for name, base in known.items():
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < inf:
            raise ValueError(f"{name} is {base!r}: needed is a number above 0")
    if len(set(known.values())) > 1:
        named = " and ".join(f"{name} is {base:g}" for name, base in known.items())
        raise ValueError(f"{named}: keep the one that the model was trained with")
    if not known:
        raise ValueError("it lacks rope_theta: write the base that the model was trained with, as its publisher has it")
    return {"rope_type": "default", "rope_theta": next(iter(known.values()))}
