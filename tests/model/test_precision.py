"""Products in the precision that the CPU multiplies fast: another route to the same rounded numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ds_encdec.model import precision
from ds_encdec.model.precision import Linear, product_dtype


@pytest.mark.parametrize("emulated", [frozenset(), frozenset({torch.bfloat16})])
def test_bf16_product_is_the_rounded_float32_product(
    emulated: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", emulated)
    torch.manual_seed(0)
    layer = Linear(64, 48).bfloat16()
    x = torch.randn(33, 64).bfloat16().requires_grad_()
    assert product_dtype(x) == (torch.float32 if emulated else torch.bfloat16)
    y = layer(x)
    y.float().square().sum().backward()
    exact = F.linear(x.detach().double(), layer.weight.detach().double())
    assert y.dtype == torch.bfloat16
    # One rounding to bf16 (8 bits), and a last bit for the float32 sum on the edge between two of its values.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-3)
    assert layer.weight.grad is not None
    assert (layer.weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)  # type: ignore[union-attr]
