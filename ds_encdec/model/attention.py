"""Attention of the encoder-decoder, for flat packed buffers and for ordinary padded batches.

A *layout* says which positions may see which. Both layouts answer the same two questions, so layers know neither:

- `attend_encoder(q, k, v)`: bidirectional self-attention of the encoder.
- `attend_merged(q, k, v, encoder_k, encoder_v)`: the decoder's merged attention (T5Gemma 2, arXiv 2512.14856): one
  softmax over the encoder's output and the decoder's own past. With keys laid out as [encoder ; decoder] the mask is
  a causal one aligned to the bottom right corner, so variable-length flash kernels run it in one call.

Queries are [..., tokens, heads, head_dim], keys and values [..., tokens, key_value_heads, head_dim] (grouped-query
attention: each key/value head serves heads / key_value_heads query heads).

Part of the exported remote code: it imports nothing of ds_encdec outside its own folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .precision import product_dtype

try:
    from torch.nn.attention import varlen as torch_varlen
except ImportError:
    torch_varlen = None  # type: ignore[assignment]
try:
    import flash_attn  # type: ignore[import-not-found]
except ImportError:
    flash_attn = None


_SEGMENTS_MULTIPLE = 8
"""The number of segments is rounded up to a multiple: of few different sizes memory is found again."""


@dataclass(frozen=True)
class Segments:
    """The places of each document's queries and keys in their flat buffers.

    `query_cu_seqlens`, `key_cu_seqlens`: int32 [S + 1] on the device; they cover the whole buffers. Behind the
    documents stand up to `_SEGMENTS_MULTIPLE` segments, the last the padding tail, the others empty: kernels start
    their blocks for each. `query_lengths`, `key_lengths`: the documents' tokens, on the host; `query_tail`, `key_tail`:
    tokens of padding behind the last document.
    """

    query_cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_tail: int
    key_tail: int

    def kernel_lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Both boundaries, and the tokens of the longest query and key segment, padding included."""
        longest = max((*self.query_lengths, self.query_tail)), max((*self.key_lengths, self.key_tail))
        return self.query_cu_seqlens, self.key_cu_seqlens, *longest


@dataclass(frozen=True)
class PackedLayout:
    """Documents packed one behind the other into two flat buffers of Te encoder and Td decoder tokens.

    The padding at the end of each buffer is treated as one more document: nothing real attends to it, kernels find
    every row defined, and its attention output is set to zero. This also keeps every projection in the autograd
    graph of a batch without documents, which ZeRO-3 needs (each rank must reduce the same gradients).

    | field | dtype, shape | meaning |
    |---|---|---|
    | encoder, merged | Segments | encoder self-attention; decoder queries over [encoder ; decoder] keys |
    | encoder_positions, decoder_positions | int64 [Te], [Td] | position within the document |
    | encoder_valid, decoder_valid | bool [Te], [Td] | False on padding |
    | merge_index | int64 [Te + Td] | gathers [all encoder ; all decoder] rows into [encoder ; decoder] per document |
    """

    encoder: Segments
    merged: Segments
    encoder_positions: Tensor
    decoder_positions: Tensor
    encoder_valid: Tensor
    decoder_valid: Tensor
    merge_index: Tensor
    flash: bool = True
    """Use a flash kernel where the device has one."""
    dropout: float = 0.0
    """Share of the attention weights that is set to zero; the others are scaled up for it."""

    @classmethod
    def build(
        cls,
        encoder_cu_seqlens: Tensor,
        decoder_cu_seqlens: Tensor,
        encoder_lengths: tuple[int, ...],
        decoder_lengths: tuple[int, ...],
        encoder_positions: Tensor,
        decoder_positions: Tensor,
    ) -> PackedLayout:
        """Derive the layout of one micro-batch, without a device synchronisation.

        `*_cu_seqlens`: int32 [max_documents + 1] boundaries, past the last document repeating the last one.
        `*_lengths`: the same on the host, one entry per document; an encoder length may be 0. `*_positions`: int64
        [Te] and [Td].
        """
        encoder_tokens, decoder_tokens = encoder_positions.shape[0], decoder_positions.shape[0]
        encoder_tail, decoder_tail = encoder_tokens - sum(encoder_lengths), decoder_tokens - sum(decoder_lengths)
        if len(encoder_lengths) != len(decoder_lengths) or encoder_tail < 0 or decoder_tail < 0:
            raise ValueError(
                f"{len(encoder_lengths)} encoder and {len(decoder_lengths)} decoder documents of "
                f"{sum(encoder_lengths)} and {sum(decoder_lengths)} tokens do not fit into buffers of "
                f"{encoder_tokens} and {decoder_tokens} tokens"
            )
        segments = -(-(len(encoder_lengths) + 1) // _SEGMENTS_MULTIPLE) * _SEGMENTS_MULTIPLE
        encoder_cu = F.pad(encoder_cu_seqlens[:segments], (0, 1), value=encoder_tokens)
        decoder_cu = F.pad(decoder_cu_seqlens[:segments], (0, 1), value=decoder_tokens)
        merged_cu = encoder_cu + decoder_cu
        merged_lengths = tuple(e + d for e, d in zip(encoder_lengths, decoder_lengths, strict=True))
        return cls(
            encoder=Segments(encoder_cu, encoder_cu, encoder_lengths, encoder_lengths, encoder_tail, encoder_tail),
            merged=Segments(
                decoder_cu, merged_cu, decoder_lengths, merged_lengths, decoder_tail, encoder_tail + decoder_tail
            ),
            encoder_positions=encoder_positions,
            decoder_positions=decoder_positions,
            encoder_valid=torch.arange(encoder_tokens, device=encoder_cu.device) < encoder_cu_seqlens[-1],
            decoder_valid=torch.arange(decoder_tokens, device=decoder_cu.device) < decoder_cu_seqlens[-1],
            merge_index=_merge_index(encoder_cu, decoder_cu, encoder_tokens, decoder_tokens),
        )

    # torch.compile leaves attention alone: it goes by the documents' lengths, and would be compiled for each batch.
    @torch.compiler.disable
    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Self-attention within each document. q: [Te, heads, D]; returns the same shape, zeros on padding."""
        out = self._attend(q, k, v, self.encoder, causal=False)
        return torch.where(self.encoder_valid[:, None, None], out, 0.0)

    @torch.compiler.disable
    def attend_merged(self, q: Tensor, k: Tensor, v: Tensor, encoder_k: Tensor, encoder_v: Tensor) -> Tensor:
        """Merged attention within each document. q: [Td, heads, D]; returns the same shape, zeros on padding."""
        merged_k = torch.cat([encoder_k, k]).index_select(0, self.merge_index)
        merged_v = torch.cat([encoder_v, v]).index_select(0, self.merge_index)
        out = self._attend(q, merged_k, merged_v, self.merged, causal=True)
        return torch.where(self.decoder_valid[:, None, None], out, 0.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool) -> Tensor:
        kernel = flash_kernel(q, self.dropout) if self.flash else None
        return (kernel or partial(attend_by_document, dropout=self.dropout))(q, k, v, segments, causal)


@dataclass(frozen=True)
class PaddedLayout:
    """An ordinary batch: [batch, length] and masks.

    `encoder_mask`: bool [B, 1, Le, Le] or None (nothing masked); `merged_mask`: bool [B, 1, Lq, Le + Lk], True where
    a query may look; Lk counts cached and new decoder tokens, Lq the new ones. Positions: int64 [1, Le], [1 or B, Lq].
    """

    encoder_positions: Tensor
    decoder_positions: Tensor
    encoder_mask: Tensor | None
    merged_mask: Tensor

    @classmethod
    def build(
        cls,
        *,
        encoder_length: int,
        encoder_valid: Tensor | None = None,
        decoder_length: int = 0,
        decoder_valid: Tensor | None = None,
        past_length: int = 0,
        device: torch.device,
    ) -> PaddedLayout:
        """Derive both masks from Hugging Face's attention masks.

        `encoder_valid`: [B, encoder_length], `decoder_valid`: [B, past_length + decoder_length], non-zero on real
        tokens; None: all are. A position always sees itself, so that no row of a softmax is empty. Decoder positions
        count real tokens: keys from the encoder are not rotated, so padding on the left must not shift them.
        """
        encoder_positions = torch.arange(encoder_length, device=device)
        queries = torch.arange(past_length, past_length + decoder_length, device=device)
        keys = torch.arange(past_length + decoder_length, device=device)
        encoder_mask = None
        if encoder_valid is not None:
            self_visible = torch.eye(encoder_length, dtype=torch.bool, device=device)
            encoder_mask = encoder_valid.bool()[:, None, None, :] | self_visible
        decoder_positions = queries[None]
        causal = (keys <= queries[:, None])[None, None]
        if decoder_valid is not None:
            decoder_positions = (decoder_valid.long().cumsum(-1) - 1).clamp_min(0)[:, past_length:]
            causal = (causal & decoder_valid.bool()[:, None, None, :]) | (keys == queries[:, None])
        encoder_columns = causal.new_ones(1, encoder_length) if encoder_valid is None else encoder_valid.bool()
        batch = max(len(causal), len(encoder_columns))
        encoder_columns = encoder_columns[:, None, None].expand(batch, 1, decoder_length, -1)
        return cls(
            encoder_positions=encoder_positions[None],
            decoder_positions=decoder_positions,
            encoder_mask=encoder_mask,
            merged_mask=torch.cat([encoder_columns, causal.expand(batch, -1, -1, -1)], dim=-1),
        )

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Self-attention of each row. q: [B, Le, heads, D]; returns the same shape."""
        return _masked_attention(q, k, v, self.encoder_mask)

    def attend_merged(self, q: Tensor, k: Tensor, v: Tensor, encoder_k: Tensor, encoder_v: Tensor) -> Tensor:
        """Merged attention of each row. q: [B, Lq, heads, D]; returns the same shape.

        Keys and values of a static cache stand in buffers longer than what has been written, which is cut off.
        """
        encoder_length = self.encoder_positions.shape[1]
        decoder_length = self.merged_mask.shape[-1] - encoder_length
        keys, values = (
            torch.cat([encoder[:, :encoder_length], decoder[:, :decoder_length]], dim=1)
            for encoder, decoder in ((encoder_k, k), (encoder_v, v))
        )
        return _masked_attention(q, keys, values, self.merged_mask)


Layout = PackedLayout | PaddedLayout
Kernel = Callable[[Tensor, Tensor, Tensor, Segments, bool], Tensor]


def attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, dropout: float = 0.0
) -> Tensor:
    """One `scaled_dot_product_attention` per document: the fastest form on CPUs, and the one every device has.

    A bottom-right aligned causal mask if `causal`. Of the padding tail only one row is computed, and zeroed: enough
    to keep q, k and v in the autograd graph, at no cost.
    """
    queries = q.split((*segments.query_lengths, segments.query_tail))
    keys, values = (x.split((*segments.key_lengths, segments.key_tail)) for x in (k, v))
    *documents, tail = zip(queries, keys, values, strict=True)
    out = [_attend_one(*document, causal, dropout) for document in documents if len(document[0])]
    if segments.query_tail:
        query, key, value = (x[:1] for x in tail)
        row = _attend_one(query, key, value, causal=False)
        out.append((row * 0.0).expand(segments.query_tail, -1, -1))
    return torch.cat(out) if out else q


def flash_kernel(q: Tensor, dropout: float) -> Kernel | None:
    """The variable-length flash kernel that can run on q's device and dtype; None if there is none."""
    return choose_kernel(q.device, q.dtype, dropout)[0]


def choose_kernel(device: torch.device, dtype: torch.dtype, dropout: float = 0.0) -> tuple[Kernel | None, str]:
    """The variable-length flash kernel for tensors of `dtype` on `device`, and its name; or None, and why."""
    if device.type != "cuda":
        return None, f"there is no flash kernel for {device.type} devices"
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"flash kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return None, f"flash kernels need compute capability 8.0 (Ampere) or later, and this GPU has {major}.{minor}"
    if not dropout and torch_varlen is not None and "window_size" in _options(torch_varlen.varlen_attn):
        return _torch_varlen, "torch.nn.attention.varlen"
    if flash_attn is not None:
        return partial(_flash_attn_varlen, dropout=dropout), "flash_attn"
    if dropout:
        return None, "torch.nn.attention.varlen has no dropout, and flash_attn is not installed"
    return None, f"torch {torch.__version__} has no fitting torch.nn.attention.varlen, and flash_attn is not installed"


@cache
def _options(function: Callable[..., object]) -> Collection[str]:
    """The parameters that `function` takes: torch's variable-length attention has gained some over its releases."""
    return inspect.signature(function).parameters.keys()


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    attend = torch_varlen.varlen_attn
    options: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[-2] != k.shape[-2]:
        if "enable_gqa" in _options(attend):
            options["enable_gqa"] = True
        else:  # before torch 2.13
            k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2) for x in (k, v))
    return attend(q, k, v, *segments.kernel_lengths(), **options)  # type: ignore[return-value]


def _flash_attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, dropout: float = 0.0
) -> Tensor:
    # Causal is aligned to the bottom right since flash-attn 2.1.
    return flash_attn.flash_attn_varlen_func(q, k, v, *segments.kernel_lengths(), dropout_p=dropout, causal=causal)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float = 0.0) -> Tensor:
    """q: [Lq, heads, D] against k, v: [Lk, key_value_heads, D] of one document."""
    mask = None
    if causal and len(q) != len(k):
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    dtype, multiply_in = q.dtype, product_dtype(q)
    q, k, v = (x[None].to(multiply_in) for x in (q, k, v))
    return _masked_attention(q, k, v, mask, is_causal=causal and mask is None, dropout_p=dropout)[0].to(dtype)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped, **options).transpose(1, 2)


def _merge_index(encoder_cu: Tensor, decoder_cu: Tensor, encoder_tokens: int, decoder_tokens: int) -> Tensor:
    """Row of [all encoder ; all decoder] that stands at each row of the per-document [encoder ; decoder] order."""
    merged_cu = encoder_cu + decoder_cu
    row = torch.arange(encoder_tokens + decoder_tokens, device=encoder_cu.device)
    # Empty segments end where they start; `right=True` steps over them.
    document = torch.searchsorted(merged_cu[1:].contiguous(), row, right=True)
    offset = row - merged_cu[document]
    encoder_length = encoder_cu[document + 1] - encoder_cu[document]
    from_encoder = encoder_cu[document] + offset
    from_decoder = encoder_tokens + decoder_cu[document] + offset - encoder_length
    return torch.where(offset < encoder_length, from_encoder, from_decoder)
