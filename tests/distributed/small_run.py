"""The run that all engines are compared on: a tiny model, its weights, its lanes of micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from packed_batches import random_batch
from torch import Tensor

from ds_encdec.base.types import Batch
from ds_encdec.config.schema import FullConfig, InfraConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import merged_weights
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import is_adapter

ACCUMULATION = 3  # a first micro-batch, a last one, and one that is neither
SHORT_ACCUMULATION = 2
STEPS = 8  # the whole schedule
# The warmup and one more. With more of them, rounding grows beyond what is told apart from a fault.
SHORT_STEPS = 3
REGULARIZED = {"residual_dropout": 0.1, "attention_dropout": 0.2, "label_smoothing": 0.1, "z_loss": 1e-2}
OWN_OPTIMIZER = {"optimizer": "own_optimizers:Momentum", "optimizer_args": {"beta": 0.8}}


def small_model(**changed: Any) -> Qwen3Seq2SeqConfig:
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "loss_chunk_tokens": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    return Qwen3Seq2SeqConfig(**fields | changed)


MODEL = small_model()
SHORT_MODEL = small_model(num_hidden_layers=1)
"""MODEL's first layers, for runs of ZeRO whose subject is not the layers: going on, loading, refusing."""


def run_config(**overrides: Any) -> FullConfig:
    """A small float32 run. `overrides`: fields of `training` and `infra`, and of `model` `lora`, by name."""
    lora = overrides.pop("lora", None)
    training: dict[str, Any] = {
        "bf16": False,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,  # far below the norms that occur: every step is clipped
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_steps": STEPS,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "activation_checkpointing": "none",
    }
    infra: dict[str, Any] = {"device": "cpu", "offload_optimizer": "none", "sharding_stage": "zero3"}
    if overrides.get("sharding_stage", "zero3") == "zero3":
        # Otherwise parameters as small as these stay whole on every rank, and nothing is ever gathered.
        infra["deepspeed_extra"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    for name, value in overrides.items():
        (infra if name in InfraConfig.model_fields else training)[name] = value
    return FullConfig.model_validate({"model": {"lora": lora}, "training": training, "infra": infra})


def generating_weights(saved: Mapping[str, Tensor], **overrides: Any) -> dict[str, Tensor]:
    """What a model to generate with has for the `saved` weights: adapters merged, in the compute dtype."""
    dtype, lora = torch.bfloat16 if overrides.get("bf16") else torch.float32, run_config(**overrides).model.lora
    rounded = {name: weight.to(dtype) for name, weight in saved.items()}
    if lora is None:
        return rounded

    def lookup(name: str, rows: slice = slice(None), /) -> Tensor:
        return rounded[name][rows]

    merged = merged_weights(lookup, lookup, lora)
    return {name: merged(name).to(dtype) for name in rounded if not is_adapter(name)}


LORA: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.0}}
NF4: dict[str, Any] = {"lora": LORA["lora"] | {"quantize": "nf4"}}
FREEZE: dict[str, Any] = {"freeze": ("encoder.*", "shared.weight", "*.mlp.*")}
"""Runs that train adapters, and the decoder's attention and norms, alone."""


@functools.cache
def _weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    shapes = {name: parameter.shape for name, parameter in Qwen3ForSeq2SeqLM(MODEL).named_parameters()}
    return {
        name: torch.randn(shape, generator=draw) * 0.15 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def weights(name: str, rows: slice = slice(None), /) -> Tensor:
    """A WeightSource, the same in every process."""
    return _weights()[name][rows]


def lane_batches(
    step: int, world_size: int, accumulation: int = ACCUMULATION, empty: tuple[int, int] = (2, 1)
) -> list[Batch]:
    """The micro-batches of an optimizer step, lane by lane; rank r takes lanes r, r + world size, ….

    They differ in target tokens, and the one of the step and lane `empty` has none.
    """
    lanes = range(accumulation * world_size)
    return [
        dataclasses.replace(
            random_batch(1000 * step + lane, MODEL.vocab_size, examples=0 if (step, lane) == empty else None),
            lane=lane,
            number=step,
        )
        for lane in lanes
    ]
