"""Recomputation, offload and compilation of layers; losses and gradients are bit-identical in every mode.

Layers are patched in place, on the instance's `forward`, so that the hooks of ZeRO-3 and FSDP2 around it keep working.
`selective` keeps the outputs of attention and of every second matrix product; it needs parameters that stay in place
while a layer runs, as under FSDP2. On GPUs all encoder layers share one graph of torch.compile, and all decoder layers
another: the documents' boundaries and the longest of them reach it as variable sizes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch._inductor.config
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ds_encdec.model.activation_offload import ActivationOffload, Forward
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.encoder import Qwen3Layer
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

Mode = Literal["none", "full", "every_n", "selective"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around the forward pass of a layer, and around its recomputation."""

_ATTENTION_NAMES = ("attention", "attn")
"""Parts of the names of attention kernels: aten's, torch's varlen_attn, flash-attn's."""

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_FUSED: dict[str, Any] = {
    "force_pointwise_cat": True,
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 400,
    "realize_acc_reads_threshold": 64,
}
"""Inductor recomputes cheap operations (halves of rotated heads, merged rows) at each use, instead of writing their
results to memory: less traffic (tests/bench/test_bench_scripts.py)."""
GRAPHS = 32
"""The most graphs of layers that torch makes: 4 for each pair of buffer sizes, for two kinds of layers, in training and
in evaluation."""


def apply_activation_checkpointing(
    model: Qwen3ForSeq2SeqLM,
    mode: Mode,
    *,
    every_n: int = 2,
    offload: bool = False,
    compile_layers: bool = False,
    random: bool = False,
) -> None:
    """Make layers recompute their activations, keep them in host memory (`offload`), or both; once, before an engine
    wraps the model. With `full` every layer recomputes, with `every_n` layers 0, n, 2n, … of either stack, with
    `selective` the cheaper half of every layer's operations. `random`: layers drop out."""
    interval = {"none": 0, "full": 1, "every_n": every_n, "selective": 1}[mode]
    contexts = _selective_contexts if mode == "selective" else None
    offloading = ActivationOffload()
    for stack in (model.encoder.layers, model.decoder.layers):
        for index, layer in enumerate(stack):
            assert isinstance(layer, Qwen3Layer)
            forward: Forward = layer.forward
            if interval and index % interval == 0:
                forward = _recomputing(forward, contexts, random)
            if compile_layers:
                forward = compiled(forward, random=random)
            if offload:
                forward = offloading.around(forward, layer)
            layer.forward = forward  # type: ignore[method-assign]


def _recomputing(forward: Forward, contexts: Callable[[], Contexts] | None, random: bool) -> Forward:
    """Return `forward` saving `hidden_states` alone; its other inputs (encoder output, rotary tables) exist anyway."""
    chosen: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def recomputing_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        def run(hidden_states: Tensor) -> Tensor:
            return forward(hidden_states, *shared, **options)

        return checkpoint(run, hidden_states, use_reentrant=False, preserve_rng_state=random, **chosen)

    return recomputing_forward


def _selective_contexts() -> Contexts:
    """Return contexts for one run of a layer, which count products from its start, in both passes alike."""
    products = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operation in _PRODUCTS
        products[context.is_recompute] += is_product
        is_odd = products[context.is_recompute] % 2 == 1
        kept = is_odd if is_product else any(part in str(operation) for part in _ATTENTION_NAMES)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(forward: Forward, *, random: bool) -> Forward:
    """Return a layer's `forward` compiled. `random`: it draws numbers, as torch's own operators would."""
    known = {name: value for name, value in _FUSED.items() if hasattr(torch._inductor.config, name)}
    run = torch.compile(forward, options={**known, "fallback_random": random})

    def compiled_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        if isinstance(layout := options["layout"], PackedLayout):
            _mark_varying(layout)
        # A view into a larger buffer, which the first layer of a stack gets, would need a separate graph.
        whole = hidden_states.clone() if hidden_states.storage_offset() else hidden_states
        return run(whole, *shared, **options)

    return compiled_forward


def _mark_varying(layout: PackedLayout) -> None:
    if not hasattr(layout.merged.longest_key, "_dynamo_dynamic_indices"):  # once for all layers
        for segments in (layout.encoder, layout.merged):
            for tensor in segments.varying():
                torch._dynamo.mark_dynamic(tensor, 0)
