"""Building the model so that it fits: sharded from the first moment under ZeRO-3, on its device otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers.initialization import no_init_weights

from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.types import CheckpointError, WeightSource


def build_model(
    model_config: Qwen3Seq2SeqConfig,
    weights: WeightSource,
    ds_json: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Qwen3ForSeq2SeqLM:
    """The model with `weights`, ready for `deepspeed.initialize`.

    Under ZeRO-3 each module is partitioned as soon as it is made, so no rank ever holds more than one
    module in full, and rank 0 scatters one parameter at a time. Otherwise the model is made in `dtype`
    on `device`, rank 0 fills it, and DeepSpeed broadcasts it. Only rank 0 reads `weights`.
    Raises CheckpointError for a parameter of another shape.
    """
    sharded = ds_json["zero_optimization"]["stage"] == 3
    with ExitStack() as making:
        making.enter_context(no_init_weights())  # every parameter is overwritten below
        if sharded:
            making.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_json))
        else:
            making.enter_context(torch.device(device))
            making.enter_context(_default_dtype(dtype))
        model = Qwen3ForSeq2SeqLM(model_config)
    load_weights(model, weights, sharded=sharded)
    assert_ties(model)
    return model


def load_weights(model: nn.Module, weights: WeightSource, *, sharded: bool) -> None:
    """Copy `weights` into the parameters, one at a time; a tied one once. Collective; rank 0 reads.

    Without sharding the other ranks' parameters are left as they are, for DeepSpeed to broadcast.
    """
    reads = dist.get_rank() == 0
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) if sharded else nullcontext():
            if reads:
                source = weights(name)
                if source.shape != parameter.shape:
                    raise CheckpointError(
                        f"{name}: the source has shape {list(source.shape)}, the model {list(parameter.shape)}"
                    )
                parameter.data.copy_(source)


def assert_ties(model: Qwen3ForSeq2SeqLM) -> None:
    """The output layer shares the embedding's parameter exactly when the configuration says so."""
    shared = model.lm_head.weight is model.shared.weight
    if shared != bool(model.config.tie_word_embeddings):
        raise AssertionError(
            f"tie_word_embeddings={model.config.tie_word_embeddings}, but lm_head and embedding share: {shared}"
        )


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Parameters are made in `dtype` inside this context."""
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(dtype)
    return stack  # type: ignore[return-value]  # an ExitStack yields itself, which nobody looks at
