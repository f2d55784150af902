"""Find the folder of a model or tokenizer, and read its files as transformers does, refusing models that the engine
cannot train. It needs neither torch nor transformers, so estimates and runs read the same sizes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_encdec.base.types import CheckpointError
from ds_encdec.config.yaml.plain_files import open_plain, read_json
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.families import (
    ACTIVATIONS,
    ENCODER_ALONE,
    FAMILIES,
    OF_OUR_OWN,
    OWN,
    ROPE_KINDS,
    Family,
    unknown_family,
)
from ds_encdec.registry.objectives import OBJECTIVES

if TYPE_CHECKING:  # `--help` does not wait for pydantic
    from ds_encdec.config.sections import Sections

# Files downloaded for a model (none that would have to be unpickled or executed), and for a tokenizer.
MODEL_FILES = ("*.json", "*.safetensors")
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja")
# Optional tokens that name the denoiser of an example, in the order of `DENOISERS`.
MODE_TOKENS = tuple(f"<denoiser_{name}>" for name in DENOISERS)
COUNTS = (  # the sizes that every `config.json` has: whole numbers above 0
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def is_hub_name(name_or_path: str) -> bool:
    """Return whether this may be a hub repository, `OWNER/NAME`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name_or_path, re.ASCII) is not None


def model_folder(name_or_path: str, files: Sequence[str] = MODEL_FILES, *, field: str) -> Path:
    """Return the local folder, or a hub repository's snapshot with `files` (patterns; by default a model's), downloaded
    unless it is cached. Raises CheckpointError that names `field` if it is not there, or the hub cannot be reached."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path):
        return path
    if not is_hub_name(name_or_path):
        raise CheckpointError(f"{field}: the folder {name_or_path} does not exist")
    # Imported here: local folders, `--help` and `validate` do not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{field}: {name_or_path} is not a local folder, is not in the Hugging Face cache, and could not be "
            f"downloaded ({type(error).__name__}: {str(error).splitlines()[0]}). Check its name and the network (and "
            "HF_TOKEN for a gated one), or download it elsewhere and give the folder's path"
        ) from error


def read_stored_model(file: Path) -> dict[str, Any]:
    """Return the fields of the `config.json` of a decoder that has a row in `FAMILIES`, or of an encoder-decoder made
    or encoder made here, and our own fields of its layers (`LAYER`). An encoder alone is a model of ours without
    decoder layers. Fields that may be missing or written in two ways are normalized:
    the family's defaults, `num_key_value_heads`, `head_dim`, and `rope_parameters` with its `rope_theta`. Raises
    CheckpointError for an unreadable file, another model, and unsupported features."""
    try:
        stored = read_json(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}: it is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    require_recorded_code(file.parent, stored)
    is_ours = stored.get("model_type") in (OF_OUR_OWN, ENCODER_ALONE)
    family = OWN if is_ours else FAMILIES.get(str(stored.get("model_type")))
    if family is None:
        raise CheckpointError(f"{file}: {unknown_family(stored)}")
    if how := stored.get("quantization_config") or stored.get("compression_config"):
        method = how.get("quant_method") if isinstance(how, dict) else None
        raise CheckpointError(
            f"{file}: the weights are quantized ({method or 'quantization_config'}): take the unquantized folder"
        )
    stored = {**family.defaults, **stored}
    if stored.get("num_key_value_heads", 0) is None:
        stored["num_key_value_heads"] = stored.get("num_attention_heads")
    if stored.get("head_dim") is None and "head_dim" not in family.defaults:
        hidden, heads = stored.get("hidden_size"), stored.get("num_attention_heads")
        stored["head_dim"] = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    if wrong := [
        name
        for name in (*COUNTS, "head_dim", "max_position_embeddings")
        if not isinstance(number := stored.get(name), int) or isinstance(number, bool) or number < 1
    ]:
        raise CheckpointError(f"{file} lacks {', '.join(wrong)} (whole numbers above 0)")
    try:
        if unsupported := _unsupported(stored):
            raise ValueError(f"not supported: {unsupported}")
        for name in ("rms_norm_eps", "initializer_range"):
            _require_positive(name, stored.get(name, 1))
        layer, rope = family.layer_of(stored), {"rope_parameters": _rope(stored, family)}
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    others = {name: value for name, value in stored.items() if name not in ("rope_scaling", "rope_theta")}
    if stored["model_type"] == ENCODER_ALONE:
        others |= {"num_encoder_layers": stored["num_hidden_layers"], "num_hidden_layers": 0, "model_type": OF_OUR_OWN}
    return others | layer | rope


def teacher_place(config: Sections) -> str | None:
    """Return the folder or hub id of the teacher, if there is one."""
    name = config.training.teacher
    return config.model.model_name_or_path if name == "source" else name


def teacher_problem(config: Sections, stored: Mapping[str, Any]) -> str | None:
    """Return why the model whose `config.json` has the fields `stored` cannot be the teacher of a run, else None."""
    data, is_decoder = config.data, stored["model_type"] in FAMILIES
    if not stored["num_hidden_layers"]:
        return "it is an encoder alone, which predicts no tokens: name a decoder"
    if not is_decoder and config.training.teacher == "source":
        return "model.model_name_or_path is no decoder that a model is made from: name the teacher's folder"
    if is_decoder and not OBJECTIVES[data.objective].continues(data):
        return "a decoder teaches only outputs that go on with their input: raise S in data.ul2_task_weights"
    no_modes = "a decoder knows no mode tokens: set data.use_mode_tokens=false"
    return no_modes if is_decoder and data.use_mode_tokens else None


def require_recorded_code(folder: Path, stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the code files in `folder` have the SHA-256 that its `config.json`, which holds the
    fields `stored`, records. Downloads without them pass. No code from the folder is run here, but by transformers."""
    recorded = stored.get("code_sha256")
    for name, sha256 in recorded.items() if isinstance(recorded, dict) else ():
        try:
            with open_plain(folder / name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    continue
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        raise CheckpointError(
            f"{folder / name}: its SHA-256 is not the one in config.json, so the model's code was changed or damaged "
            "after the export. Export the checkpoint again, or copy the folder again from where you have it"
        )


def _unsupported(stored: Mapping[str, Any]) -> str | None:
    """Return the field by which a model computes what no layer here does, such as attention over a window that is
    shorter than its texts, else None."""
    if stored.get("is_causal") is False:
        return "is_causal = false: its layers look both ways, and a decoder's do not"
    if (activation := stored.get("hidden_act", ACTIVATIONS[0])) not in ACTIVATIONS:
        return f"hidden_act = {activation!r}; known are {', '.join(ACTIVATIONS)}"
    if (kinds := stored.get("layer_types")) is not None:
        others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
        return f"layer_types has {others[0]!r}: its layers do not attend to all" if others else None
    window, first = stored.get("sliding_window"), stored.get("max_window_layers", 0)
    if not stored.get("use_sliding_window", True) or not isinstance(window, int):
        return None
    if (isinstance(first, int) and first >= stored["num_hidden_layers"]) or window >= stored["max_position_embeddings"]:
        return None
    return (
        f"sliding_window = {window}, over which its layers attend. If no text is longer, set it to null: the results "
        "are the same"
    )


def untrained_rows(name: str, stored: Mapping[str, Any], *, asks_for_modes: bool) -> str:
    """Return a message that an encoder-decoder lacks special tokens which adapters would not train, and the fix."""
    sentinels, modes = (len(stored.get(field) or ()) for field in ("sentinel_token_ids", "mode_token_ids"))
    return (
        f"{name} has {sentinels} sentinels and {modes} mode tokens, and model.lora does not train rows of further "
        f"ones: set model.num_sentinel_tokens={sentinels}"
        + (" and data.use_mode_tokens=false" if asks_for_modes and not modes else "")
    )


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{name} is {value!r}: needed is a number above 0")


def _rope(stored: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the rotary embedding with its base `rope_theta`. `dynamic` becomes `default`, which it equals up to
    `max_position_embeddings`; beyond, it depends on the longest text of a batch. Raises ValueError for unknown kinds,
    and if bases disagree: transformers 5 takes the first of `rope_scaling` (the older name), `rope_parameters` and the
    base beside them, but one is left over from an edit, and nobody can see which."""
    bases: dict[str, Any] = {"rope_theta": stored.get("rope_theta")}
    blocks: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if not (rope := stored.get(name)):
            continue
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"not supported: {name} = {rope!r}, which is not one block for all layers")
        blocks[name], bases[f"{name}.rope_theta"] = rope, rope.get("rope_theta")
    known = {name: base for name, base in bases.items() if base is not None}
    if not known and family.rope_theta is not None:
        known["rope_theta"] = family.rope_theta
    for name, base in known.items():
        _require_positive(name, base)
    if len(set(known.values())) > 1:
        named = " and ".join(f"{name} is {base:g}" for name, base in known.items())
        raise ValueError(f"{named}: keep the one that the model was trained with")
    if not known:
        raise ValueError("it lacks rope_theta: write the base that the model was trained with, as its publisher has it")
    name, block = list(blocks.items())[-1] if blocks else ("rope_parameters", {})
    kind = block.get("rope_type", block.get("type", "default"))
    if kind not in family.rope_kinds:
        raise ValueError(f"not supported: rope type {kind!r} ({name}); known are {', '.join(family.rope_kinds)}")
    if (share := block.get("partial_rotary_factor", stored.get("partial_rotary_factor"))) not in (None, 1):
        raise ValueError(f"not supported: partial_rotary_factor = {share!r}, rotation of a part of each head")
    base = next(iter(known.values()))
    if kind in ("default", "dynamic"):
        return {"rope_type": "default", "rope_theta": base}
    original, made = "original_max_position_embeddings", {**block, "rope_type": kind, "rope_theta": base}
    beside = stored.get(original) if kind != "linear" else None
    if beside is not None and made.setdefault(original, beside) != beside:
        raise ValueError(f"{original} is {beside}, but {made[original]} in {name}: keep the right one")
    for field in (*ROPE_KINDS[kind], original, "attention_factor", "beta_fast", "beta_slow"):
        if field in ROPE_KINDS[kind] or made.get(field) is not None:
            _require_positive(f"{name}.{field}", made.get(field))
    return {key: value for key, value in made.items() if key not in ("type", "partial_rotary_factor")}


def sentinel(index: int) -> str:
    """Return the text of sentinel number `index`, counted from 0."""
    return f"<extra_id_{index}>"


def too_few_rows(rows: int, ids: int) -> str | None:
    """Return an error message if an embedding of `rows` is too small for a tokenizer of `ids`, else None."""
    return None if ids <= rows else f"the tokenizer's ids reach {ids - 1}: set it to at least {ids}"


def tokenizer_lacks_rows(config: Sections) -> str | None:
    """Return an error if `model.architecture.vocab_size` is too small for a tokenizer in a folder here, else None."""
    section = config.model
    file = os.path.join(os.path.expanduser(section.tokenizer_name_or_path or ""), "tokenizer.json")
    if section.architecture is None or section.tokenizer_name_or_path is None or not os.path.isfile(file):
        return None
    from tokenizers import Tokenizer  # rarely needed

    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception:  # it raises no other kind
        return None
    modes = MODE_TOKENS if config.data.use_mode_tokens else ()
    tokenizer.add_special_tokens([*map(sentinel, range(section.num_sentinel_tokens)), *modes])
    return too_few_rows(section.architecture.vocab_size, max(tokenizer.get_vocab().values()) + 1)
