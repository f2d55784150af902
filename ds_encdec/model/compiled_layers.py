"""Layers through torch.compile: on GPUs one graph for all encoder layers and one for all decoder layers.

Attention is one node of a graph (attention_kernels.py). Only documents differ from batch to batch: their boundaries and
the longest of them reach a graph as sizes that it takes for variables from the start.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from ds_encdec.model.attention import PackedLayout

Forward = Callable[..., Tensor]

_FUSED: dict[str, Any] = {
    "force_pointwise_cat": True,
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 400,
    "realize_acc_reads_threshold": 64,
}
"""Inductor computes cheap operations (halves of rotated heads, merged rows) again where they are used, instead of
writing their results to memory: less traffic (tests/bench/test_bench_scripts.py)."""
GRAPHS = 32
"""The most graphs of layers that torch makes: 4 for each pair of buffer sizes, for two kinds of layers, in training and
in evaluation."""


def compiled(forward: Forward, *, random: bool) -> Forward:
    """Return a layer's `forward` compiled. `random`: it draws numbers, which must be those of torch's own operators."""
    known = {name: value for name, value in _FUSED.items() if hasattr(torch._inductor.config, name)}
    run = torch.compile(forward, options={**known, "fallback_random": random})

    def compiled_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        if isinstance(layout := options["layout"], PackedLayout):
            _mark_varying(layout)
        # A part of a larger buffer, as the first layer of a stack gets, would be compiled for by itself.
        whole = hidden_states.clone() if hidden_states.storage_offset() else hidden_states
        return run(whole, *shared, **options)

    return compiled_forward


def _mark_varying(layout: PackedLayout) -> None:
    """Have compiled code take the number of segments and their largest lengths for variables."""
    if not hasattr(layout.merged.longest_key, "_dynamo_dynamic_indices"):  # once for all layers
        for segments in (layout.encoder, layout.merged):
            for tensor in segments.varying():
                torch._dynamo.mark_dynamic(tensor, 0)
