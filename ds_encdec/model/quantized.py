"""Frozen matrices in 4 bits (NF4 with quantized scales; QLoRA, arXiv 2305.14314), which bitsandbytes packs and unpacks.

Packed matrices cannot be sharded or gathered. So they leave the model while an engine wraps it, and are filled
afterwards, one at a time; every rank holds all of them.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from ds_encdec.base.types import CheckpointError, ConfigError, WeightSource
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.precision import Linear
from ds_encdec.model.trained import canonical_name


def require_bitsandbytes() -> None:
    """Raise ConfigError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("model.lora.quantize needs bitsandbytes: pip install 'ds_encdec[qlora]'")


class QuantizedLinear(nn.Module):
    """A `Linear` whose matrix is frozen in 4 bits, and empty until `fill`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def fill(self, weight: Tensor) -> None:
        """Pack `weight`, in the compute dtype and on the device. Raises CheckpointError for another shape."""
        from bitsandbytes.functional import quantize_4bit

        if (shape := tuple(weight.shape)) != (self.out_features, self.in_features):
            raise CheckpointError(f"the source has shape {shape}, the model {(self.out_features, self.in_features)}")
        packed, self.quant_state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def unpacked(self) -> Tensor:
        """Return the matrix in the compute dtype."""
        from bitsandbytes.functional import dequantize_4bit

        matrix: Tensor = dequantize_4bit(self.weight.data, self.quant_state)
        return matrix

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        from bitsandbytes import matmul_4bit

        product: Tensor = matmul_4bit(x, self.weight.t(), quant_state=self.quant_state)
        return product


def detach_frozen(model: Qwen3ForSeq2SeqLM) -> None:
    """Replace all frozen matrices of the layers by empty `QuantizedLinear`s."""
    for name, module in list(model.named_modules()):
        if type(module) is Linear and not module.weight.requires_grad:
            model.set_submodule(name, QuantizedLinear(module.in_features, module.out_features))


def quantized_matrices(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the matrices in 4 bits by canonical name."""
    modules = ((canonical_name(f"{name}.weight"), module) for name, module in model.named_modules())
    return {name: module for name, module in modules if isinstance(module, QuantizedLinear)}


def quantize_into(model: nn.Module, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the matrices that `detach_frozen` emptied. Raises CheckpointError."""
    for name, module in quantized_matrices(model).items():
        module.fill(weights(name).to(device, dtype))
