"""The chunked loss against torch's cross-entropy on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.model.loss import linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 37, 24, 211


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def results(loss: Tensor, hidden: Tensor, weight: Tensor, scale: float) -> list[Tensor]:
    (loss * scale).backward()
    return [loss.detach(), hidden.grad, weight.grad]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="sum")


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_float32_equals_the_plain_form(chunk_tokens: int) -> None:
    hidden, weight, labels = inputs(torch.float32)
    expected = results(plain(hidden, weight, labels), hidden, weight, scale=0.37)
    hidden, weight, labels = inputs(torch.float32)
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    for value, exact in zip(results(loss, hidden, weight, scale=0.37), expected, strict=True):
        assert relative_error(value, exact) < 1e-6
    per_token = F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="none")
    torch.testing.assert_close(token_losses, per_token, rtol=1e-5, atol=1e-6)
    assert (token_losses[::5] == 0).all()
    assert not token_losses.requires_grad


def test_bfloat16_is_closer_to_exact_than_the_plain_form() -> None:
    """The plain form rounds logits to bfloat16; ours has the inputs' rounding alone, which `exact` shares."""
    hidden, weight, labels = inputs(torch.bfloat16)
    rounded = results(plain(hidden, weight, labels), hidden, weight, scale=1.0)
    hidden, weight, labels = inputs(torch.bfloat16)
    ours = results(linear_cross_entropy(hidden, weight, labels, 8)[0], hidden, weight, scale=1.0)
    hidden, weight, labels = (x.detach().double() if x.is_floating_point() else x for x in (hidden, weight, labels))
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.T
    exact = results(F.cross_entropy(logits, labels, reduction="sum"), hidden, weight, scale=1.0)
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == ours[2].dtype == torch.bfloat16
    assert relative_error(ours[0], exact[0]) < 1e-6
    for value, plain_value, exact_value in zip(ours, rounded, exact, strict=True):
        assert relative_error(value, exact_value) < relative_error(plain_value, exact_value)


def test_gradients_are_right_by_finite_differences() -> None:
    hidden, weight, labels = inputs(torch.float32)
    direction = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    linear_cross_entropy(hidden, weight, labels, 8)[0].backward()
    step = 1e-3
    with torch.no_grad():
        above = linear_cross_entropy(hidden.double(), (weight + step * direction).double(), labels, 8)[0]
        below = linear_cross_entropy(hidden.double(), (weight - step * direction).double(), labels, 8)[0]
    torch.testing.assert_close((weight.grad * direction).sum(), (above - below) / (2 * step), rtol=1e-2, atol=1e-2)


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e3, weight * 10, labels, 8)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()


def test_all_ignored_labels_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss, token_losses = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 8)
    loss.backward()
    assert loss == 0
    assert not token_losses.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, weight, labels = inputs(torch.float32)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels, 8)[0].backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_without_gradients_none_are_computed(grad_enabled: bool) -> None:
    """Counted by the matrix products of a chunk: one for logits, two more for gradients."""
    hidden, weight, labels = inputs(torch.float32)
    with torch.set_grad_enabled(grad_enabled), Products() as products:
        loss, _ = linear_cross_entropy(hidden, weight, labels, TOKENS)
    assert loss.requires_grad == grad_enabled
    assert products.count == (3 if grad_enabled else 1)


def test_a_second_backward_pass_is_refused_rather_than_scaled_twice() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = linear_cross_entropy(hidden, weight, labels, 8)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_chunk_of_logits_exists_at_a_time() -> None:
    tokens, width, chunk_tokens = 96, 4, 32
    one_chunk = chunk_tokens * VOCAB * 4
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(VOCAB, width, requires_grad=True)
    labels = torch.arange(tokens)
    tracker = MemTracker()
    tracker.track_external(hidden, weight, labels)
    with tracker:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert one_chunk < peak < 1.5 * one_chunk + 2 * weight.nbytes
