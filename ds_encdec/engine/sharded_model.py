"""Building the model so that it fits: sharded from the first moment under ZeRO-3, on its device otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from ds_encdec.engine.sharded_engine import Shard, full_shape
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.types import CheckpointError, WeightSource

T = TypeVar("T")


def build_model(
    model_config: Qwen3Seq2SeqConfig, ds_json: dict[str, Any], *, dtype: torch.dtype, device: torch.device
) -> Qwen3ForSeq2SeqLM:
    """The model, its parameters not yet filled.

    Under ZeRO-3 each module is partitioned as soon as it is made, so no rank ever holds more than one module in full.
    Otherwise the model is made in `dtype` on `device`.
    """
    with ExitStack() as making:
        making.enter_context(no_init_weights())  # a weight source or a checkpoint fills every parameter
        if ds_json["zero_optimization"]["stage"] == 3:
            making.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_json))
        else:
            making.enter_context(torch.device(device))
            making.enter_context(_default_dtype(dtype))
        return Qwen3ForSeq2SeqLM(model_config)


def load_weights(model: nn.Module, weights: WeightSource) -> list[str]:
    """Copy `weights` into the parameters, one at a time; a tied one once. Collective; rank 0 reads.

    Without sharding the other ranks' parameters are left as they are, for DeepSpeed to broadcast. Returns, on every
    rank, the names of the parameters whose dtype cannot hold what the source gave: see `set_master_weights`. What
    rank 0 fails to read, or CheckpointError for another shape, is raised by all ranks.
    """
    reads = dist.get_rank() == 0
    rounded: list[str] = []
    error: Exception | None = None
    for name, parameter in model.named_parameters():
        source = None
        if reads and error is None:
            # Not inside the context, where the other ranks would wait for this one's broadcast for ever.
            source, error = attempt(partial(_read, weights, name, parameter))
        with _gathered(parameter):
            if source is not None:
                parameter.data.copy_(source)
        if source is not None and not torch.equal(source.to(parameter.dtype).to(source.dtype), source):
            rounded.append(name)
    error, rounded = _from_rank_zero((error, rounded))
    if error is not None:
        raise error
    return rounded


def set_master_weights(
    model: nn.Module, shards: Sequence[Shard], weights: WeightSource, names: Sequence[str], device: torch.device
) -> None:
    """Give the optimizer's float32 weights of the parameters `names` the exact values of `weights`.

    DeepSpeed made them from bf16 or fp16 parameters. After `deepspeed.initialize`. Collective; rank 0 reads and
    broadcasts one parameter at a time, through `device`.
    """
    reads = dist.get_rank() == 0
    parameters = dict(model.named_parameters())
    error: Exception | None = None
    for name in names:
        parameter = parameters[name]
        full = torch.zeros(full_shape(parameter), dtype=torch.float32, device=device)
        if reads and error is None:
            source, error = attempt(partial(_read, weights, name, parameter))
            if source is not None:
                full.copy_(source)
        dist.broadcast(full, src=0)
        for shard in shards:
            shard.fill_parameter(name, full.view(-1))
    if error := _from_rank_zero(error):
        raise error


def _read(weights: WeightSource, name: str, parameter: nn.Parameter) -> Tensor:
    source = weights(name)
    if source.shape != full_shape(parameter):
        raise CheckpointError(
            f"{name}: the source has shape {list(source.shape)}, the model {list(full_shape(parameter))}"
        )
    return source


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[object]:
    """Inside, the parameter is whole; what rank 0 wrote into it goes to all ranks afterwards (under ZeRO-3)."""
    if hasattr(parameter, "ds_id"):
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return nullcontext()


def _from_rank_zero(value: T) -> T:
    """Rank 0's (picklable) value, on every rank."""
    carried = [value]
    dist.broadcast_object_list(carried, src=0)
    return carried[0]


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Parameters are made in `dtype` inside this context."""
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(dtype)
    return stack  # type: ignore[return-value]  # an ExitStack yields itself, which nobody looks at
