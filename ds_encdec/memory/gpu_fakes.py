"""Fakes of what a GPU would run, on fake tensors of the CPU: torch has no fake GPU where it has no CUDA.

Where the model asks what its device can do, the answer is of a job's device. What stands in for a GPU's kernels
computes nothing, and allocates, keeps for the backward pass and gives back what the kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_encdec.engine.sharded_engine import compute_dtype
from ds_encdec.memory.job import Job
from ds_encdec.model import attention, loss, precision


@contextmanager
def as_on_device(job: Job) -> Iterator[None]:
    """Inside, the model runs on the CPU what it would run on the device of `job`."""
    emulated = frozenset({compute_dtype(job.config.training)}) if job.emulates_bf16 else frozenset()
    with ExitStack() as substitutions:
        substitutions.enter_context(substituted(precision, "_EMULATED_ON_CPU", emulated))
        if job.device == "cuda":
            substitutions.enter_context(substituted(attention, "flash_kernel", varlen_kernel))
            substitutions.enter_context(substituted(nn.functional, "rms_norm", _rms_norm))
            substitutions.enter_context(substituted(loss, "_gives_float32", lambda x: True))
        yield


@contextmanager
def substituted(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside, the attribute `name` of `owner` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def varlen_kernel(q: Tensor) -> attention.Kernel | None:
    """Stand in for `attention.flash_kernel`, as for a tensor on a GPU."""
    return _varlen_attention if q.dtype in (torch.bfloat16, torch.float16) else None


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, segments: attention.Segments, causal: bool) -> Tensor:
    """Torch's operator, which knows its shapes without a GPU, and what its backward pass works on inside."""
    out = attention._torch_varlen(q, k, v, segments, causal)
    if out.requires_grad:
        shapes = (q.shape, k.shape, len(segments.query_cu_seqlens) - 1)
        out.register_hook(lambda grad: _allocate_backward_workspace(grad, *shapes))
    return out


def _allocate_backward_workspace(grad: Tensor, query: torch.Size, key: torch.Size, segments: int) -> None:
    """Allocate, and give back, what flash attention 2 does in `mha_varlen_bwd` (csrc/flash_attn/flash_api.cpp).

    The gradients of q, k and v; that of q in float32, with 128 rows more for each segment, an empty one too; where
    heads share keys, those of keys and values of each head.
    """
    held = [grad.new_empty(shape) for shape in (query, key, key)]
    rows = query[0] + 128 * segments
    held += [grad.new_empty(shape, dtype=torch.float32) for shape in ((rows, *query[1:]), (rows, query[1]))]
    if query[1] != key[1]:
        held += [grad.new_empty((key[0], *query[1:])) for _ in range(2)]


def _rms_norm(x: Tensor, _shape: tuple[int, ...], weight: Tensor, _epsilon: float) -> Tensor:
    """Do what `rms_norm` does on a GPU in one operator, aten::_fused_rms_norm. A CPU computes it in single ones."""
    return _FusedRmsNorm.apply(x, weight)


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps its input, and one float32 for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
