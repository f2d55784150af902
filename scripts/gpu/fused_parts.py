"""Parts that hold kernels against references: attention row by row, and the loss."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from kit import SHORT, Kit, relative_error, run_config, web_like_batches
from torch import Tensor
from torch.nn import functional as F

from ds_encdec.model.loss import linear_cross_entropy, passes_trial
from ds_encdec.objectives.protocol import layout_of

ATTENTION_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
LOSS_BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error, ‖found - expected‖ / ‖expected‖, of results and of each gradient."""


def loss(kit: Kit) -> None:
    """The chunked loss against one over all logits in float64: values and gradients, which are accumulated once."""
    words, hidden_size, tokens = (512, 64, 40) if kit.dry_run else (151_936, 1024, 2500)
    generator = torch.Generator(kit.device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=kit.device)
    weight = 0.05 * torch.randn(words, hidden_size, generator=generator, device=kit.device)
    labels = torch.randint(words, (tokens,), generator=generator, device=kit.device)
    labels[::7] = -100
    extras = ({"label_smoothing": 0.0, "z_loss": 0.0}, {"label_smoothing": 0.1, "z_loss": 1e-4})
    for dtype, extra in itertools.product(LOSS_BOUNDS, extras):
        name = f"{str(dtype).removeprefix('torch.')}{', smoothing and z-loss' * any(extra.values())}"
        with kit.trying(name):
            inputs = [x.detach().to(dtype).clone().requires_grad_() for x in (hidden, weight)]
            expected = _whole_loss(*inputs, labels, **extra)
            total, token_losses = linear_cross_entropy(*inputs, labels, 1024, **extra)
            total.backward()
            once = inputs[1].grad.clone()  # type: ignore[union-attr]
            linear_cross_entropy(*inputs, labels, 1024, **extra)[0].backward()
            with torch.no_grad():
                again, _ = linear_cross_entropy(*inputs, labels, 1024, **extra)
            found = (total, token_losses, inputs[0].grad / 2, once)  # type: ignore[operator]
            parts = ("total", "token_losses", "hidden_gradient", "weight_gradient")
            errors = {part: relative_error(*pair) for part, *pair in zip(parts, found, expected, strict=True)}
            errors["no_grad"] = relative_error(again, total)
            errors["accumulated"] = relative_error(inputs[1].grad, 2 * once)  # type: ignore[arg-type]
            kit.bounded(name, errors, LOSS_BOUNDS[dtype])
    _loss_kernel(kit)


def _whole_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, ...]:
    """The optimised sum, token losses, and both gradients in float64, chunk by chunk of tokens for want of memory."""
    whole = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    total, losses = torch.zeros((), dtype=torch.float64, device=hidden.device), []
    for states, targets in zip(whole[0].split(500), labels.split(500), strict=True):
        logits = states @ whole[1].T
        token = F.cross_entropy(logits, targets, reduction="none")
        smooth = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
        part = (smooth + z_loss * logits.logsumexp(-1).square() * (targets != -100)).sum()
        part.backward()
        total += part.detach()
        losses.append(token.detach())
    gradients = [x.grad for x in whole]
    return total, torch.cat(losses), *gradients  # type: ignore[return-value]


def _loss_kernel(kit: Kit) -> None:
    """Say whether the loss runs in its kernel, and its products come out in float32: on a GPU both must."""
    if kit.device.type != "cuda":
        kit.omit("the loss's kernel", "there is no GPU; Triton's interpreter runs it in tests/model")
        return
    from ds_encdec.model import loss_kernel

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with kit.trying(name := f"kernel, gradients in {dtype}"):
            error = loss_kernel.trial_error(kit.device, dtype)
            kit.row(name, ok=error <= 1.0, error_over_rounding=error)
    for dtype, adding in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        name = f"{'sums of ' * adding}products of {dtype} in float32"
        kit.row(name, ok=passes_trial(kit.device, dtype, adding))  # the output has why not


def attention(kit: Kit) -> None:
    """Every kernel of the table that takes this device, output and gradients, against one call per document."""
    from ds_encdec.model import attention_kernels as table

    config = run_config(kit, kit.sizes, data=SHORT if kit.dry_run else {})
    (batch,), _ = web_like_batches(config, kit.sizes["vocab_size"], 1)
    batch = batch.to(kit.device)
    layout = layout_of(batch)
    heads, groups, width = (kit.sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    for kernel, dtype in itertools.product(table.KERNELS, ATTENTION_BOUNDS):
        name = f"{kernel.name}, {str(dtype).removeprefix('torch.')}"
        with kit.trying(name):
            if reason := table.why_not(kernel, table.KernelQuery(kit.device, dtype, width)):
                kit.omit(name, reason)
                continue
            for part, causal in (("encoder", False), ("merged", True)):
                segments = getattr(layout, part)
                offsets = (segments.query_cu_seqlens, segments.key_cu_seqlens, segments.key_cu_seqlens)
                generator = torch.Generator(kit.device).manual_seed(1)
                inputs = [
                    torch.randn(int(ends[-1]), count, width, generator=generator, device=kit.device).to(dtype)
                    for ends, count in zip(offsets, (heads, groups, groups), strict=True)
                ]
                found = _attended(kernel, inputs, segments, causal)
                expected = _attended(table.BY_DOCUMENT, [x.float() for x in inputs], segments, causal)
                names = ("out", "q_gradient", "k_gradient", "v_gradient")
                errors = {one: relative_error(*pair) for one, *pair in zip(names, found, expected, strict=True)}
                kit.bounded(f"{name}, {part}", errors, ATTENTION_BOUNDS[dtype])


def _attended(kernel: Any, inputs: list[Tensor], segments: Any, causal: bool) -> tuple[Tensor, ...]:
    """The output of the real tokens, and gradients; behind those is padding, which kernels fill with anything."""
    given = [x.detach().requires_grad_() for x in inputs]
    out = kernel.attend(*given, segments, causal, 0.0)[: sum(segments.query_lengths)]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return out, *torch.autograd.grad((out.float() * weights).sum(), given)
