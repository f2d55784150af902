"""Products in the precision that a device multiplies fast. A CPU without bfloat16 instructions takes 4.4 times as long
for a bf16 product as for casting to float32, multiplying, and rounding, to the same numbers (AVX-512 Xeon without
avx512_bf16, torch 2.13)."""

import logging
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_CPU_HAS: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.12 on

# Dtypes that this machine's CPU has no instructions to multiply in.
_EMULATED_ON_CPU = frozenset(
    dtype
    for dtype, name in {torch.bfloat16: "bf16", torch.float16: "fp16"}.items()
    # 64-bit Arm since 8.6 has them; torch does not report it.
    if platform.machine() in ("x86_64", "AMD64") and not (_CPU_HAS.get(f"avx512_{name}") or _CPU_HAS.get(f"amx_{name}"))
)


def trial_problem(trial: Callable[[], float], warning: str) -> str:
    """Run `trial`, which returns the largest error of a device's kernel, over what rounding explains. Return why the
    kernel cannot be used, which is logged behind `warning`, or an empty text."""
    try:
        error = trial()
        problem = "" if error <= 1.0 else f"its results are off by {error:.3g} times what rounding explains"
    except Exception as raised:  # whatever the driver, the compiler or this kind of GPU does not like
        problem = " ".join(f"{type(raised).__name__}: {raised}".split())[:200]
    if problem:
        logger.warning("%s: %s", warning, problem)
    return problem


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply tensors of x's dtype on x's device."""
    return torch.float32 if x.device.type == "cpu" and x.dtype in _EMULATED_ON_CPU else x.dtype


class Linear(nn.Linear):
    """Computes `nn.Linear` in `product_dtype`; inputs, parameters and result keep their dtype."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor, added_to: Tensor | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features], plus `added_to` [tokens, out_features] in one product, for
        which there must be no bias."""
        if added_to is not None:
            return torch.addmm(added_to, x, self.weight.T)
        dtype = product_dtype(x)
        if dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)


def projected(linear: nn.Module, x: Tensor, added_to: Tensor | None) -> Tensor:
    """Return `linear(x)` plus `added_to`, if any; compiled code adds within a plain product, rounding the sum once."""
    if added_to is None:
        return linear(x)
    if (
        torch.compiler.is_compiling()
        and isinstance(linear, Linear)
        and linear.bias is None
        and x.dim() == 2
        and product_dtype(x) == x.dtype == added_to.dtype
    ):
        return linear(x, added_to)
    return added_to + linear(x)
