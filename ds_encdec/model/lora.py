"""Adapters of low rank, which peft puts into the model: y = W x + lora_alpha / r · B (A dropout(x)). A is drawn as peft
draws it, keyed by (seed, name) like all random weights; B is zero, so that a run begins as the model it starts from.
The frozen matrices may be in 4 bits (NF4 with quantized scales; QLoRA, arXiv 2305.14314), which bitsandbytes packs.
Packed matrices cannot be sharded or gathered, so they leave the model while an engine wraps it, and are filled
afterwards, one at a time; every rank holds all of them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ds_encdec.base.foreign_places import write
from ds_encdec.base.types import WeightSource
from ds_encdec.config.sections import LoraConfig, Sections
from ds_encdec.model.parameter_count import (
    ADAPTER,
    LORA_A,
    LORA_B,
    ModelSizes,
    canonical_name,
    frozen_names,
    has_adapter,
    is_adapter,
    model_shapes,
)
from ds_encdec.model.precision import Linear
from ds_encdec.model.weights import keyed_generator


def choose_trained(model: nn.Module, config: Sections) -> None:
    """Add the adapters of `config`, and switch off the gradients of all frozen parameters. `model`: a Qwen3ForSeq2SeqLM
    that no engine has wrapped; its parameters may be anywhere, sharded, and without values. Raises ConfigError for a
    pattern that matches nothing."""
    lora = config.model.lora
    if lora is not None:
        import peft

        # Values come from a weight source or a checkpoint.
        peft.inject_adapter_in_model(
            peft.LoraConfig(**peft_fields(lora), init_lora_weights=False), model, adapter_name=ADAPTER
        )
        for name, module in model.named_modules():
            if name.endswith((f".lora_A.{ADAPTER}", f".lora_B.{ADAPTER}")):
                write(module, __class__=Linear)  # computes the same in the device's fast precision
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    frozen = frozen_names(config, named)
    for name, parameter in named.items():
        parameter.requires_grad_(name not in frozen)


def peft_fields(lora: LoraConfig) -> dict[str, Any]:
    """Return these adapters' fields of peft's configuration."""
    return lora.model_dump(mode="json", include={"r", "lora_alpha", "lora_dropout", "target_modules"})


def with_new_adapters(base: WeightSource, lora: LoraConfig, sizes: ModelSizes, seed: int) -> WeightSource:
    """Return the parameters of `base`, and of new adapters, which are float32."""
    shapes = model_shapes(sizes, lora)

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        if not is_adapter(name):
            return base(name, rows)
        if name.endswith(LORA_B):
            return torch.zeros(shapes[name])[rows]
        bound = 1 / math.sqrt(shapes[name][1])  # kaiming_uniform_(a=√5), as peft has it
        return torch.empty(shapes[name]).uniform_(-bound, bound, generator=keyed_generator(seed, name))[rows]

    return weights


def merged(weight: Tensor, a: Tensor, b: Tensor, lora: LoraConfig) -> Tensor:
    """Return `weight` (or rows of it, and the same rows of `b`) with its adapter merged, as a new float32 tensor."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=lora.lora_alpha / lora.r)


def merged_weights(base: WeightSource, adapters: WeightSource, lora: LoraConfig) -> WeightSource:
    """Return the float32 parameters, without adapters, that compute the same as `base` with `adapters`."""

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        weight = base(name, rows)
        if not has_adapter(name, lora):
            return weight.float()
        module = name.removesuffix(".weight")
        return merged(weight, adapters(module + LORA_A), adapters(module + LORA_B, rows), lora)

    return weights


def merged_in_turn(parameters: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield `parameters`, each valid until the next, with every adapter merged into the matrix before it."""
    waiting: list[tuple[str, Tensor]] = []  # a matrix, perhaps its bias, and the first half of its adapter
    for name, parameter in parameters:
        if name.endswith(LORA_B):
            (matrix, weight), *bias, (_, a) = waiting
            waiting.clear()
            yield matrix, merged(weight, a, parameter, lora).to(weight.dtype)
            yield from bias
        elif waiting or has_adapter(name, lora):
            waiting.append((name, parameter.clone()))
        else:
            yield name, parameter


class QuantizedLinear(nn.Module):
    """A `Linear` whose matrix is frozen in 4 bits, and empty until `quantize_into`."""

    weight: nn.Parameter
    quant_state: Any

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("weight", None)  # first, as in a `Linear`
        self.in_features, self.out_features, self.bias = in_features, out_features, bias

    def unpacked(self) -> Tensor:
        """Return the matrix in the compute dtype."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight.data, self.quant_state)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        from bitsandbytes import matmul_4bit

        return matmul_4bit(x, self.weight.t(), quant_state=self.quant_state, bias=self.bias)


def detach_frozen(model: nn.Module) -> None:
    """Replace all frozen matrices of the layers by empty `QuantizedLinear`s."""
    for name, module in list(model.named_modules()):
        if type(module) is Linear and not module.weight.requires_grad:
            model.set_submodule(name, QuantizedLinear(module.in_features, module.out_features, module.bias))


def quantized_matrices(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the matrices in 4 bits by canonical name."""
    return {
        canonical_name(f"{name}.weight"): module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def quantize_into(model: nn.Module, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the matrices that `detach_frozen` emptied, packed in the compute dtype and on the device."""
    for name, module in quantized_matrices(model).items():
        from bitsandbytes.functional import quantize_4bit

        packed, module.quant_state = quantize_4bit(
            weights(name).to(device, dtype), quant_type="nf4", compress_statistics=True
        )
        module.weight = nn.Parameter(packed, requires_grad=False)
