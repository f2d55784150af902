"""What a model folder's `config.json` says is read as transformers reads it, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import qwen3_folder, resolve
from transformers import AutoConfig, Qwen3ForCausalLM

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.evaluate.models import open_model
from ds_encdec.memory.job import run_sizes
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

SIZES: dict[str, Any] = {**tiny_models.SIZES, "num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 64}
OLD = {"model_type": "qwen3", **SIZES, "rope_theta": 1e6, "rope_scaling": None}
"""As transformers 4 writes it, and as the hub has it."""
NEW = {"model_type": "qwen3", **SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
"""As transformers 5 writes it."""
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    "fields",
    [
        OLD,
        NEW,
        OLD | {"rope_scaling": {"type": "default"}},
        OLD | {"rope_parameters": {"rope_theta": 1e6}},
        NEW | {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        NEW | {"rope_scaling": {}, "rope_theta": None},
        without(OLD, "head_dim"),
        OLD | {"num_key_value_heads": None},
        OLD | SLIDING | {"max_window_layers": 3},
        OLD | SLIDING,
        OLD | SLIDING | {"layer_types": ["full_attention"] * 3, "max_window_layers": 0},
        OLD | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        OLD | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ],
)
def test_a_configuration_is_read_as_transformers_reads_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    read = read_stored_model(written(tmp_path, fields))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert set(theirs.layer_types) == {"full_attention"}
    rope = {name: theirs.rope_parameters[name] for name in ("rope_type", "rope_theta")}
    assert read["rope_parameters"] == rope
    for name in (*SIZES, "num_key_value_heads"):
        assert read[name] == getattr(theirs, name), name
    sizes = run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))
    assert (sizes.num_key_value_heads, sizes.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (NEW | {"rope_scaling": YARN}, r"rope type 'yarn' \(rope_scaling\)"),
        (OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        (NEW | {"rope_parameters": {**YARN, "rope_theta": 1e6}}, r"rope type 'yarn' \(rope_parameters\)"),
        (NEW | {"model_type": "qwen3_seq2seq", "rope_scaling": YARN}, "rope type 'yarn'"),
        (NEW | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "not one block for all layers"),
        (NEW | {"rope_theta": 1e6}, r"rope_theta is 1e\+06 and rope_parameters.rope_theta is 5e\+06: keep the one"),
        (NEW | {"rope_scaling": {"rope_theta": 1e4}}, "keep the one that the model was trained with"),
        (NEW | {"rope_scaling": {"type": "default"}}, "rope_scaling.rope_theta is 10000"),  # as transformers takes it
        (without(OLD, "rope_theta"), "lacks rope_theta: write the base"),
        (
            without(OLD, "rope_theta") | {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            "lacks rope",
        ),
        (OLD | {"rope_theta": "1e6"}, "rope_theta is '1e6': needed is a number above 0"),
        (OLD | SLIDING | {"max_window_layers": 2}, "not supported: use_sliding_window"),
        (OLD | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "use_sliding_window"),
        (OLD | {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\).* take the unquantized folder"),
        (OLD | {"head_dim": None}, r"lacks head_dim \(whole numbers above 0\)"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_a_run_and_by_its_estimate(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    written(tmp_path, fields)
    with pytest.raises(CheckpointError, match=message):
        resolve(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run_sizes(load_config(None, [f"model.model_name_or_path={tmp_path}"]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_weights_that_are_stored_as_other_numbers_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    qwen3_folder(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(dtype)}, file)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name} is stored as .*Take the unquantized"):
        resolve(tmp_path)


def test_a_single_file_goes_before_an_index_that_is_left_over(tmp_path: Path) -> None:
    qwen3_folder(tmp_path, max_shard_size="20KB")
    qwen3_folder(tmp_path / "whole", seed=1)
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    name = "model.layers.0.mlp.up_proj.weight"
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path).state_dict()[name]
    ours = resolve(tmp_path).weights(name.replace("model.", "decoder."))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters has the rope type 'linear'"),
        ({"rope_scaling": YARN}, "rope_scaling has the rope type 'yarn', which this model does not compute"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling has the rope type 'dynamic'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, r"bases \[10000.0, 1000000.0\] differ"),
    ],
)
def test_a_rotation_that_an_export_does_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    Qwen3Seq2SeqConfig(**SIZES).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        Qwen3Seq2SeqConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path, torch.device("cpu"))
    assert Qwen3Seq2SeqConfig(rope_theta=5e5).rope_parameters["rope_theta"] == 5e5
