"""Recomputation, offload and compilation of layers; losses and gradients are bit-identical in every mode.

Layers are patched in place, on the instance's `forward`, so that the hooks of ZeRO-3 and FSDP2 around it keep working.
`selective` keeps the outputs of attention and of every second matrix product; it needs parameters that stay in place
while a layer runs, as under FSDP2. On GPUs all encoder layers share one graph of torch.compile, and all decoder layers
another: the documents' boundaries and the longest of them reach it as variable sizes.

Offload copies all that autograd saves inside a layer to the host, and back when its backward pass reads it. On a GPU
both copies run on the computing stream, in the order of the computation: memory that either side frees is used again
only behind them, and nothing waits on the host."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.attention_kernels import Segments
from ds_encdec.model.cross_attention import form_of
from ds_encdec.model.encoder import Qwen3Layer
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

Forward = Callable[..., Tensor]
Seen = dict[Any, tuple[Tensor, "_Saved"]]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Inductor recomputes cheap operations (halves of rotated heads, merged rows) at each use, instead of writing their
# results to memory: less traffic (tests/bench/test_bench_scripts.py).
_FUSED: dict[str, Any] = {
    "force_pointwise_cat": True,
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 400,
    "realize_acc_reads_threshold": 64,
}
# The most graphs of layers that torch makes: 4 for each pair of buffer sizes, for two kinds of layers, which may rotate
# or not, in training and in evaluation.
GRAPHS = 64


def apply_activation_checkpointing(
    model: Qwen3ForSeq2SeqLM,
    mode: Literal["none", "full", "every_n", "selective"],
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
    chosen: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    recomputing = partial(checkpoint, use_reentrant=False, preserve_rng_state=random, **chosen)
    lent: Seen | None = {} if form_of(model.config).is_aligned else None
    last = [*model.encoder.layers, *model.decoder.layers][-1]
    for stack in (model.encoder.layers, model.decoder.layers):
        for index, layer in enumerate(stack):
            assert isinstance(layer, Qwen3Layer)
            forward: Forward = layer.forward
            if interval and index % interval == 0:
                forward = _recomputed(forward, recomputing)
            if compile_layers:
                forward = compiled(forward, random=random)
            if offload:
                forward = offloaded(forward, layer, lent, lends=layer is not last)
            layer.forward = forward  # type: ignore[method-assign]


def _recomputed(forward: Forward, recomputing: Callable[..., Any]) -> Forward:
    """Return `forward` saving its states alone; its other inputs (rotary tables, boundaries) exist anyway."""

    def recomputed_forward(*states: Tensor, **options: Any) -> Tensor:
        return recomputing(lambda *again: forward(*again, **options), *states)

    return recomputed_forward


def _selective_contexts() -> tuple[Any, Any]:
    # One for a layer's forward pass and one for its recomputation, which count products alike from their start.
    products = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:  # attention kernels: aten's, torch's varlen_attn, flash-attn's
            kept = any(part in str(operation) for part in ("attention", "attn"))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(forward: Forward, *, random: bool) -> Forward:
    """Return a layer's `forward` compiled. `random`: it draws numbers, as torch's own operators would."""
    known = {name: value for name, value in _FUSED.items() if hasattr(torch._inductor.config, name)}
    run = torch.compile(forward, options={**known, "fallback_random": random})

    def compiled_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        layout = options["layout"]
        # Once for all layers.
        if isinstance(layout, PackedLayout) and not hasattr(layout.merged.longest_key, "_dynamo_dynamic_indices"):
            for tensor in (*layout.encoder.varying(), *layout.merged.varying()):
                torch._dynamo.mark_dynamic(tensor, 0)
        # A view into a larger buffer, which the first layer of a stack gets, would need a separate graph.
        return run(hidden_states.clone() if hidden_states.storage_offset() else hidden_states, *shared, **options)

    return compiled_forward


@dataclasses.dataclass(eq=False)
class _Saved:
    """A tensor on the host, which autograd has saved `uses` times, and its copy on the device until the last use."""

    host: Tensor
    device: torch.device
    uses: int = 0
    tensor: Tensor | None = None


def offloaded(forward: Forward, layer: nn.Module, lent: Seen | None, *, lends: bool) -> Forward:
    """Return `forward` of `layer`, with all that autograd saves inside it kept on the host, except parameters and
    tensors that layers share: rotary tables, boundaries, and the encoder's states, if these are one tensor (`lent` is
    None). Otherwise a decoder layer that `lends` leaves its copies of them to the next layer, which may read them."""

    def offloading_forward(hidden_states: Tensor, *encoder_states: Tensor, **options: Any) -> Tensor:
        shared = (options, encoder_states if lent is None else ())
        staying = {tensor.untyped_storage().data_ptr() for tensor in _tensors(shared)}
        seen = dict(lent or {})
        if lent:
            lent.clear()
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack, seen, staying, layer), _unpack):
            output = forward(hidden_states, *encoder_states, **options)
        if lent is not None and lends:
            read = {tensor.data_ptr() for tensor in encoder_states}
            lent.update((place, one) for place, one in seen.items() if place[0] in read)
        seen.clear()  # the graph keeps the hooks
        return output

    return offloading_forward


def _pack(seen: Seen, staying: set[int], layer: nn.Module, tensor: Tensor) -> Tensor | _Saved:
    """Copy `tensor` once, however often it is saved; return tensors that stay on the device as they are. `seen`: by
    place and form, which no other tensor takes while this one is there."""
    address = tensor.untyped_storage().data_ptr()
    if (
        tensor.numel() == 0
        or address in staying
        # Parameters may have been gathered since the layer began.
        or address in (parameter.untyped_storage().data_ptr() for parameter in layer.parameters())
        # Gaps or repeated elements are not copied.
        or torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    ):
        return tensor
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in seen:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        seen[key] = tensor, _Saved(host.copy_(tensor.detach(), non_blocking=True), tensor.device)
    saved = seen[key][1]
    saved.uses += 1
    return saved


def _unpack(packed: Tensor | _Saved) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor = packed.host.to(packed.device, non_blocking=True) if packed.tensor is None else packed.tensor
    packed.uses -= 1  # below 0 in a second backward pass over the graph
    packed.tensor = tensor if packed.uses > 0 else None
    return tensor


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Segments) or dataclasses.is_dataclass(item):
        yield from _tensors(vars(item))
    elif isinstance(item, dict | tuple | list):
        for one in item.values() if isinstance(item, dict) else item:
            yield from _tensors(one)
