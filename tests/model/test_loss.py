"""The chunked loss against torch's cross-entropy on whole logits."""

from collections.abc import Callable
from functools import partial
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


Values = list[Tensor]
"""A loss, and the gradients of hidden states and weight."""
Inputs = Callable[[torch.dtype], tuple[Tensor, Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def results(loss: Tensor, hidden: Tensor, weight: Tensor, scale: float = 1.0) -> Values:
    (loss * scale).backward()
    return [loss.detach(), hidden.grad, weight.grad]


def ours(
    dtype: torch.dtype, chunk_tokens: int = 8, scale: float = 1.0, inputs: Inputs = loss_inputs, **options: Any
) -> tuple[Values, Tensor]:
    hidden, weight, labels = inputs(dtype)
    loss, token_losses = linear_cross_entropy(hidden, weight, labels, chunk_tokens, **options)
    return results(loss, hidden, weight, scale), token_losses


def exact(dtype: torch.dtype, definition: Loss, scale: float = 1.0, inputs: Inputs = loss_inputs) -> Values:
    hidden, weight, labels = inputs(dtype)
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    has_loss = labels != -100
    return results(definition((hidden @ weight.T)[has_loss], labels[has_loss]).sum(), hidden, weight, scale)


def rounded(dtype: torch.dtype, definition: Loss) -> Values:
    hidden, weight, labels = loss_inputs(dtype)
    has_loss = labels != -100
    return results(definition((hidden @ weight.T).float()[has_loss], labels[has_loss]).sum(), hidden, weight)


def optimized(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return smoothed + z_loss * logits.logsumexp(dim=-1).square().sum()


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
def test_float32_equals_the_plain_form(chunk_tokens: int) -> None:
    found, token_losses = ours(torch.float32, chunk_tokens, scale=0.37)
    for value, expected in zip(found, exact(torch.float32, optimized, scale=0.37), strict=True):
        assert relative_error(value, expected) < 1e-6
    hidden, weight, labels = loss_inputs(torch.float32)
    per_token = F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="none")
    torch.testing.assert_close(token_losses, per_token, rtol=1e-5, atol=1e-6)
    assert (token_losses[::5] == 0).all()
    assert not token_losses.requires_grad


def steep(logits: Tensor, labels: Tensor) -> Tensor:
    """At ignored positions, which get label 0, neither value nor slope are finite; 0 times that is NaN."""
    return (logits[:, 0] * (labels != 0)).abs().sqrt() + torch.where(labels == 0, torch.nan, 0.0)


def inputs_without_label_0(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = loss_inputs(dtype)
    return hidden, weight, torch.where(labels == 0, 1, labels)


def test_an_own_loss_is_optimised_and_cross_entropy_reported() -> None:
    given: dict[str, Any] = {"dtype": torch.float32, "scale": 0.37, "inputs": inputs_without_label_0}
    found, token_losses = ours(**given, own_loss=steep)
    assert torch.equal(token_losses, ours(**given)[1])
    assert (found[1][::5] == 0).all()
    for value, expected in zip(found, exact(**given, definition=steep), strict=True):
        assert relative_error(value, expected) < 1e-5


EXTRAS = ({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 1e-4})


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_and_z_loss_equal_their_definitions(dtype: torch.dtype, extras: dict[str, float]) -> None:
    definition = partial(optimized, **extras)
    found, token_losses = ours(dtype, **extras)
    for value, plain, expected in zip(found, rounded(dtype, definition), exact(dtype, definition), strict=True):
        within = 1e-6 if dtype == torch.float32 else 1.1 * relative_error(plain, expected)
        assert relative_error(value, expected) <= within
    assert torch.equal(token_losses, ours(dtype)[1])


def test_float16_gradients_are_finite_on_cpus_that_round_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaled gradient's product with the weight does not fit in float16."""
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset())
    found, _ = ours(torch.float16)
    assert all(value.isfinite().all() for value in found)
    for value, expected in zip(found, exact(torch.float16, optimized), strict=True):
        assert relative_error(value, expected) < 1e-3


@pytest.mark.parametrize("emulated", [True, False])
def test_bfloat16_is_no_further_from_exact_than_the_plain_form(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_EMULATED_ON_CPU", frozenset({torch.bfloat16} if emulated else ()))
    with Products() as products:
        found, _ = ours(torch.bfloat16)
    assert products.dtypes == {torch.float32 if emulated else torch.bfloat16}
    assert [value.dtype for value in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    expected = exact(torch.bfloat16, optimized)
    assert relative_error(found[0], expected[0]) < (1e-6 if emulated else 1e-3)
    for value, plain, exact_value in zip(found, rounded(torch.bfloat16, optimized), expected, strict=True):
        assert relative_error(value, exact_value) <= (1.0 if emulated else 1.1) * relative_error(plain, exact_value)


@pytest.mark.parametrize(("loss_scale", "extras"), [(1.0, {}), (2.0**8, EXTRAS[2]), (2.0**8, {"z_loss": 0.1})])
def test_float16_loses_no_small_gradients(
    loss_scale: float, extras: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded: list[Tensor] = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.float16
        rounded.append(a)
        return a.float() @ b.float()

    monkeypatch.setattr(loss_module, "product_dtype", lambda x: x.dtype)
    monkeypatch.setattr(loss_module, "_gives_float32", lambda _, adding=False: not adding)
    monkeypatch.setattr(loss_module, "_matmul", product)
    generator = torch.Generator().manual_seed(3)
    vocab, hidden_size, tokens = 8192, 64, 48
    weight = torch.randn(vocab, hidden_size, generator=generator).half()
    labels = torch.randint(0, vocab // 2, (tokens,), generator=generator)
    towards = weight[labels].float() + 1.5 * torch.randn(tokens, hidden_size, generator=generator)
    hidden = (4 * F.normalize(towards)).half()
    hidden.requires_grad_(), weight.requires_grad_()
    states, rows = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = results(optimized(states @ rows.T, labels, **extras), states, rows)
    probabilities = torch.softmax(hidden.detach().double() @ weight.detach().double().T, dim=-1)
    assert (probabilities < 2**-25).double().mean() > 0.5  # rounded as they are, to float16's 0
    (linear_cross_entropy(hidden, weight, labels, tokens, **extras)[0] * loss_scale).backward()
    if extras.get("z_loss", 0.0) < 1e-2:  # a large one leaves them less room
        assert (rounded[1] == 0).double().mean() < 0.05  # of the gradients of logits, as they are multiplied
    found = (hidden.grad.double() / loss_scale, weight.grad.double() / loss_scale)
    assert relative_error(found[0], expected[1]) < 1e-3
    assert relative_error(found[1], expected[2]) < 1e-3
    if extras:
        return
    # Rows of tokens that are no target. At scale 1 float16 itself, which the gradient comes out in, is too coarse.
    others = slice(vocab // 2, None)
    by_row = (found[1] - expected[2])[others].norm(dim=1) / expected[2][others].norm(dim=1)
    assert by_row.quantile(0.9) < (1e-3 if loss_scale > 1 else 3e-3)


def test_autocast_leaves_the_loss_in_float32() -> None:
    hidden, weight, labels = loss_inputs(torch.float32)
    hidden = hidden.detach().bfloat16()
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
    def __init__(self) -> None:
        super().__init__()
        self.count, self.dtypes = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.count += 1
            self.dtypes.add(args[-1].dtype)
        return func(*args, **kwargs or {})


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


@pytest.mark.parametrize(("adding", "name"), [(False, "mm"), (True, "addmm")])
@pytest.mark.parametrize(
    ("product", "reason"), [(right, ""), (refuses, "RuntimeError: self and mat2"), (rounding, "its results are off by")]
)
def test_products_in_float32_are_tried_before_they_are_relied_on(
    product: Any,
    reason: str,
    adding: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, name, product)
    loss_module.passes_trial.cache_clear()
    cpu = torch.device("cpu")
    assert [loss_module.passes_trial(cpu, torch.bfloat16, adding) for _ in range(2)] == [not reason] * 2
    loss_module.passes_trial.cache_clear()
    kind = "sum" if adding else "product"
    assert [message.partition(reason)[0] for message in caplog.messages] == [
        f"The loss does without its {kind} of bfloat16 in float32 on cpu: "
    ] * bool(reason)
