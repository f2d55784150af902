"""Attention over packed documents: a table of kernels, of which the first that fits a device and dtype is taken.
Queries of a document see its keys and no others, if causal under a mask aligned to the bottom right. GPU kernels are
operators inside a graph of torch.compile, which lengths reach as tensors or as sizes of tensors, never as constants;
one call per document ends a graph. A GPU kernel is taken only if it agrees with that on a few documents."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen as torch_varlen

from .precision import trial_problem

try:
    import flash_attn  # type: ignore[import-not-found]
except ImportError:
    flash_attn = None
_HAS_FLASH_ATTENTION_3 = find_spec("flash_attn_interface") is not None  # a look takes as long as a layer's launches

# Documents share a call up to this product of all their queries and all their keys: on a CPU a call costs about as much
# as 4,096 masked scores.
_JOINED_SCORES = 4096


@dataclass(frozen=True)
class _MaskedCall:
    """Documents attended together: tokens, and the mask to add to scores, None without or if it is plain causal."""

    queries: int
    keys: int
    mask: Tensor | None

    @classmethod
    def of(
        cls, lengths: Sequence[tuple[int, int]], causal: bool, dtype: torch.dtype, device: torch.device
    ) -> "_MaskedCall":
        queries, keys = (sum(side) for side in zip(*lengths, strict=True))
        if len(lengths) == 1 and (not causal or queries == keys):
            return cls(queries, keys, None)
        mask = torch.full((queries, keys), -torch.inf, dtype=dtype, device=device)
        row = column = 0
        for length, width in lengths:
            # What triu_ keeps stays hidden.
            mask[row : row + length, column : column + width].triu_(width - length + 1 if causal else width)
            row, column = row + length, column + width
        return cls(queries, keys, mask)


class Segments:
    """The places of each document's queries and keys in their flat buffers. `query_cu_seqlens`, `key_cu_seqlens`: int32
    [S + 1] on the device, over the whole buffers: documents, a few empty segments, and the padding tail.
    `query_lengths`, `key_lengths`: the documents' tokens, on the host; `query_tail`, `key_tail`: tokens of padding.
    `longest_query`, `longest_key`: empty tensors [n, 0] for longest segments of n tokens, padding included: to compiled
    code a size may be a variable, but a number is a constant. Not a dataclass, in each field of which FSDP2 would look
    for gradients, around every layer."""

    def __init__(
        self,
        query_cu_seqlens: Tensor,
        key_cu_seqlens: Tensor,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        query_tail: int = 0,
        key_tail: int = 0,
    ) -> None:
        self.query_cu_seqlens, self.key_cu_seqlens = query_cu_seqlens, key_cu_seqlens
        self.query_lengths, self.key_lengths = query_lengths, key_lengths
        self.query_tail, self.key_tail = query_tail, key_tail
        # At least 2: compiled code takes sizes of 0 and 1 for constants. The bound may exceed the real length.
        self.longest_query = torch.empty(max(2, *query_lengths, query_tail), 0)
        self.longest_key = torch.empty(max(2, *key_lengths, key_tail), 0)
        # Results of `calls`: the layers of a model, and their recomputations, share masks.
        self.made: dict[Any, tuple[_MaskedCall, ...]] = {}

    def calls(self, causal: bool, dtype: torch.dtype, device: torch.device, *, joins: bool) -> tuple[_MaskedCall, ...]:
        """Return the calls in which documents are attended in turn; with `joins`, short neighbours share one."""
        key = causal, dtype, device, joins
        if key not in self.made:
            groups: list[list[tuple[int, int]]] = []
            for one in zip(self.query_lengths, self.key_lengths, strict=True):
                together = [*groups[-1], one] if groups and joins else [one]
                if len(together) > 1 and prod(sum(side) for side in zip(*together, strict=True)) <= _JOINED_SCORES:
                    groups[-1] = together
                else:
                    groups.append([one])
            self.made[key] = tuple(_MaskedCall.of(group, causal, dtype, device) for group in groups)
        return self.made[key]

    def varying(self) -> tuple[Tensor, ...]:
        """Return the tensors whose first dimension differs from batch to batch."""
        return self.query_cu_seqlens, self.key_cu_seqlens, self.longest_query, self.longest_key

    def kernel_lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Return both boundaries, and upper bounds of the longest query and key segment, padding included."""
        return self.query_cu_seqlens, self.key_cu_seqlens, self.longest_query.shape[0], self.longest_key.shape[0]


@dataclass(frozen=True)
class KernelQuery:
    """The tensors that attention runs on: their device and dtype, the width of a head, and the dropout."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    dropout: float = 0.0


# q [Tq, heads, D], k and v [Tk, key_value_heads, D], their segments, causal, dropout → like q.
Attend = Callable[[Tensor, Tensor, Tensor, Segments, bool, float], Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """One row: its name in messages, the kernel, and `refusal`, which returns why it cannot run a query, or an empty
    text."""

    name: str
    refusal: Callable[[KernelQuery], str]
    attend: Attend
    # It attends all documents in one call, with memory for their lengths and not for the squares of these.
    is_flash: bool = True
    implementation: str = ""  # the implementation to activate in torch's operators; "" for the one that they run anyway


def choose_kernel(wanted: KernelQuery, *, flash: bool = True) -> tuple[AttentionKernel, str]:
    """Return the first row that is correct for `wanted`, and why preferred ones are passed over, or an empty text. With
    `flash=False` it is the row that goes by document."""
    reasons: dict[str, None] = {}
    for kernel in KERNELS[:-1] if flash else ():
        if not (reason := why_not(kernel, wanted)):
            return kernel, "; ".join(reasons)
        reasons[reason] = None
    return BY_DOCUMENT, "; ".join(reasons)


@torch.compiler.disable
def attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, dropout: float = 0.0
) -> Tensor:
    """Call `scaled_dot_product_attention` for each document, or for short neighbours without dropout: the fastest form
    on CPUs. These compute 16 bits in float32, which takes a quarter of the time for documents of 30 tokens. One row of
    the padding tail is computed, and zeroed, to keep q, k and v in the autograd graph."""
    dtype = q.dtype
    computed = torch.float32 if q.device.type == "cpu" and dtype.itemsize == 2 else dtype
    calls = segments.calls(causal, computed, q.device, joins=not dropout)
    q, k, v = (x.to(computed).transpose(0, 1)[None] for x in (q, k, v))  # once, not for every document
    queries = q.split((*(call.queries for call in calls), segments.query_tail), dim=2)
    keys, values = (x.split((*(call.keys for call in calls), segments.key_tail), dim=2) for x in (k, v))
    *documents, tail = zip(queries, keys, values, strict=True)
    attend = partial(nn.functional.scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1])
    out = [
        attend(*tensors, attn_mask=call.mask, is_causal=causal and call.mask is None, dropout_p=dropout)
        for call, tensors in zip(calls, documents, strict=True)
        if call.queries
    ]
    if segments.query_tail:
        out.append((attend(*(x[:, :, :1] for x in tail)) * 0.0).expand(-1, -1, segments.query_tail, -1))
    return torch.cat([one[0].transpose(0, 1) for one in out]).to(dtype) if out else q[0].transpose(0, 1).to(dtype)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend, in torch, from q [B, Lq, heads, D] to k, v [B, Lk, key_value_heads, D] where `mask` is True."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.device.type != "cpu":  # the fused kernel that takes masks takes no groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped).transpose(1, 2)


@torch.compiler.assume_constant_result
def _needs_enable_gqa() -> bool:
    """Return whether torch's kernel needs an argument for heads that share their keys, as since 2.12."""
    return "enable_gqa" in inspect.signature(torch_varlen.varlen_attn).parameters


def attend_in_torch(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, _dropout: float = 0.0) -> Tensor:
    """Run torch's variable-length attention: FlashAttention 2, or the activated implementation."""
    options: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[-2] != k.shape[-2] and _needs_enable_gqa():
        options["enable_gqa"] = True
    return torch_varlen.varlen_attn(q, k, v, *segments.kernel_lengths(), **options)  # type: ignore[return-value]


def _attend_in_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, dropout: float = 0.0
) -> Tensor:
    # Causal is aligned to the bottom right since flash-attn 2.1.
    return flash_attn.flash_attn_varlen_func(q, k, v, *segments.kernel_lengths(), dropout_p=dropout, causal=causal)


def _flash_refusal(wanted: KernelQuery) -> str:
    if wanted.device.type != "cuda":
        return f"there is no flash kernel for {wanted.device.type} devices"
    if wanted.dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels compute in bfloat16 and float16, not in {str(wanted.dtype).removeprefix('torch.')}"
    if (had := torch.cuda.get_device_capability(wanted.device)) < (8, 0):
        return f"flash kernels need compute capability 8.0 (Ampere) or later, and this GPU has {had[0]}.{had[1]}"
    if wanted.head_dim > 256 or wanted.head_dim % 8:
        return f"flash kernels take heads of a multiple of 8 up to 256, not of {wanted.head_dim}"
    return ""


def _torch_refusal(wanted: KernelQuery) -> str:
    return _flash_refusal(wanted) or ("torch.nn.attention.varlen has no dropout" if wanted.dropout else "")


def _fa3_refusal(wanted: KernelQuery) -> str:
    if refusal := _torch_refusal(wanted):
        return refusal
    if torch.cuda.get_device_capability(wanted.device)[0] != 9:
        return "FlashAttention 3 is for Hopper GPUs"
    return "" if _HAS_FLASH_ATTENTION_3 else "flash_attn_interface is not installed"


def why_not(kernel: AttentionKernel, wanted: KernelQuery) -> str:
    """Return why `kernel` cannot run on `wanted`, or fails its trial there; an empty text if it is correct."""
    refusal = kernel.refusal(wanted)
    return refusal if refusal or not kernel.is_flash else _failure(kernel, replace(wanted, dropout=0.0))


@cache  # a kernel is tried once per process
def _failure(kernel: AttentionKernel, wanted: KernelQuery) -> str:
    registry, before = nn.attention, None

    def trial() -> float:
        nonlocal before
        if kernel.implementation:
            before = registry.current_flash_attention_impl()
            registry.activate_flash_attention_impl(kernel.implementation)
        return _trial_error(kernel, wanted)

    failure = f"{kernel.name} fails on a few documents"
    with torch.autocast(wanted.device.type, enabled=False):
        problem = trial_problem(trial, f"Attention on {wanted.device}: {failure}")
    if not problem:
        return ""
    if kernel.implementation and registry.current_flash_attention_impl() != before:
        registry.restore_flash_attention_impl()
        if before is not None:
            registry.activate_flash_attention_impl(before)
    return f"{failure}: {problem}"


# Queries and keys of documents: without queries, without anything, of one token, of several blocks of a kernel.
_TRIAL = ((5, 9), (0, 7), (150, 300), (0, 0), (1, 1), (70, 70))


@torch.inference_mode(False)
@torch.enable_grad()
def _trial_error(kernel: AttentionKernel, wanted: KernelQuery) -> float:
    errors: list[Tensor] = []
    for documents, causal, tails in (
        (_TRIAL, True, (3, 8)),
        (_TRIAL, True, (0, 5)),
        (((9, 9), (64, 64)), False, (0, 0)),
    ):
        query_lengths, key_lengths = zip(*documents, strict=True)
        queries, keys = sum(query_lengths) + tails[0], sum(key_lengths) + tails[1]
        query_edges, key_edges = (
            torch.tensor([0, *accumulate(side), sum(side), sum(side), tokens], dtype=torch.int32, device=wanted.device)
            for side, tokens in ((query_lengths, queries), (key_lengths, keys))
        )
        segments = Segments(query_edges, key_edges, query_lengths, key_lengths, *tails)
        generator = torch.Generator(wanted.device).manual_seed(0)
        q, k, v, weights = (
            torch.randn(tokens, heads, wanted.head_dim, generator=generator, device=wanted.device).to(wanted.dtype)
            for tokens, heads in ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
        )
        weights[sum(query_lengths) :] = 0.0
        results: list[list[Tensor]] = []
        for attend, dtype in ((kernel.attend, wanted.dtype), (attend_by_document, torch.float32)):
            inputs = tuple(x.to(dtype).requires_grad_() for x in (q, k, v))
            out = attend(inputs[0], inputs[1], inputs[2], segments, causal, 0.0)
            gradients = torch.autograd.grad((out * weights.to(dtype)).float().sum(), inputs)
            results.append([out.detach() * (weights != 0), *gradients])
        errors += [
            ((actual.float() - expected).abs() / (0.05 + 0.05 * expected.abs())).max()
            for actual, expected in zip(*results, strict=True)
        ]
    return float(torch.stack(errors).max())


BY_DOCUMENT = AttentionKernel("one call per document", lambda _: "", attend_by_document, is_flash=False)
# Every kernel, the fastest first. The last one runs everywhere.
KERNELS = (
    AttentionKernel("FlashAttention 3", _fa3_refusal, attend_in_torch, implementation="FA3"),
    AttentionKernel("torch.nn.attention.varlen", _torch_refusal, attend_in_torch),
    AttentionKernel(
        "flash_attn",
        lambda wanted: _flash_refusal(wanted) or ("flash_attn is not installed" if flash_attn is None else ""),
        _attend_in_flash_attn,
    ),
    BY_DOCUMENT,
)
