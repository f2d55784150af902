"""Token losses with a gradient each, against torch's cross-entropy on whole logits."""

from typing import Any

import pytest
import torch
from tiny_models import loss_inputs, relative_error
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.model import loss as loss_module
from ds_encdec.model import precision
from ds_encdec.model.loss import linear_cross_entropy, token_cross_entropy

VOCAB, CHUNK = 211, 8


def of_tokens(losses: Tensor) -> Tensor:
    """A loss whose gradient differs from token to token, in size and sign, and is no constant."""
    weights = torch.linspace(-1.5, 2.0, len(losses), dtype=losses.dtype)
    return F.softplus((weights * losses).sum() * 0.1) + (weights * losses).square().sum() * 0.01


def exact(dtype: torch.dtype) -> list[Tensor]:
    hidden, weight, labels = loss_inputs(dtype)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="none")
    of_tokens(losses).backward()
    return [losses.detach(), hidden.grad, weight.grad]


def ours(dtype: torch.dtype, chunk_tokens: int = CHUNK, loss_scale: float = 1.0) -> list[Tensor]:
    hidden, weight, labels = loss_inputs(dtype)
    losses = token_cross_entropy(hidden, weight, labels, chunk_tokens)
    assert losses.dtype == torch.float32
    (of_tokens(losses) * loss_scale).backward()
    return [losses.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_float32_equals_the_plain_form(chunk_tokens: int) -> None:
    for value, expected in zip(ours(torch.float32, chunk_tokens), exact(torch.float32), strict=True):
        assert relative_error(value, expected) < 1e-6


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_is_no_further_from_exact_than_the_plain_form(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset({torch.bfloat16} if emulated else ()))
    hidden, weight, labels = loss_inputs(torch.bfloat16)
    losses = F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="none")
    of_tokens(losses).backward()
    plain = [losses.detach(), hidden.grad, weight.grad]
    found = ours(torch.bfloat16)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for value, other, expected in zip(found, plain, exact(torch.bfloat16), strict=True):
        assert relative_error(value, expected) <= (1.0 if emulated else 1.1) * relative_error(other, expected)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**12])
def test_float16_gradients_neither_overflow_nor_vanish(loss_scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:  # a device's that multiplies float16 into float32
        assert a.dtype == b.dtype == torch.float16
        return a.float() @ b.float()

    expected = exact(torch.float16)
    for gives_float32 in (False, True):
        with monkeypatch.context() as patched:
            if gives_float32:
                patched.setattr(loss_module, "product_dtype", lambda x: x.dtype)
                patched.setattr(loss_module, "_gives_float32", lambda _, adding=False: not adding)
                patched.setattr(loss_module, "_matmul", product)
            losses, *gradients = ours(torch.float16, loss_scale=loss_scale)
        assert relative_error(losses, expected[0]) < 1e-3
        for found, wanted in zip(gradients, expected[1:], strict=True):
            assert relative_error(found.double() / loss_scale, wanted) < 2e-3


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **kwargs or {})


def test_chunks_without_a_gradient_are_passed_over_in_the_backward_pass() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    labels = labels.clone()
    labels[CHUNK : 3 * CHUNK] = -100
    losses = token_cross_entropy(hidden, weight, labels, CHUNK)
    with Products() as products:
        losses[: 2 * CHUNK].sum().backward()
    assert products.count == 3  # one chunk's logits, and the gradients of its states and of the weight
    assert not hidden.grad[CHUNK:].any()
    expected, weight_again, _ = loss_inputs(torch.float32)
    linear_cross_entropy(expected[:CHUNK], weight_again, labels[:CHUNK], CHUNK)[0].backward()
    torch.testing.assert_close(hidden.grad, expected.grad)
    torch.testing.assert_close(weight.grad, weight_again.grad)


def test_frozen_weights_and_evaluation_have_no_gradients_and_autocast_changes_nothing() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    frozen = weight.detach()
    of_tokens(token_cross_entropy(hidden, frozen, labels, CHUNK)).backward()
    torch.testing.assert_close(hidden.grad, exact(torch.float32)[1].float())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = token_cross_entropy(hidden, weight, labels, CHUNK)
    assert not losses.requires_grad
    assert torch.equal(losses, linear_cross_entropy(hidden, weight, labels, CHUNK)[1])


def test_one_chunk_of_logits_exists_at_a_time_in_both_passes() -> None:
    tokens, width, chunk_tokens = 96, 4, 32
    one_chunk = chunk_tokens * VOCAB * 4
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(VOCAB, width, requires_grad=True)
    labels = torch.arange(tokens)
    tracker = MemTracker()
    tracker.track_external(hidden, weight, labels)
    with tracker:
        losses = token_cross_entropy(hidden, weight, labels, chunk_tokens)
        kept = tracker.get_tracker_snapshot()[torch.device("cpu")]["Total"]
        of_tokens(losses).backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert kept < 0.5 * one_chunk  # no logits are kept for the backward pass
    assert one_chunk < peak < 1.5 * one_chunk + 4 * weight.nbytes
