"""What no engine here can do is refused before anything is built."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine, compute_dtype
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engine.select import check_engine, create_engine
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.types import ConfigError

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


def test_fp16_without_sharding() -> None:
    """DeepSpeed 0.19.8 would divide its gradients by a loss scale that the loss was never multiplied by."""
    config = FullConfig.model_validate(
        {
            "training": {"fp16": True, "bf16": False},
            "infra": {"sharding_stage": "zero0", "offload_optimizer": "none"},
        }
    )
    ds_json = render_deepspeed_json(config, world_size=1, gradient_accumulation_steps=8, device="cpu")
    with pytest.raises(ConfigError, match=r"fp16.*zero0"):
        DeepSpeedEngine(config, MODEL, no_weights, ds_json, torch.device("cpu"))


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
