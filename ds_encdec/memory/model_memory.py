"""The memory of any transformer's training on one device, by the formulas of the literature; no torch needed.

For a run of this program there is better: estimate.py knows its engine, its stage and its model. This is the estimate
on the back of an envelope: parameters, a shape, an optimizer; nothing is sharded or offloaded.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeVar

from ds_encdec.types import ConfigError

GB = 1e9
Row = TypeVar("Row")


_PRECISIONS = {
    **dict.fromkeys(("fp32", "float32"), (4, 0)),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), (2, 0)),
    **dict.fromkeys(("bf16_mixed", "fp16_mixed"), (2, 4)),
}
"""Bytes of one number of the weights, gradients and activations, and of the master weights where there are any."""
_OPTIMIZER_BYTES = {
    "adam": 8.0,  # two float32 moments
    "adamw": 8.0,
    "adam8bit": 2.0 + 8 / 256,  # two moments of one byte, with a float32 scale per block of 256 (arXiv 2110.02861)
    "adamw8bit": 2.0 + 8 / 256,
    "lion": 4.0,  # one float32 momentum (arXiv 2302.06675)
    "sgd": 0.0,
    "sgd_momentum": 4.0,
}
"""Bytes of the states, per parameter. Adafactor's depend on the width."""


def estimate_model_memory(
    num_params: float,
    batch_size: int,
    seq_length: int,
    hidden_size: int,
    num_layers: int,
    dtype: str = "bf16_mixed",
    optimizer: str = "adamw",
    gradient_checkpointing: bool = True,
) -> dict[str, float]:
    """GB (1e9 bytes) of training a transformer on one device: `{model,optimizer,gradient,activation,total}_gb`.

    `dtype`: fp32 (float32); bf16 or fp16 (bfloat16, float16, half), in which weights and gradients take 2 bytes each
    and the optimizer steps these weights; bf16_mixed or fp16_mixed, in which it steps float32 master weights besides:
    they are in `optimizer_gb`, 4 bytes per parameter, with the moments, float32 in every case. So 7e9 parameters with
    Adam take 14 + 14 + 56 GB in bf16, and 14 + 14 + 84 in bf16_mixed (K = 12 of ZeRO, arXiv 1910.02054).
    `optimizer`: adam, adamw, adam8bit, adamw8bit, adafactor without momentum, lion, sgd, sgd_momentum.

    Activations of `batch_size` sequences of `seq_length` tokens, after Korthikanti et al. (arXiv 2205.05198, equation
    1 and table 2): 34·s·b·h bytes per layer in 16 bit, attention scores not kept; with `gradient_checkpointing` each
    layer's input, 2·s·b·h. In float32 66 and 4: dropout masks are bytes in either. The logits, and the layer
    that is recomputed, come on top. Raises ConfigError for any other value.
    """
    sizes = {
        "num_params": num_params,
        "batch_size": batch_size,
        "seq_length": seq_length,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
    }
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not (0 < value < math.inf):
            raise ConfigError(f"{name}={value!r}: it must be a positive number")
    weight, master_weight = _known("dtype", dtype, _PRECISIONS)
    # Adafactor: sums of rows and of columns (arXiv 1804.04235), of matrices taken to be as wide as the model.
    state_bytes = _known("optimizer", optimizer, _OPTIMIZER_BYTES | {"adafactor": 2 * 4 / hidden_size})
    numbers, masks = (1, 0) if gradient_checkpointing else (16, 2)  # kept per token, layer and unit of width
    memory = {
        "model_gb": num_params * weight / GB,
        "optimizer_gb": num_params * (master_weight + state_bytes) / GB,
        "gradient_gb": num_params * weight / GB,
        "activation_gb": num_layers * seq_length * batch_size * hidden_size * (numbers * weight + masks) / GB,
    }
    return memory | {"total_gb": sum(memory.values())}


def _known(argument: str, name: str, table: Mapping[str, Row]) -> Row:
    """The row of that name, which may be of any case, and torch's own (`torch.bfloat16`)."""
    known = str(name).lower().removeprefix("torch.")
    if known not in table:
        raise ConfigError(f"{argument}={name!r}: it must be one of {', '.join(table)}")
    return table[known]
