"""Weights of the encoder-decoder: random, from the folder of a decoder-only Qwen3, or from one of our own.

Random ones have a generator for each parameter, keyed by (seed, name): the same values whatever the number of ranks,
the order of construction, or the device the model trains on.

From a Qwen3, encoder and decoder layers both copy its layers, its final norm goes to both, and its embedding is shared.
Rows of the embedding that the vocabulary needs and the source never trained (sentinels, mode tokens, rows beyond its
size) are drawn from the normal distribution that the trained rows have, dimension by dimension.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.safetensors_folder import SafetensorsFolder
from ds_encdec.types import WeightSource

VOCABULARY_PARAMETERS = ("shared.weight", "lm_head.weight")
"""Parameters with one row for each token id."""

_STATISTICS_ROWS = 2048
"""Rows of the embedding read and converted to float64 at one time."""


def keyed_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the purpose `name` of the run seeded with `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def random_weights(config: Qwen3Seq2SeqConfig, seed: int) -> WeightSource:
    """Qwen3's initialisation: norms 1, matrices N(0, `initializer_range`); float32."""
    shapes = parameter_shapes(config)

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)[rows]
        # A generator cannot start in the middle: the whole is drawn, and only its rows are kept.
        drawn = torch.empty(shape).normal_(0.0, config.initializer_range, generator=keyed_generator(seed, name))
        return drawn if rows == slice(None) else drawn[rows].clone()

    return weights


def stored_weights(
    folder: Path,
    config: Qwen3Seq2SeqConfig,
    added_ids: Collection[int],
    *,
    stored_rows: int,
    seed: int,
    of_qwen3: bool = False,
) -> WeightSource:
    """The parameters of `config`'s model from `folder`, in the dtype stored there, `with_added_rows`.

    The folder is one of our own (an export, or `ds-encdec init-model`'s), or `of_qwen3`, a decoder-only one.
    `stored_rows`: rows of its embedding. Names and shapes of all tensors are checked now (CheckpointError), each tensor
    is read when it is asked for.
    """
    source, name_of = SafetensorsFolder(folder), _qwen3_name if of_qwen3 else str
    shapes = {
        name: (stored_rows, *shape[1:]) if name in VOCABULARY_PARAMETERS else shape
        for name, shape in parameter_shapes(config).items()
    }
    source.check({name_of(name): shape for name, shape in shapes.items()})

    def stored(name: str, rows: slice = slice(None), /) -> Tensor:
        return source.tensor(name_of(name), rows)

    return with_added_rows(stored, config, added_ids, stored_rows=stored_rows, seed=seed)


def with_added_rows(
    weights: WeightSource, config: Qwen3Seq2SeqConfig, added_ids: Collection[int], *, stored_rows: int, seed: int
) -> WeightSource:
    """`weights`, with the embedding's (and an untied head's) rows `added_ids` drawn anew, and grown to `vocab_size`.

    `stored_rows`: those that `weights` has. Rows below all new ones are the trained ones, whose mean and standard
    deviation the new rows are drawn with; they are read in pieces.
    """
    total_rows = max(stored_rows, config.vocab_size)
    new_rows = torch.tensor(
        sorted({row for row in added_ids if row < stored_rows}.union(range(stored_rows, total_rows))), dtype=torch.int64
    )

    def extended_weights(name: str, rows: slice = slice(None), /) -> Tensor:
        if name not in VOCABULARY_PARAMETERS or not len(new_rows):
            return weights(name, rows)
        start, stop, _ = rows.indices(total_rows)
        stored = weights(name, slice(min(start, stored_rows), min(stop, stored_rows)))
        width, dtype = stored.shape[1], stored.dtype
        extended = torch.empty(stop - start, width, dtype=dtype)
        extended[: len(stored)] = stored
        del stored  # the statistics read the rows again: one embedding less at the peak
        wanted = (new_rows >= start) & (new_rows < stop)
        if wanted.any():
            mean, std = _row_statistics(weights, name, int(new_rows[0]), width)
            drawn = torch.randn(len(new_rows), width, generator=keyed_generator(seed, f"{name}: added rows"))
            extended[new_rows[wanted] - start] = (mean + std * drawn[wanted]).to(dtype)
        return extended

    return extended_weights


def _qwen3_name(name: str) -> str:
    """The source's name of one of our parameters."""
    if name == "shared.weight":
        return "model.embed_tokens.weight"
    return re.sub(r"^(encoder|decoder)\.", "model.", name)


def _row_statistics(weights: WeightSource, name: str, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over the first `count` rows, float32 [width] each, summed in float64 by pieces."""
    total = torch.zeros(width, dtype=torch.float64)
    total_of_squares = torch.zeros_like(total)
    for start in range(0, count, _STATISTICS_ROWS):
        values = weights(name, slice(start, min(start + _STATISTICS_ROWS, count))).double()
        total += values.sum(0)
        total_of_squares += values.square().sum(0)
    mean = total / count
    variance = (total_of_squares / count - mean.square()).clamp_min(0.0)
    return mean.float(), variance.sqrt().float()
