"""Random weights, one parameter at a time.

Each parameter has a generator of its own, keyed by (seed, name): the same values whatever the number of ranks, the
order of construction, or the device the model trains on.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.types import WeightSource


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
