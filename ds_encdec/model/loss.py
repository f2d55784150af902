"""Cross-entropy of a linear head, without ever holding the logits of more than a chunk of tokens.

With a vocabulary of 152 k, float32 logits of 8,192 tokens alone are 5 GB. `linear_cross_entropy` walks over chunks of
tokens and computes, while a chunk's logits exist, its losses *and* its gradients; the backward pass only scales them.
So no logits are computed twice, and nothing reads the head's weight in the backward pass.

Logits, softmax and the sums are float32 whatever the weights are, and the weight's gradient is accumulated in float32.

Part of the exported remote code: it imports nothing of ds_encdec outside its own folder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of a position without loss (`ds_encdec.types` holds the same; exported code cannot import it)."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Sum of the token losses of `hidden @ weight.T` against `labels`, and the token losses.

    hidden: [T, H]; weight: [V, H], same dtype; labels: int64 [T], -100 where there is no loss. `chunk_tokens`: tokens
    whose logits exist at one time. Returns a float32 scalar with gradient to hidden and weight, and float32 [T],
    detached, in nats, 0 at ignored positions. Under `no_grad` no gradient is computed.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, grad_enabled: bool
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = (grad_enabled and wanted for wanted in ctx.needs_input_grad[:2])
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        token_losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        matmul_weight = _matmul_operand(weight)
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            states = _matmul_operand(hidden[chunk])
            token_losses[chunk], logit_grads = _loss_and_logit_grads(states, matmul_weight, labels[chunk])
            if hidden_grad is not None:
                hidden_grad[chunk] = logit_grads @ matmul_weight
            if weight_grad is not None:
                _add_matmul(weight_grad, logit_grads.T, states)
            del logit_grads  # before the next chunk's logits are made: otherwise two chunks' would be there
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(token_losses)
        return token_losses.sum(), token_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        # Scaled where they lie. A second backward pass over a retained graph would scale again: autograd refuses it.
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad.mul_(grad)
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(grad).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None


def _loss_and_logit_grads(states: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses, float32 [C], and d(sum of losses)/d(logits), [C, V] in the weight's dtype.

    The float32 logits are overwritten by their own gradients, and gone on return.
    """
    logits = _matmul_float32(states, weight.T)
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)[:, None]
    target_logits = logits.gather(1, targets)
    maximum = logits.amax(dim=-1, keepdim=True)
    exponentials = logits.sub_(maximum).exp_()
    normalizer = exponentials.sum(dim=-1, keepdim=True)
    losses = (normalizer.log() + maximum - target_logits).squeeze(1).masked_fill(ignored, 0.0)
    gradients = exponentials.div_(normalizer)
    gradients.scatter_add_(1, targets, gradients.new_full((1, 1), -1.0).expand_as(targets))
    return losses, gradients.masked_fill_(ignored[:, None], 0.0).to(weight.dtype)


def _matmul_operand(x: Tensor) -> Tensor:
    """CUDA multiplies low precision into float32 results; elsewhere only float32 operands give those."""
    return x if x.is_cuda else x.float()


def _matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in float32. Low precision operands need a product of their own: addmm_ wants one dtype."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += _matmul_float32(a, b)
