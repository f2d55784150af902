"""Weights of the encoder-decoder taken from a folder: a decoder-only Qwen3, or one of our own.

Encoder and decoder layers both copy the source's layers, its final norm goes to both, and its embedding is shared.
Rows of the embedding that the vocabulary needs and the source never trained (sentinels, mode tokens, rows beyond its
size) are drawn from the normal distribution that the trained rows have, dimension by dimension.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.initialization import keyed_generator
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.safetensors_folder import SafetensorsFolder
from ds_encdec.types import WeightSource

VOCABULARY_PARAMETERS = ("shared.weight", "lm_head.weight")
"""Parameters with one row for each token id."""

_STATISTICS_ROWS = 2048
"""Rows of the embedding converted to float64 at one time."""


def qwen3_weights(folder: Path, config: Qwen3Seq2SeqConfig, *, stored_rows: int, seed: int) -> WeightSource:
    """The parameters of `config`'s model from the decoder-only Qwen3 in `folder`, in the dtype stored there.

    `stored_rows`: rows of the folder's embedding. Names and shapes of all tensors are checked now (CheckpointError),
    each tensor is read when it is asked for.
    """
    source = SafetensorsFolder(folder)
    source.check({_qwen3_name(name): shape for name, shape in _stored_shapes(config, stored_rows).items()})
    added_ids = {*config.sentinel_token_ids, *config.mode_token_ids}
    return with_added_rows(lambda name: source.tensor(_qwen3_name(name)), config, added_ids, seed)


def seq2seq_weights(folder: Path, config: Qwen3Seq2SeqConfig, *, stored_rows: int) -> WeightSource:
    """The parameters in a folder of our own (an export, or `ds-encdec init-model`'s), in the dtype stored there.

    As `qwen3_weights`, but rows that the folder lacks are not added.
    """
    source = SafetensorsFolder(folder)
    source.check(_stored_shapes(config, stored_rows))
    return source.tensor


def with_added_rows(
    weights: WeightSource, config: Qwen3Seq2SeqConfig, added_ids: Collection[int], seed: int
) -> WeightSource:
    """`weights`, with the embedding's (and an untied head's) rows `added_ids` drawn anew, and grown to `vocab_size`.

    Rows below all of these are the trained ones, whose mean and standard deviation the new rows are drawn with.
    """

    def extended_weights(name: str) -> Tensor:
        tensor = weights(name)
        if name not in VOCABULARY_PARAMETERS:
            return tensor
        rows, width = tensor.shape
        new_rows = sorted({row for row in added_ids if row < rows}.union(range(rows, config.vocab_size)))
        if not new_rows:
            return tensor
        mean, std = _row_statistics(tensor[: new_rows[0]])
        drawn = torch.randn(len(new_rows), width, generator=keyed_generator(seed, f"{name}: added rows"))
        extended = torch.empty(max(rows, config.vocab_size), width, dtype=tensor.dtype)
        extended[:rows] = tensor
        extended[new_rows] = (mean + std * drawn).to(tensor.dtype)
        return extended

    return extended_weights


def _stored_shapes(config: Qwen3Seq2SeqConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes before the vocabulary's matrices grow from `rows`."""
    shapes = parameter_shapes(config)
    return {name: (rows, *shape[1:]) if name in VOCABULARY_PARAMETERS else shape for name, shape in shapes.items()}


def _qwen3_name(name: str) -> str:
    """The source's name of one of our parameters."""
    if name == "shared.weight":
        return "model.embed_tokens.weight"
    return re.sub(r"^(encoder|decoder)\.", "model.", name)


def _row_statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows of [n, hidden], float32 [hidden] each, summed in float64 by pieces."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    total_of_squares = torch.zeros_like(total)
    for piece in rows.split(_STATISTICS_ROWS):
        values = piece.double()
        total += values.sum(0)
        total_of_squares += values.square().sum(0)
    mean = total / len(rows)
    variance = (total_of_squares / len(rows) - mean.square()).clamp_min(0.0)
    return mean.float(), variance.sqrt().float()
