"""The chunked loss against torch's cross-entropy on whole logits."""

from __future__ import annotations

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
from ds_encdec.model.loss import linear_cross_entropy

TOKENS, VOCAB = 37, 211


def results(loss: Tensor, hidden: Tensor, weight: Tensor, scale: float) -> list[Tensor]:
    (loss * scale).backward()
    return [loss.detach(), hidden.grad, weight.grad]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_float32_equals_the_plain_form(chunk_tokens: int) -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    expected = results(plain(hidden, weight, labels), hidden, weight, scale=0.37)
    hidden, weight, labels = loss_inputs(torch.float32)
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    for value, exact in zip(results(loss, hidden, weight, scale=0.37), expected, strict=True):
        assert relative_error(value, exact) < 1e-6
    per_token = F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="none")
    torch.testing.assert_close(token_losses, per_token, rtol=1e-5, atol=1e-6)
    assert (token_losses[::5] == 0).all()
    assert not token_losses.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_ones_own_is_optimised_and_cross_entropy_reported(dtype: torch.dtype) -> None:
    """The focal loss (arXiv 1708.02002, equation 4) of gamma 2, by autograd from all logits at once."""

    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(dim=-1).gather(-1, labels[:, None])[:, 0]
        return -((1 - log_p.exp()) ** 2) * log_p

    hidden, weight, labels = loss_inputs(dtype)
    ours = results(linear_cross_entropy(hidden, weight, labels, 8, own_loss=focal)[0], hidden, weight, scale=0.37)
    token_losses = linear_cross_entropy(hidden, weight, labels, 8, own_loss=focal)[1]
    assert torch.equal(token_losses, linear_cross_entropy(hidden, weight, labels, 8)[1])
    exact, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    has_loss = labels != -100
    total = focal((exact @ exact_weight.T)[has_loss], labels[has_loss]).sum()
    for value, expected in zip(ours, results(total, exact, exact_weight, scale=0.37), strict=True):
        assert relative_error(value, expected) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_what_a_loss_of_ones_own_makes_of_ignored_positions_does_not_leak() -> None:
    """It sees label 0 there, and may have a value, or a slope, that is not finite; 0 times that is NaN."""

    def steep(logits: Tensor, labels: Tensor) -> Tensor:
        distance = logits[:, 0] * (labels != 0)  # 0 at ignored positions: its root has an infinite slope
        return distance.abs().sqrt() + torch.where(labels == 0, torch.nan, 0.0)

    hidden, weight, labels = loss_inputs(torch.float32)
    labels = torch.where(labels == 0, 1, labels)
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, 8, own_loss=steep)
    has_loss = labels != -100
    assert 0 < has_loss.sum() < len(labels)
    ours = results(loss, hidden, weight, scale=0.37)
    assert (ours[1][~has_loss] == 0).all()
    assert (token_losses[~has_loss] == 0).all()
    exact, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    total = steep((exact @ exact_weight.T)[has_loss], labels[has_loss]).sum()
    for value, expected in zip(ours, results(total, exact, exact_weight, scale=0.37), strict=True):
        assert relative_error(value, expected) < 1e-5


def exact_results(hidden: Tensor, weight: Tensor, labels: Tensor, **extras: float) -> list[Tensor]:
    """The same in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    return results(optimized(hidden @ weight.T, labels, **extras), hidden, weight, scale=1.0)


def optimized(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """The definition, on whole logits."""
    logits, labels = logits[labels != -100], labels[labels != -100]
    smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return smoothed + z_loss * logits.logsumexp(dim=-1).square().sum()


EXTRAS = ({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 1e-4})


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_and_z_loss_equal_their_definitions(dtype: torch.dtype, extras: dict[str, float]) -> None:
    hidden, weight, labels = loss_inputs(dtype)
    exact = exact_results(hidden, weight, labels, **extras)
    rounded = results(optimized((hidden @ weight.T).float(), labels, **extras), hidden, weight, scale=1.0)
    hidden, weight, labels = loss_inputs(dtype)
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, 8, **extras)
    for value, of_whole, expected in zip(results(loss, hidden, weight, scale=1.0), rounded, exact, strict=True):
        within = 1e-6 if dtype == torch.float32 else 1.1 * relative_error(of_whole, expected)
        assert relative_error(value, expected) <= within
    assert torch.equal(token_losses, linear_cross_entropy(hidden, weight, labels, 8)[1])


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_is_no_further_from_exact_than_the_plain_form(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain form rounds logits to bfloat16; ours has the inputs' rounding alone, which `exact` shares.

    But for a CPU that multiplies bfloat16 itself: it rounds each product, and is three times as fast.
    """
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset({torch.bfloat16} if emulated else ()))
    hidden, weight, labels = loss_inputs(torch.bfloat16)
    rounded = results(plain(hidden, weight, labels), hidden, weight, scale=1.0)
    exact = exact_results(hidden, weight, labels)
    hidden, weight, labels = loss_inputs(torch.bfloat16)
    with Products() as products:
        ours = results(linear_cross_entropy(hidden, weight, labels, 8)[0], hidden, weight, scale=1.0)
    assert products.dtypes == {torch.float32 if emulated else torch.bfloat16}
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == ours[2].dtype == torch.bfloat16
    assert relative_error(ours[0], exact[0]) < (1e-6 if emulated else 1e-3)
    for value, plain_value, exact_value in zip(ours, rounded, exact, strict=True):
        assert relative_error(value, exact_value) <= (1.0 if emulated else 1.1) * relative_error(
            plain_value, exact_value
        )


@pytest.mark.parametrize(
    ("loss_scale", "extras"), [(1.0, {}), (2.0**8, {}), (2.0**8, EXTRAS[2]), (2.0**8, {"z_loss": 0.1})]
)
def test_float16_loses_no_small_gradients(
    loss_scale: float, extras: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a trained model's logits are tiny: far below what float16 tells from 0.

    The products are stand-ins for a GPU's, which multiplies float16 and sums up in float32.
    """
    rounded: list[Tensor] = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.float16
        rounded.append(a)
        return a.float() @ b.float()

    monkeypatch.setattr(loss_module, "_matmul_operand", lambda x: x)
    monkeypatch.setattr(loss_module, "_matmul", product)
    generator = torch.Generator().manual_seed(3)
    vocab, hidden_size, tokens = 8192, 64, 48
    weight = torch.randn(vocab, hidden_size, generator=generator).half()
    labels = torch.randint(0, vocab // 2, (tokens,), generator=generator)
    towards = weight[labels].float() + 1.5 * torch.randn(tokens, hidden_size, generator=generator)
    hidden = (4 * F.normalize(towards)).half()
    hidden.requires_grad_(), weight.requires_grad_()
    exact = exact_results(hidden, weight, labels, **extras)
    probabilities = torch.softmax(hidden.detach().double() @ weight.detach().double().T, dim=-1)
    assert (probabilities < 2**-25).double().mean() > 0.5  # rounded as they are, to float16's 0
    (linear_cross_entropy(hidden, weight, labels, tokens, **extras)[0] * loss_scale).backward()
    if extras.get("z_loss", 0.0) < 1e-2:  # a large one leaves them less room
        assert (rounded[1] == 0).double().mean() < 0.05  # of the gradients of logits, as they are multiplied
    found = (hidden.grad.double() / loss_scale, weight.grad.double() / loss_scale)
    assert relative_error(found[0], exact[1]) < 1e-3
    assert relative_error(found[1], exact[2]) < 1e-3
    if extras:
        return
    # Rows of tokens that are no target. At scale 1 float16 itself, which the gradient comes out in, is too coarse.
    others = slice(vocab // 2, None)
    by_row = (found[1] - exact[2])[others].norm(dim=1) / exact[2][others].norm(dim=1)
    assert by_row.quantile(0.9) < (1e-3 if loss_scale > 1 else 3e-3)


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_loss_in_float32(states: torch.dtype) -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    hidden = hidden.detach().to(states)
    expected = linear_cross_entropy(hidden.float(), weight, labels, 8)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, 8)[1]
    assert torch.equal(found, expected)


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e3, weight * 10, labels, 8)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()


def test_ignored_labels_and_frozen_weights_have_no_gradients() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    loss, token_losses = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 8)
    loss.backward()
    assert loss == 0
    assert not token_losses.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()
    frozen = weight.detach()
    linear_cross_entropy(hidden, frozen, labels, 8)[0].backward()
    assert frozen.grad is None
    assert hidden.grad.abs().sum() > 0


class Products(TorchDispatchMode):
    """Counts matrix products, and notes in what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.dtypes = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.count += 1
            self.dtypes.add(args[-1].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_without_gradients_none_are_computed(grad_enabled: bool) -> None:
    """Counted by the matrix products of a chunk: one for logits, two more for gradients."""
    hidden, weight, labels = loss_inputs(torch.float32)
    with torch.set_grad_enabled(grad_enabled), Products() as products:
        loss, _ = linear_cross_entropy(hidden, weight, labels, TOKENS)
    assert loss.requires_grad == grad_enabled
    assert products.count == (3 if grad_enabled else 1)


def test_a_second_backward_pass_is_refused_rather_than_scaled_twice() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
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


def refuses(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("self and mat2 must have the same dtype")


def right(*operands: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    *total, a, b = operands
    result = a.to(out_dtype) @ b.to(out_dtype)
    return result if out is None else out.copy_(total[0] + result)


def rounding(*operands: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    result = right(*operands, out_dtype=out_dtype, out=out)
    return result.copy_(result.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("adding", "name"), [(False, "mm"), (True, "addmm")])
@pytest.mark.parametrize(
    ("product", "reason"), [(right, ""), (refuses, "RuntimeError: self and mat2"), (rounding, "its results are off by")]
)
def test_products_in_float32_are_tried_before_they_are_relied_on(
    product: Any,
    reason: str,
    adding: bool,
    name: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of a GPU are stand-ins."""
    monkeypatch.setattr(torch, name, product)
    loss_module.passes_trial.cache_clear()
    cpu = torch.device("cpu")
    assert [loss_module.passes_trial(cpu, dtype, adding) for _ in range(2)] == [not reason] * 2
    loss_module.passes_trial.cache_clear()
    kind, short = "sum" if adding else "product", str(dtype).removeprefix("torch.")
    assert [message.partition(reason)[0] for message in caplog.messages] == [
        f"The loss does without its {kind} of {short} in float32 on cpu: "
    ] * bool(reason)


@pytest.mark.parametrize("has_product", [False, True])
def test_a_sum_that_the_device_refuses_is_made_in_steps(has_product: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a product in float32 where there is one, else by one that is rounded."""
    monkeypatch.setattr(loss_module, "_gives_float32", lambda _, *, adding=False: has_product and not adding)
    monkeypatch.setattr(torch, "addmm", refuses)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", right if has_product else mm)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 48), (48, 32)))
    total = torch.ones(64, 32)
    loss_module._add_product(total, a, b)
    assert relative_error(total, 1 + a.double() @ b.double()) < (1e-6 if has_product else 3e-3)
    assert (relative_error(total, 1 + a.double() @ b.double()) < 1e-5) is has_product
