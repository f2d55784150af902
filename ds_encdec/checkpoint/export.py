"""A trained model as an ordinary Hugging Face folder.

The folder carries the modelling code, so `AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)` loads
it where ds_encdec and deepspeed are not installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ds_encdec.checkpoint.convert import checkpoint_weights
from ds_encdec.config.schema import FullConfig
from ds_encdec.model import attention, configuration, loss, modeling, precision
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import count_parameters, parameter_shapes
from ds_encdec.model.safetensors_folder import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import CheckpointError, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMOTE_CODE = (configuration, precision, attention, loss, modeling)
"""The modules copied into the folder. They import each other relatively, and nothing else of ds_encdec."""

AUTO_MAP = {
    "AutoConfig": "configuration.Qwen3Seq2SeqConfig",
    "AutoModelForSeq2SeqLM": "modeling.Qwen3ForSeq2SeqLM",
}


def export_hf(
    weights: WeightSource,
    config: Qwen3Seq2SeqConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    card: str,
) -> None:
    """Write the folder `out`: weights (safetensors, tied ones once), configuration, code, tokenizer and model card.

    Weights are fetched, converted to `dtype` and written one by one. The folder appears at `out` only when it is
    complete; an unfinished one stays behind as `out` + `.tmp` and is replaced by the next attempt. Raises
    CheckpointError if `out` exists and is not empty.
    """
    _refuse_existing(out)
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_safetensors_folder(
        unfinished, parameter_shapes(config), weights, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    _write_configuration(config, dtype, unfinished)
    for module in REMOTE_CODE:
        shutil.copyfile(str(module.__file__), unfinished / Path(str(module.__file__)).name)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    (unfinished / "README.md").write_text(card)
    unfinished.replace(out)


def export_checkpoint(checkpoint: Path, out: Path, *, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Export a committed checkpoint, with a model card written from its run. Raises CheckpointError."""
    _refuse_existing(out)  # before minutes of reading
    path = checkpoint.expanduser().resolve()
    weights = checkpoint_weights(path)
    facts = {
        "config": FullConfig.from_yaml(path / "config.yaml").model_dump(mode="json"),
        "state": json.loads((path / "trainer.json").read_text())["state"],
        "checkpoint": path.name,
    }
    export_hf(
        weights,
        Qwen3Seq2SeqConfig.from_pretrained(path / "model"),
        pretrained_tokenizer(str(path / "model"), field="CHECKPOINT"),
        out,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        card=model_card(facts),
    )


def _refuse_existing(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: nothing was written. Name another folder")


def _write_configuration(config: Qwen3Seq2SeqConfig, dtype: torch.dtype, folder: Path) -> None:
    fields = {
        **config.to_dict(),
        "architectures": ["Qwen3ForSeq2SeqLM"],
        "auto_map": AUTO_MAP,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    ).save_pretrained(folder)


def model_card(facts: Mapping[str, Any]) -> str:
    """A model card (Markdown with Hugging Face's YAML header) from a run's own facts.

    `facts`: `config` (a `FullConfig` as a dict), `state` (a `TrainingState` as a dict), `checkpoint` (its name).
    """
    config, state = facts["config"], facts["state"]
    model, data, training = config["model"], config["data"], config["training"]
    start = model["model_name_or_path"] if model["architecture"] is None else "random weights"
    best = state["best_eval_loss"]
    rows = {
        "Started from": f"`{start}`" if model["architecture"] is None else start,
        "Checkpoint": f"`{facts['checkpoint']}`",
        "Optimizer steps": f"{state['global_step']:,} of {training['num_train_steps']:,}",
        "Encoder tokens seen": f"{state['encoder_tokens_seen']:,}",
        "Target tokens seen": f"{state['target_tokens_seen']:,}",
        "Best held-out loss (nats per target token)": "not evaluated" if best is None else f"{best:.4f}",
        "Data": _data_in_words(data),
        "UL2 weights (R1, R2, X1, X2, S)": ", ".join(f"{weight:g}" for weight in data["ul2_task_weights"]),
        "Longest encoder and decoder sequence (tokens)": f"{data['max_encoder_length']}, {data['max_decoder_length']}",
        "Peak learning rate, schedule": f"{training['learning_rate']:g}, {training['lr_scheduler_type']}",
        "Weight decay, gradient clipping": f"{training['weight_decay']:g}, {training['max_grad_norm']:g}",
        "Precision": "bfloat16" if training["bf16"] else "float16" if training["fp16"] else "float32",
        "Seed": str(training["seed"]),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return _CARD.format(base_model=_base_model_line(model), table=table)


def untrained_model_card(description: str, config: Qwen3Seq2SeqConfig) -> str:
    """The card of a model that was initialised and not trained yet. `description`: where its weights come from."""
    rows = f"| Weights | {description} |\n| Parameters | {count_parameters(config):,} |\n| Training | none yet |"
    return _CARD.format(base_model="", table=rows)


def _base_model_line(model: Mapping[str, Any]) -> str:
    name = model["model_name_or_path"]
    is_hub_id = model["architecture"] is None and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return f"base_model: {name}\n" if is_hub_id else ""


def _data_in_words(data: Mapping[str, Any]) -> str:
    if data["mixture"]:
        return ", ".join(f"`{source['dataset_name']}` × {source['weight']:g}" for source in data["mixture"])
    return f"`{data['dataset_name']}`" + (f" ({data['dataset_config']})" if data["dataset_config"] else "")


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [encoder-decoder, ul2, qwen3]
{base_model}---

# Qwen3 encoder-decoder

An encoder-decoder made of Qwen3 layers (`Qwen3ForSeq2SeqLM`): bidirectional encoder, decoder with merged attention over
the encoder's output and its own past. Made with ds_encdec for pre-training on UL2's mixture of denoisers.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("The capital of France is <extra_id_0>.", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

`<extra_id_0>`, `<extra_id_1>`, … in the input mark gaps; the output repeats each with the text that fills it. An input
without them is a prefix, and the output continues it.
"""
