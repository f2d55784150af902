"""What no engine here can do is refused before anything is built."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.forward import compute_dtype
from ds_encdec.engine.layout import TAG, layout_of, write_layout
from ds_encdec.engine.select import check_checkpoint, check_engine, create_engine
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.types import CheckpointError, ConfigError

MODEL = Qwen3Seq2SeqConfig(num_hidden_layers=1)


def no_weights(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} was read although the run is refused")


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_absent_engines(kind: str) -> None:
    infra = {"distributed_type": kind, "sharding_stage": "zero0", "offload_optimizer": "none"}
    config = FullConfig.model_validate({"infra": infra})
    with pytest.raises(ConfigError, match=f"distributed_type={kind}.*not available yet"):
        create_engine(config, discover({}), torch.device("cpu"), MODEL, no_weights, 1)


@pytest.mark.parametrize("kind", ["deepspeed", "auto"])
def test_present_engines(kind: str) -> None:
    check_engine(FullConfig.model_validate({"infra": {"distributed_type": kind}}))


SAVED = {"training": {"bf16": True}, "infra": {"sharding_stage": "zero2"}}


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"infra": {"sharding_stage": "zero1"}}, 2, "sharding stage 2, but this run has sharding stage 1"),
        ({"training": {"bf16": False}}, 2, "dtype bfloat16, but this run has dtype float32"),
        ({}, 4, "world size 2, but this run has world size 4"),
    ],
)
def test_checkpoints_of_another_layout(
    tmp_path: Path, changes: dict[str, dict[str, Any]], ranks: int, message: str
) -> None:
    (tmp_path / TAG).mkdir()
    saved = FullConfig.model_validate(SAVED)
    world = dataclasses.replace(discover({}), world_size=2)
    write_layout(layout_of(saved, 2), tmp_path)
    check_checkpoint(saved, world, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(
            FullConfig.model_validate(SAVED | changes), dataclasses.replace(world, world_size=ranks), tmp_path
        )
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        check_checkpoint(saved, world, tmp_path / "nowhere")


def test_a_checkpoint_without_sharding_fits_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / TAG).mkdir()
    config = FullConfig.model_validate({"infra": {"sharding_stage": "zero0", "offload_optimizer": "none"}})
    write_layout(layout_of(config, 2), tmp_path)
    check_checkpoint(config, discover({}), tmp_path)


def test_checking_a_checkpoint_needs_neither_torch_nor_deepspeed() -> None:
    code = "import sys, ds_encdec.engine.layout; print({'torch', 'deepspeed'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"bf16": True}, torch.bfloat16),
        ({"bf16": False}, torch.float32),
        ({"bf16": False, "fp16": True}, torch.float16),
    ],
)
def test_compute_dtype(flags: dict[str, bool], dtype: torch.dtype) -> None:
    assert compute_dtype(FullConfig.model_validate({"training": flags}).training) is dtype
