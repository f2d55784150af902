"""Examples to one flat Batch: concatenated, shifted, with boundaries, padded at the end to the budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_encdec.data.budgets import Budgets
from ds_encdec.types import DENOISERS, IGNORE_INDEX, Batch, Example


def collate(examples: Sequence[Example], budgets: Budgets, *, decoder_start_id: int, pad_id: int) -> Batch:
    """One micro-batch with buffers of exactly the budgets; see `Batch` for shapes and dtypes.

    The decoder's input is each target sequence shifted right behind `decoder_start_id`. No examples at all
    give a batch without weight. Raises ValueError for examples that exceed the budgets.
    """
    encoder_lengths = tuple(len(example.encoder_ids) for example in examples)
    decoder_lengths = tuple(len(example.decoder_ids) for example in examples)
    if len(examples) > budgets.max_examples:
        raise ValueError(f"{len(examples)} examples in a micro-batch of at most {budgets.max_examples}")
    targets = _padded([example.decoder_ids for example in examples], budgets.decoder_tokens, IGNORE_INDEX)
    shifted = _padded([_shift(example.decoder_ids, decoder_start_id) for example in examples], len(targets), pad_id)
    numbers = {name: number for number, name in enumerate(DENOISERS)}
    denoisers = [np.full(len(example.decoder_ids), numbers[example.denoiser]) for example in examples]
    return Batch(
        encoder_ids=_padded([example.encoder_ids for example in examples], budgets.encoder_tokens, pad_id),
        decoder_input_ids=shifted,
        labels=targets,
        encoder_positions=_padded([np.arange(n) for n in encoder_lengths], budgets.encoder_tokens, 0),
        decoder_positions=_padded([np.arange(n) for n in decoder_lengths], budgets.decoder_tokens, 0),
        encoder_cu_seqlens=_boundaries(encoder_lengths, budgets.max_examples),
        decoder_cu_seqlens=_boundaries(decoder_lengths, budgets.max_examples),
        denoiser_ids=_padded(denoisers, budgets.decoder_tokens, 0),
        encoder_lengths=encoder_lengths,
        decoder_lengths=decoder_lengths,
        documents=tuple(example.document for example in examples),
    )


def pinned(batch: Batch) -> Batch:
    """`batch` in page-locked memory, from which copies to a GPU do not wait. Needs CUDA."""
    tensors: dict[str, Any] = {
        field.name: value.pin_memory()
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def _shift(target_ids: np.ndarray, decoder_start_id: int) -> np.ndarray:
    return np.concatenate([[decoder_start_id], target_ids[:-1]])


def _padded(pieces: Sequence[np.ndarray], size: int, fill: int) -> Tensor:
    """`pieces` one behind the other, then `fill` up to `size`; int64 [size]."""
    flat = np.full(size, fill, dtype=np.int64)
    if pieces:
        joined = np.concatenate(pieces)
        if len(joined) > size:
            raise ValueError(f"{len(joined)} tokens in a buffer of {size}")
        flat[: len(joined)] = joined
    return torch.from_numpy(flat)


def _boundaries(lengths: Sequence[int], max_examples: int) -> Tensor:
    """Cumulative lengths from 0, the last repeated; int32 [max_examples + 1]."""
    edges = np.zeros(max_examples + 1, dtype=np.int32)
    edges[1 : len(lengths) + 1] = np.cumsum(lengths)
    edges[len(lengths) + 1 :] = edges[len(lengths)]
    return torch.from_numpy(edges)
