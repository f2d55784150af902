"""Checkpoints of adapters (model.lora): their base, the merged model, and a folder for peft. `model/base.json` records
the base, which readers need: its place, seed, and the SHA-256 of its weight files."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_encdec.base.types import CheckpointError, ConfigError, WeightSource
from ds_encdec.checkpoint.folder import Checkpoint, refuse_existing, written_whole
from ds_encdec.checkpoint.manifest import DamagedCheckpointError, read_manifest
from ds_encdec.checkpoint.saved_state import saved_weights
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.config.schema import FullConfig, ModelConfig, load_saved
from ds_encdec.config.sections import LoraConfig as LoraSection
from ds_encdec.config.settings import show
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.exports.model_card import hub_id
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import form_settings
from ds_encdec.model.lora import merged_weights, peft_fields
from ds_encdec.model.parameter_count import is_adapter
from ds_encdec.model.source import Base, base_model
from ds_encdec.model.weights import refuse_non_finite
from ds_encdec.registry.objectives import OBJECTIVES
from ds_encdec.tokenizer.load import pretrained_tokenizer, write_tokenizer

BASE_RECORD, TEACHER_RECORD = "base.json", "teacher.json"


def base_record(name: str | None, base: Base) -> dict[str, Any]:
    """Return the record of a model `name` that a checkpoint does not hold, the adapters' base or a teacher, for people,
    for `opened_base` and for `refuse_other_teacher`."""
    folder = base.folder
    return {
        "name_or_path": name,
        "folder": None if folder is None else str(folder.resolve()),
        # Of a repository on the hub.
        "revision": folder.name if folder is not None and folder.parent.name == "snapshots" else None,
        "sha256": _digest(base),
        **{name: fact for name, fact in base.facts.items() if name not in ("shapes", "architecture")},
    }


def one_base(records: Sequence[dict[str, Any] | None], field: str) -> None:
    """Raise CheckpointError if machines have different models of `field`, which would mix in one."""
    found = {record["sha256"]: record for record in records if record is not None}
    if len(found) > 1:
        places = "; ".join(
            f"{record['folder']} (revision {record['revision'] or 'unknown'}, SHA-256 {digest[:12]}…)"
            for digest, record in found.items()
        )
        raise CheckpointError(f"{field} differs between machines: {places}. Give each the same copy.")


def opened_base(checkpoint: Path, section: ModelConfig, option: str, *, hashed: bool = True) -> Base:
    """Return the base of the adapters in `checkpoint`, from the place in `section`; `option` can name another. Raises
    CheckpointError if it is not there or, if `hashed`, has other weights."""
    path = checkpoint / "model" / BASE_RECORD
    try:
        record = read_json(path)
        seed, expected, name = (record[key] for key in ("seed", "sha256", "name_or_path"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error!r}.") from error
    place = section.model_name_or_path or "model.architecture"
    revision = f"revision {record['revision']}, " if record.get("revision") else ""
    wanted = f"{checkpoint} holds adapters of the base {name or 'of random weights'} ({revision}sha256 {expected})"
    try:
        base = base_model(section, Qwen3Seq2SeqConfig.from_pretrained(checkpoint / "model"), seed)
    except CheckpointError as error:
        raise CheckpointError(f"{wanted}, which cannot be read from {place}: {error}. Name it by {option}.") from error
    if hashed and (found := _digest(base)) != expected:
        raise CheckpointError(f"{wanted}, but {place} has other weights (sha256 {found}). Name their base by {option}.")
    return base


def refuse_other_teacher(checkpoint: Path, record: dict[str, Any]) -> None:
    """Raise CheckpointError if `checkpoint` was made beside another teacher than that of `record`."""
    path = checkpoint / "model" / TEACHER_RECORD
    saved = read_json(path) if path.is_file() else record  # none was there
    if saved["sha256"] != record["sha256"]:
        raise CheckpointError(
            f"{checkpoint} was trained beside the teacher {saved['name_or_path']} (sha256 {saved['sha256']}), but "
            f"training.teacher={record['name_or_path']} has other weights (sha256 {record['sha256']}). Name that one, "
            "or start a new run from the checkpoint's export."
        )


def trained_weights(checkpoint: Path, base: str | None = None) -> WeightSource:
    """Return a checkpoint's float32 weights, adapters merged into their base (at `base`). Raises CheckpointError."""
    saved = saved_weights(open_saved_state(checkpoint))
    section = load_saved(checkpoint / "config.yaml").model
    if section.lora is None:
        if base is not None:
            raise CheckpointError(f"--base: {checkpoint} holds a whole model, and no adapters of another")
        return saved
    place = section if base is None else section.model_copy(update={"model_name_or_path": base})
    return merged_weights(opened_base(checkpoint, place, "--base").weights, saved, section.lora)


def export_adapter(checkpoint: Path, out: Path, *, base: str | None = None) -> None:
    """Write the adapters as a folder for peft, which names `base`, else the run's own. Raises CheckpointError."""
    from safetensors.torch import save_file

    refuse_existing(out)  # before minutes of reading
    try:
        from peft import LoraConfig, TaskType
    except ImportError as error:
        raise ConfigError("--adapter needs peft, which is not installed: pip install 'ds_encdec[lora]'") from error
    path = checkpoint.expanduser().resolve()
    config = load_saved(path / "config.yaml")
    lora = config.model.lora
    if lora is None:
        raise CheckpointError(f"--adapter: {path} holds a whole model, and no adapters (model.lora)")
    if OBJECTIVES[config.data.objective].encoder_only:
        raise CheckpointError(
            f"--adapter: {path} is of an encoder alone, whose base no folder holds: leave it out, to merge"
        )
    saved = open_saved_state(path)
    tensors = {
        f"base_model.model.{name}": saved_weights(saved)(name).contiguous() for name in filter(is_adapter, saved.shapes)
    }
    for name, tensor in tensors.items():
        refuse_non_finite(name, tensor)
    if base is not None:
        # Raises unless it is their base.
        opened_base(path, config.model.model_copy(update={"model_name_or_path": base}), "--base")
    with written_whole(out) as (unfinished, writing):
        writing.require_space(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
        LoraConfig(
            **peft_fields(lora),
            task_type=TaskType.SEQ_2_SEQ_LM,
            inference_mode=True,
            base_model_name_or_path=base or config.model.model_name_or_path,
        ).save_pretrained(str(unfinished))
        write_tokenizer(pretrained_tokenizer(str(path / "model"), field="CHECKPOINT"), unfinished)
        (unfinished / "README.md").write_text(_card(path, config, lora, base))


def _card(checkpoint: Path, config: FullConfig, lora: LoraSection, base: str | None) -> str:
    record = read_json(checkpoint / "model" / BASE_RECORD)
    step = Checkpoint(checkpoint, read_manifest(checkpoint)).training_state().global_step
    # An id on the hub, or a folder's path; None for random weights.
    place = base or (record["name_or_path"] if record["revision"] else record["folder"])
    made = Qwen3Seq2SeqConfig.from_pretrained(checkpoint / "model")
    chosen = form_settings(config.model, made).items()
    form = "".join(f" 'model.{name}={show(value)}'" for name, value in chosen if value is not None)
    return f"""---
library_name: peft
{f"base_model: {place}" if hub_id(place) else "tags: [lora]"}
---

# Adapters of an encoder-decoder

LoRA adapters (rank {lora.r}, alpha {lora.lora_alpha:g}; {", ".join(lora.target_modules)}), trained with ds_encdec for
{step:,} steps beside {f"`{place}`" if place else "random weights"}, seed {record["seed"]} (sha256 of the base:
`{record["sha256"]}`).

peft loads them onto that model in the form of ds_encdec's exports, which contain their code. A decoder-only base
gets that form by `ds-encdec init-model --from BASE --num-sentinel-tokens {config.model.num_sentinel_tokens} --seed
{record["seed"]} --out FOLDER{form}`.

```python
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

base = AutoModelForSeq2SeqLM.from_pretrained({json.dumps(place or "BASE", ensure_ascii=False)}, trust_remote_code=True)
model = PeftModel.from_pretrained(base, ".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

`ds-encdec export CHECKPOINT OUT` without `--adapter` writes the merged model, which needs neither peft nor the base.
"""


def _digest(base: Base) -> str:
    return hashlib.sha256(json.dumps(base.facts, sort_keys=True).encode()).hexdigest()
