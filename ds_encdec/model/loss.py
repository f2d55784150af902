"""Cross-entropy of a linear head that never holds the logits of more than a chunk of tokens.

With a vocabulary of 152 k, float32 logits of 8,192 tokens alone are 5 GB. `linear_cross_entropy` computes, while a
chunk's logits exist, its losses *and* its gradients; the backward pass only scales them, and does not read the head's
weight. Softmax, losses, sums and the weight's accumulated gradient are always float32. So are the logits, except on
CPUs with instructions for bfloat16, which round each product's result to 16 bits.

Training may optimise more than the reported token losses: label smoothing, (1 - share) * -log p(target) + share *
mean(-log p); z-loss, its coefficient times the square of the logarithm of the softmax's normaliser (PaLM, arXiv
2204.02311, section 5); or a user's own loss. A teacher's share is the divergence from it: its logits exist beside the
student's, for the same chunk.

Objectives that are no sum over tokens need a gradient for each token (`token_cross_entropy`): its backward pass makes
each chunk's logits again, one more product, instead of keeping any."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .loss_kernel import IGNORE_INDEX, Extras, Rows, Taught, losses_and_gradients
from .precision import product_dtype, trial_problem

OwnLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Teacher(NamedTuple):
    """A teacher of the first R tokens, all of which have labels: its states [R, H'], its head's weight [V', H'], and
    how many ids it knows, from the first one on; share and temperature as in `Taught`."""

    states: Tensor
    weight: Tensor
    words: int
    share: float
    temperature: float

    def says(self, chunk: slice, divergences: Tensor, student_words: int) -> Taught:
        """Return what it says of a chunk of tokens, with `divergences` to be filled."""
        logits = _matmul(self.states[chunk].to(self.weight.dtype), self.weight.T).float()
        return Taught(logits, min(self.words, student_words), divergences[chunk], self.share, self.temperature)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    own_loss: OwnLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the optimised losses of `hidden @ weight.T` against `labels`, and the token losses. hidden: [T,
    H]; weight: [V, H], same dtype; labels: int64 [T], -100 where there is no loss. `own_loss`: float32 logits [N, V]
    and labels [N] → float32 [N], optimised instead. Returns a float32 scalar with gradient to hidden and weight, and
    float32 [T], detached, in nats, 0 where ignored."""
    return _applied(hidden, weight, labels, chunk_tokens, Extras(label_smoothing, z_loss), own_loss)[:2]


def distilled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    teacher: Teacher,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `linear_cross_entropy` does, with the share of its teacher in the optimised losses of the first R
    tokens, and the divergences from it, float32 [R], detached, in nats."""
    return _applied(hidden, weight, labels, chunk_tokens, Extras(label_smoothing, z_loss), None, teacher)


def _applied(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, *others: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would round logits to 16 bits
        return _LinearCrossEntropy.apply(
            hidden.to(weight.dtype), weight, labels, chunk_tokens, torch.is_grad_enabled(), *others
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        grad_enabled: bool,
        extras: Extras,
        own_loss: OwnLoss | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = (grad_enabled and wanted for wanted in ctx.needs_input_grad[:2])
        # In float16, gradients of hidden states stay float32 until `backward` gets the loss scale, and gradients of
        # logits, at most 1 + z-loss's derivative, or a teacher's temperature, are scaled to fit.
        in_float16 = hidden.dtype == torch.float16
        largest = max(1 + 2 * extras.z_loss * 1000, teacher.temperature if teacher else 0.0)
        scale = 2.0 ** (15 - math.ceil(math.log2(largest))) if in_float16 else 1.0
        hidden_grad = torch.empty_like(hidden, dtype=torch.float32 if in_float16 else None) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        token_losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        extra_losses = torch.empty_like(token_losses) if extras or own_loss else None
        num_taught = 0
        if teacher is not None:
            num_taught = len(teacher.states)
            teacher = teacher._replace(weight=teacher.weight.to(product_dtype(teacher.weight)))
        divergences = token_losses.new_empty(num_taught)
        matmul_weight = _multiplied(weight)
        gradients_in = matmul_weight.dtype if wants_hidden or wants_weight else None
        for chunk in _chunks(len(labels), chunk_tokens, num_taught):
            states = hidden[chunk].to(matmul_weight.dtype)
            extra = None if extra_losses is None else extra_losses[chunk]
            # No name refers to the logits: they are freed before the products below need memory.
            logit_grads = _losses_and_gradients(
                Rows(
                    _matmul(states, matmul_weight.T).float(),
                    labels[chunk],
                    token_losses[chunk],
                    extra,
                    teacher.says(chunk, divergences, len(weight)) if teacher and chunk.start < num_taught else None,
                ),
                gradients_in,
                scale,
                extras,
                own_loss,
            )
            if logit_grads is not None:
                _add_gradients(logit_grads, states, matmul_weight, hidden_grad, weight_grad, chunk)
            del logit_grads  # before the next chunk's logits are made: otherwise two chunks' would exist
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.hidden_dtype, ctx.weight_dtype, ctx.scale = hidden.dtype, weight.dtype, scale
        ctx.mark_non_differentiable(token_losses, divergences)
        optimised = token_losses if extra_losses is None else token_losses + extra_losses
        total = optimised.sum()
        if teacher is not None:
            of_teacher = teacher.temperature**2 * divergences - optimised[:num_taught]
            total = total + teacher.share * of_teacher.sum()
        return total, token_losses, divergences

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # Scaled in place. A second backward pass over a retained graph would scale again: autograd refuses it.
        grad = grad / ctx.scale
        gradients = zip(ctx.saved_tensors, (ctx.hidden_dtype, ctx.weight_dtype), strict=True)
        return *(one if one is None else one.mul_(grad).to(dtype) for one, dtype in gradients), *[None] * 6


def _chunks(tokens: int, chunk_tokens: int, num_taught: int) -> Iterator[slice]:
    """Yield slices of at most `chunk_tokens`: first those of the `num_taught` tokens, then those of the others."""
    for start, stop in ((0, num_taught), (num_taught, tokens)):
        for first in range(start, stop, chunk_tokens):
            yield slice(first, min(first + chunk_tokens, stop))


def token_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Return the token losses of `linear_cross_entropy`, float32 [T], with gradient to hidden and weight. The backward
    pass is free where no token of a chunk has a gradient."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenCrossEntropy.apply(hidden.to(weight.dtype), weight, labels, chunk_tokens)


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        token_losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        matmul_weight = _multiplied(weight)
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _matmul(hidden[chunk].to(matmul_weight.dtype), matmul_weight.T).float()
            losses_and_gradients(Rows(logits, labels[chunk], token_losses[chunk], None), None, 1.0, Extras())
            del logits
        # Under ZeRO-3 the weight is empty until the head's backward pass, before which it is gathered again.
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk_tokens = chunk_tokens
        return token_losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        grad = grad.masked_fill(labels == IGNORE_INDEX, 0.0)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        in_float16 = hidden.dtype == torch.float16
        # In float16 gradients of logits are scaled to fit, whatever the loss scale and the tokens' gradients are.
        scale = 2.0**15 / grad.abs().max().clamp(min=torch.finfo(torch.float32).tiny) if in_float16 else None
        factors = grad if scale is None else grad * scale
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32 if in_float16 else None) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        matmul_weight = _multiplied(weight)
        ignored_losses = torch.empty_like(grad)
        chunks = grad.split(ctx.chunk_tokens)
        for number, has_gradient in enumerate(torch.stack([one.count_nonzero() for one in chunks]).tolist()):
            if not has_gradient:
                continue
            chunk = slice(number * ctx.chunk_tokens, (number + 1) * ctx.chunk_tokens)
            states = hidden[chunk].to(matmul_weight.dtype)
            logit_grads = _logit_gradients(
                Rows(_matmul(states, matmul_weight.T).float(), labels[chunk], ignored_losses[chunk], None),
                factors[chunk],
                matmul_weight.dtype,
            )
            _add_gradients(logit_grads, states, matmul_weight, hidden_grad, weight_grad, chunk)
            del logit_grads
        gradients = zip((hidden_grad, weight_grad), (hidden.dtype, weight.dtype), strict=True)
        scaled = ((one if one is None or scale is None else one.div_(scale), dtype) for one, dtype in gradients)
        return *(one if one is None else one.to(dtype) for one, dtype in scaled), None, None


def _logit_gradients(rows: Rows, factors: Tensor, gradients_in: torch.dtype) -> Tensor:
    """Return the gradients of the losses of `rows`, each times its factor, rounded once."""
    gradients = losses_and_gradients(rows, torch.float32, 1.0, Extras())
    assert gradients is not None
    out = gradients if gradients_in == torch.float32 else torch.empty_like(gradients, dtype=gradients_in)
    return torch.mul(gradients, factors[:, None], out=out)


def _multiplied(weight: Tensor) -> Tensor:
    """Return the head's weight in the dtype of its products; a scaled gradient's does not fit in float16."""
    fits = weight.dtype != torch.float16 or _gives_float32(weight)
    return weight.to(product_dtype(weight) if fits else torch.float32)


def _add_gradients(
    logit_grads: Tensor,
    states: Tensor,
    matmul_weight: Tensor,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    chunk: slice,
) -> None:
    """Fill the chunk's gradients of hidden states, and add to those of the weight."""
    if hidden_grad is not None:
        if hidden_grad.dtype == logit_grads.dtype:
            torch.mm(logit_grads, matmul_weight, out=hidden_grad[chunk])
        else:
            hidden_grad[chunk].copy_(_matmul(logit_grads, matmul_weight))
    if weight_grad is not None:
        _add_product(weight_grad, logit_grads.T, states)


def _losses_and_gradients(
    rows: Rows, gradients_in: torch.dtype | None, scale: float, extras: Extras, own_loss: OwnLoss | None
) -> Tensor | None:
    """Fill `rows` as `losses_and_gradients` does. With `own_loss`, return its gradients; its difference from the plain
    losses fills the extra losses."""
    if own_loss is None or rows.extra_losses is None:
        return losses_and_gradients(rows, gradients_in, scale, extras)
    has_loss = rows.labels != IGNORE_INDEX
    leaf = rows.logits.detach().requires_grad_()
    with torch.enable_grad():
        own = torch.where(has_loss, own_loss(leaf, rows.labels.clamp(min=0)).float(), 0.0)
        total = own.sum()
    gradients = None
    if gradients_in is not None:  # its backward pass may multiply the 0 of an ignored row by an infinity
        gradients = torch.autograd.grad(total, leaf)[0].masked_fill_(~has_loss[:, None], 0.0).to(gradients_in)
    losses_and_gradients(rows._replace(extra_losses=None), None, scale, extras)
    rows.extra_losses.copy_(own.detach() - rows.losses)
    return gradients


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`: float32 if the device gives that of 16-bit operands, else rounded to 16 bits like them."""
    if a.dtype != torch.float32 and _gives_float32(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _gives_float32(a, adding=True):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += _matmul(a, b)


def _gives_float32(x: Tensor, *, adding: bool = False) -> bool:
    # Whether a product of 16-bit operands (`adding`: a sum with one) can be had in float32, as cuBLAS computes it.
    return x.is_cuda and torch.version.hip is None and passes_trial(x.device, x.dtype, adding)


@cache
def passes_trial(device: torch.device, dtype: torch.dtype, adding: bool) -> bool:
    """Return whether a float32 product of operands in `dtype`, laid out as in the loss, is correct in this torch."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(48, n, generator=generator).to(device, dtype) for n in (64, 32))

    def trial() -> float:
        result = torch.ones(64, 32, device=device)
        if adding:
            torch.addmm(result, a.T, b, out_dtype=torch.float32, out=result)
        else:
            result = torch.mm(a.T, b, out_dtype=torch.float32)
        # Rounded to 16 bits it would be off by 0.05 and more.
        return float((result - (a.double().T @ b.double() + adding)).abs().max()) / 1e-3

    name = f"{'sum' if adding else 'product'} of {str(dtype).removeprefix('torch.')}"
    return not trial_problem(trial, f"The loss does without its {name} in float32 on {device}")
