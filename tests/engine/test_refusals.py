"""Which engine runs, and what none of them can do and is refused before anything is built."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine
from ds_encdec.engine.ds_json import render_deepspeed_json
from ds_encdec.engine.forward import compute_dtype
from ds_encdec.engine.select import resolve_engine
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.types import ConfigError

MODEL = Qwen3Seq2SeqConfig(num_hidden_layers=1)


@pytest.mark.parametrize(
    ("kind", "engine"), [("deepspeed", "deepspeed"), ("auto", "deepspeed"), ("fsdp", "fsdp"), ("ddp", "fsdp")]
)
def test_engines_by_name(kind: str, engine: str) -> None:
    infra = {"distributed_type": kind, "offload_optimizer": "none", "sharding_stage": "zero0"}
    assert resolve_engine(FullConfig.model_validate({"infra": infra})) == engine


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    infra = {"offload_optimizer": "none"}
    assert resolve_engine(FullConfig.model_validate({"infra": {"distributed_type": "auto", **infra}})) == "fsdp"
    with pytest.raises(ConfigError, match=r"deepspeed is not installed.*infra\.distributed_type=fsdp"):
        resolve_engine(FullConfig.model_validate({"infra": infra}))


@pytest.mark.parametrize(
    ("infra", "message"),
    [
        ({"offload_optimizer": "nvme", "nvme_path": "/local"}, r"infra\.offload_optimizer=nvme"),
        ({"offload_params": "nvme", "nvme_path": "/local"}, r"infra\.offload_params=nvme"),
        (
            {"deepspeed_extra": {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}},
            r"offload_optimizer\.ratio=0\.5 in infra\.deepspeed_extra",
        ),
    ],
)
def test_states_that_no_checkpoint_would_hold(infra: dict[str, Any], message: str) -> None:
    config = FullConfig.model_validate({"infra": infra})
    rendered = render_deepspeed_json(config, world_size=1, gradient_accumulation_steps=1, device="cpu")
    with pytest.raises(ConfigError, match=message):
        DeepSpeedEngine(config, MODEL, None, rendered, torch.device("cpu"))


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
