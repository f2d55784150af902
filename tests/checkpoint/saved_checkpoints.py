"""Committed checkpoints of a tiny model, made by hand in one process and without an engine."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import TrainingState
from ds_encdec.checkpoint.manifest import MANIFEST, Manifest, record_file
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import DCP_FOLDER, TAG, EngineRecord, write_record
from ds_encdec.exports.adapters import BASE_RECORD
from ds_encdec.launch.run_folder import code_facts
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.tokenizer.sentinels import add_sentinels

WORDS = {"<pad>": 0, "<eos>": 1, "hello": 2, "world": 3}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
FORMED: dict[str, dict[str, Any]] = {
    "aligned": {"cross_attention": "aligned", "encoder_positions": "prefix", "encoder_heights": [1, 3]},
    "renormed": {"cross_attention": "renormed", "encoder_positions": "prefix", "encoder_heights": None},
    "final": {"cross_attention": "final", "encoder_positions": "unrotated", "encoder_heights": None},
}
State = dict[str, dict[str, Tensor]]
"""Kind → canonical name → full tensor."""


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel(WORDS, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    add_sentinels(made, 4, mode_tokens=False)
    return made


def config(**changes: Any) -> Qwen3Seq2SeqConfig:
    sizes = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_encoder_layers": 3,
        **FORMED["aligned"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "sentinel_token_ids": [4, 5, 6, 7],
    }
    return Qwen3Seq2SeqConfig(**{**sizes, **changes})


def random_state(model_config: Qwen3Seq2SeqConfig, seed: int) -> State:
    draw = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(model_config)
    return {kind: {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for kind in KINDS}


def save_checkpoint(
    folder: Path,
    step: int,
    state: State,
    model_config: Qwen3Seq2SeqConfig,
    *,
    engine: str = "dcp",
    run: FullConfig | None = None,
    base: dict[str, Any] | None = None,
) -> Path:
    """A whole checkpoint `folder`/step-N. `engine`: "dcp" or "deepspeed" (stage 0). `base`: the record of adapters'."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_tensors(path, state, engine, step)
    model_config.save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    (run or FullConfig()).to_yaml(path / "config.yaml")
    if base is not None:
        (path / "model" / BASE_RECORD).write_text(json.dumps(base))
    trainer = {"state": TrainingState(global_step=step, data_step=step, total_tokens_seen=5_000_000).to_dict()}
    (path / "trainer.json").write_text(json.dumps(trainer))
    (path / "data.json").write_text('{"lanes": []}')
    files = sorted(file for file in path.rglob("*") if file.is_file())
    manifest = Manifest(step, 1, engine, tuple(record_file(file, path) for file in files), True, **code_facts())
    (path / MANIFEST).write_text(manifest.to_json())
    return path


def write_tensors(path: Path, state: State, engine: str = "dcp", step: int = 3) -> None:
    names = tuple(state["weight"])
    if engine == "dcp":
        with warnings.catch_warnings(action="ignore"):  # it says that it saves in one process
            dcp.save(flat(state), checkpoint_id=path / DCP_FOLDER)
    else:
        (path / TAG).mkdir()
        moments = {
            number: {kind: state[kind][name] for kind in KINDS[1:]} | {"step": step}
            for number, name in enumerate(names)
        }
        groups = [{"params": list(range(len(names)))}]
        torch.save(
            {"module": state["weight"], "optimizer": {"state": moments, "param_groups": groups}},
            path / TAG / "mp_rank_00_model_states.pt",
        )
    write_record(EngineRecord(engine, "zero0", 1, step, (names,)), path)  # type: ignore[arg-type]


def flat(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


class Attribute:
    """Pickled as `getattr(owner, name)`: so are members of enumerations by Python 3.11.2."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (self.owner, self.name)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)
