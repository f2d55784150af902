"""The tensors in which DeepSpeed holds a rank's parameters and gradients, at every ZeRO stage.

Like those of optimizer_shards.py these are private places of DeepSpeed 0.19.8; a test counts what is found in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_encdec.engine.optimizer_shards import Shard

_GRADIENTS_OF_PARAMETER = ("grad", "grad_accum")
_GRADIENTS_OF_OPTIMIZER = (
    "averaged_gradients",  # stages 1 to 3, by group, from the backward pass to the step
    "all_grad_tensors",  # stage 1, while it accumulates
    "grads_in_partition",  # stage 2, in the backward pass
    "accumulated_grads_in_cpu",  # stages 1 and 2 with offload, from several micro-batches on
    "grad_partitions_flat_buffer",  # stage 3
    "fp32_groups_gradients_flat",  # BF16_Optimizer
)


def computing_parameters(engine: DeepSpeedEngine) -> Iterator[Any]:
    """What layers compute with: under stage 3 this rank's part, with hpZ its node's too, and what is whole now."""
    for parameter in engine.module.parameters():
        yield parameter
        yield getattr(parameter, "ds_tensor", None)
        yield getattr(parameter, "ds_secondary_tensor", None)


def gradients(engine: DeepSpeedEngine, shards: Sequence[Shard]) -> Iterator[Any]:
    """The gradients that there are now, as tensors, containers of them, or None: of parameters, and of `shards`."""
    for parameter in engine.module.parameters():
        yield from (getattr(parameter, name, None) for name in _GRADIENTS_OF_PARAMETER)
    yield from (shard.weights.grad for shard in shards)
    yield from (getattr(engine.optimizer, name, None) for name in _GRADIENTS_OF_OPTIMIZER)
