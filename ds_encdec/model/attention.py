"""Attention of the encoder-decoder, for flat packed buffers and for ordinary padded batches. A *layout* decides which
positions see which; layers call both layouts alike. The decoder's merged attention (T5Gemma 2, arXiv 2512.14856) is one
softmax over the encoder's output and the decoder's own past, under a causal mask aligned to the bottom right corner.
Queries are [..., tokens, heads, head_dim], keys and values [..., tokens, key_value_heads, head_dim]."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention_kernels import BY_DOCUMENT, AttentionKernel, Segments, masked_attention

_SEGMENTS_MULTIPLE = 8  # the number of segments is rounded up to a multiple: with few different sizes, memory is reused


@dataclass(frozen=True)
class PackedLayout:
    """Documents packed one behind the other into two flat buffers of Te encoder and Td decoder tokens.

    The padding at the end of each buffer is one more document, which no real one attends to and whose states no loss
    reads. It keeps every projection in the autograd graph of a batch without documents: ZeRO-3 needs the same gradients
    on each rank.

    | field | dtype, shape | meaning |
    |---|---|---|
    | encoder, merged | Segments | encoder self-attention; decoder queries over [encoder ; decoder] keys |
    | encoder_positions, decoder_positions | int64 [Te], [Td] | position within the document |
    | merge_index | int64 [Te + Td] | gathers [all encoder ; all decoder] rows into [encoder ; decoder] per document |
    | split_index | int64 [Te + Td] | gathers them back |"""

    encoder: Segments
    merged: Segments
    encoder_positions: Tensor
    decoder_positions: Tensor
    merge_index: Tensor
    split_index: Tensor
    kernel: AttentionKernel = BY_DOCUMENT
    dropout: float = 0.0  # share of the attention weights that is set to zero; the others are scaled up for it

    @classmethod
    def build(
        cls,
        encoder_cu_seqlens: Tensor,
        decoder_cu_seqlens: Tensor,
        encoder_lengths: tuple[int, ...],
        decoder_lengths: tuple[int, ...],
        encoder_positions: Tensor,
        decoder_positions: Tensor,
    ) -> "PackedLayout":
        """Derive the layout of one micro-batch, without a device synchronisation. `*_cu_seqlens`: boundaries, int32
        [max_documents + 1], the last one repeated to the end. `*_lengths`: the same on the host, one entry per
        document; an encoder length may be 0. `*_positions`: int64 [Te] and [Td]."""
        encoder_tokens, decoder_tokens = encoder_positions.shape[0], decoder_positions.shape[0]
        encoder_tail, decoder_tail = encoder_tokens - sum(encoder_lengths), decoder_tokens - sum(decoder_lengths)
        if len(encoder_lengths) != len(decoder_lengths) or encoder_tail < 0 or decoder_tail < 0:
            raise ValueError(
                f"{len(encoder_lengths)} encoder and {len(decoder_lengths)} decoder documents of "
                f"{sum(encoder_lengths)} and {sum(decoder_lengths)} tokens do not fit into buffers of "
                f"{encoder_tokens} and {decoder_tokens} tokens"
            )
        segments = -(-(len(encoder_lengths) + 1) // _SEGMENTS_MULTIPLE) * _SEGMENTS_MULTIPLE
        encoder_cu = torch.nn.functional.pad(encoder_cu_seqlens[:segments], (0, 1), value=encoder_tokens)
        decoder_cu = torch.nn.functional.pad(decoder_cu_seqlens[:segments], (0, 1), value=decoder_tokens)
        merged_cu = encoder_cu + decoder_cu
        merged_lengths = tuple(e + d for e, d in zip(encoder_lengths, decoder_lengths, strict=True))
        # For each row of the per-document [encoder ; decoder] order, its row in [all encoder ; all decoder].
        rows = torch.arange(encoder_tokens + decoder_tokens, device=encoder_cu.device)
        # Empty segments end where they start; `right=True` steps over them.
        document = torch.searchsorted(merged_cu[1:].contiguous(), rows, right=True)
        offset = rows - merged_cu[document]
        length = encoder_cu[document + 1] - encoder_cu[document]
        merge_index = torch.where(
            offset < length, encoder_cu[document] + offset, encoder_tokens + decoder_cu[document] + offset - length
        )
        return cls(
            encoder=Segments(encoder_cu, encoder_cu, encoder_lengths, encoder_lengths, encoder_tail, encoder_tail),
            merged=Segments(
                decoder_cu, merged_cu, decoder_lengths, merged_lengths, decoder_tail, encoder_tail + decoder_tail
            ),
            encoder_positions=encoder_positions,
            decoder_positions=decoder_positions,
            merge_index=merge_index,
            split_index=torch.empty_like(rows).scatter_(0, merge_index, rows),
        )

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each document. q: [Te, heads, D]; returns the same shape."""
        return self.kernel.attend(q, k, v, self.encoder, False, self.dropout)

    def continued_positions(self) -> Tensor:
        """Return decoder positions that go on behind the encoder's of the same document, int64 [Td]."""
        ends = self.merged.query_cu_seqlens[1:].contiguous()
        rows = torch.arange(len(self.decoder_positions), device=ends.device)
        document = torch.searchsorted(ends, rows, right=True)
        return self.decoder_positions + self.encoder.query_cu_seqlens.diff()[document]

    def merged_rows(self, encoder: Tensor, decoder: Tensor) -> Tensor:
        """Map [Te, ...] and [Td, ...] to [Te + Td, ...], each document's rows together."""
        return permuted(torch.cat([encoder, decoder]), self.merge_index, self.split_index)

    def attend_merged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each document, merged. q: [Td, heads, D]; returns the same shape."""
        return self.kernel.attend(q, k, v, self.merged, True, self.dropout)


def permuted(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return `rows` in the order of `index`, which `inverse` takes back."""
    return _Permuted.apply(rows, index, inverse)


class _Permuted(torch.autograd.Function):
    # The backward pass gathers, where autograd's own would add up.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@dataclass(frozen=True)
class PaddedLayout:
    """An ordinary batch: [batch, length] and masks. `encoder_mask`: bool [B, 1, Le, Le] or None (nothing masked);
    `merged_mask`: bool [B, 1, Lq, Le + Lk], True where a query may look; Lk counts cached and new decoder tokens, Lq
    the new ones. Positions: int64 [1 or B, Le], [1 or B, Lq]; `encoder_tokens`: real ones, int64 [1 or B, 1]."""

    encoder_positions: Tensor
    decoder_positions: Tensor
    encoder_tokens: Tensor
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
    ) -> "PaddedLayout":
        """Derive both masks from Hugging Face's, `encoder_valid` [B, encoder_length] and `decoder_valid` [B, past and
        new length]. A position always sees itself, so that no softmax row is empty; positions count real tokens, so
        that left padding does not shift them. Raises ValueError for other shapes."""
        _check_mask("attention_mask", encoder_valid, encoder_length)
        _check_mask("decoder_attention_mask", decoder_valid, past_length + decoder_length)
        queries = torch.arange(past_length, past_length + decoder_length, device=device)
        keys = torch.arange(past_length + decoder_length, device=device)
        encoder_mask, encoder_positions = None, torch.arange(encoder_length, device=device)[None]
        encoder_tokens = torch.full((1, 1), encoder_length, device=device)
        if encoder_valid is not None:
            encoder_positions, encoder_tokens = _counted(encoder_valid), encoder_valid.long().sum(-1, keepdim=True)
            encoder_mask = encoder_valid.bool()[:, None, None] | torch.eye(
                encoder_length, dtype=torch.bool, device=device
            )
        decoder_positions = queries[None]
        causal = (keys <= queries[:, None])[None, None]
        if decoder_valid is not None:
            decoder_positions = _counted(decoder_valid)[:, past_length:]
            causal = (causal & decoder_valid.bool()[:, None, None, :]) | (keys == queries[:, None])
        encoder_columns = causal.new_ones(1, encoder_length) if encoder_valid is None else encoder_valid.bool()
        batch = max(len(causal), len(encoder_columns))
        encoder_columns = encoder_columns[:, None, None].expand(batch, 1, decoder_length, -1)
        return cls(
            encoder_positions=encoder_positions,
            decoder_positions=decoder_positions,
            encoder_tokens=encoder_tokens,
            encoder_mask=encoder_mask,
            merged_mask=torch.cat([encoder_columns, causal.expand(batch, -1, -1, -1)], dim=-1),
        )

    def attend_encoder(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each row. q: [B, Le, heads, D]; returns the same shape."""
        return masked_attention(q, k, v, self.encoder_mask)

    def continued_positions(self) -> Tensor:
        """Return decoder positions that go on behind the encoder's real tokens, int64 [1 or B, Lq]."""
        return self.decoder_positions + self.encoder_tokens

    def merged_rows(self, encoder: Tensor, decoder: Tensor) -> Tensor:
        """Map [B, Le, ...] and [B, Lk, ...] to [B, Le + Lk, ...], without unwritten rows of a static cache."""
        encoder_length = self.encoder_positions.shape[1]
        return torch.cat(
            [encoder[:, :encoder_length], decoder[:, : self.merged_mask.shape[-1] - encoder_length]], dim=1
        )

    def attend_merged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each row, merged. q: [B, Lq, heads, D]; returns the same shape."""
        return masked_attention(q, k, v, self.merged_mask)


Layout = PackedLayout | PaddedLayout


def _counted(valid: Tensor) -> Tensor:
    return (valid.long().cumsum(-1) - 1).clamp_min(0)


def _check_mask(name: str, mask: Tensor | None, length: int) -> None:
    # A mask of another length might fit by broadcasting.
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != length):
        raise ValueError(f"{name} has shape {list(mask.shape)}. Give [batch, {length}]; cached tokens count.")
