"""Recomputation, offload and compilation of layers; losses and gradients are bit-identical in every mode.

Layers are patched in place, on the instance's `forward`, so that the hooks of ZeRO-3 and FSDP2 around it keep working.
`selective` keeps the outputs of attention and of every second matrix product; it needs parameters that stay in place
while a layer runs, as under FSDP2. On GPUs all encoder layers share one graph of torch.compile, and all decoder layers
another: the documents' boundaries and the longest of them reach it as variable sizes.

Offload copies all that autograd saves inside a layer to the host after the layer, and back before its backward pass. On
a GPU a second stream copies while other layers compute; at most two layers' activations are on the device. The
computing stream waits for a layer's copies before its tensors are freed, and the copying stream for all computation
before it takes memory again. With `record_stream` instead, the host, which runs ahead, would allocate memory twice."""

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Literal

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.attention_kernels import Segments
from ds_encdec.model.encoder import Qwen3Layer
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

Forward = Callable[..., Tensor]

# Parts of the names of attention kernels: aten's, torch's varlen_attn, flash-attn's.
_ATTENTION_NAMES = ("attention", "attn")

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Inductor recomputes cheap operations (halves of rotated heads, merged rows) at each use, instead of writing their
# results to memory: less traffic (tests/bench/test_bench_scripts.py).
_FUSED: dict[str, Any] = {
    "force_pointwise_cat": True,
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 400,
    "realize_acc_reads_threshold": 64,
}
# The most graphs of layers that torch makes: 4 for each pair of buffer sizes, for two kinds of layers, in training and
# in evaluation.
GRAPHS = 32


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
    offloading = ActivationOffload()
    for stack in (model.encoder.layers, model.decoder.layers):
        for index, layer in enumerate(stack):
            assert isinstance(layer, Qwen3Layer)
            forward: Forward = layer.forward
            if interval and index % interval == 0:
                forward = _recomputed(forward, recomputing)
            if compile_layers:
                forward = compiled(forward, random=random)
            if offload:
                forward = offloading.around(forward, layer)
            layer.forward = forward  # type: ignore[method-assign]


def _recomputed(forward: Forward, recomputing: Callable[..., Any]) -> Forward:
    """Return `forward` saving `hidden_states` alone; its other inputs (encoder output, rotary tables) exist anyway."""

    def recomputed_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        return recomputing(lambda states: forward(states, *shared, **options), hidden_states)

    return recomputed_forward


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for a layer's forward pass and its recomputation, which count products alike from their start."""
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
        layout = options["layout"]
        # Once for all layers.
        if isinstance(layout, PackedLayout) and not hasattr(layout.merged.longest_key, "_dynamo_dynamic_indices"):
            for tensor in (*layout.encoder.varying(), *layout.merged.varying()):
                torch._dynamo.mark_dynamic(tensor, 0)
        # A view into a larger buffer, which the first layer of a stack gets, would need a separate graph.
        whole = hidden_states.clone() if hidden_states.storage_offset() else hidden_states
        return run(whole, *shared, **options)

    return compiled_forward


class Streams:
    """Runs copies: on a second stream of a GPU; elsewhere copies are done when `run` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        # Layers whose tensors stay on the device after their forward pass, so that nothing waits for the copies.
        self.layers_on_their_way = 0 if self._side is None else 1

    def run(self, copy: Callable[[], None]) -> Any:
        """Copy after all computation so far; return the argument for `wait`."""
        if self._side is None:
            return copy()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            copy()
            return self._side.record_event()

    def wait(self, copied: Any) -> None:
        """Make all later computation wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


@dataclasses.dataclass(eq=False, slots=True)
class _Saved:
    """A tensor that autograd has saved `uses` times; `tensor` is None while it is on the host alone."""

    tensor: Tensor | None
    device: torch.device
    host: Tensor
    uses: int = 0


@dataclasses.dataclass(eq=False)
class _Record:
    """The tensors that one forward pass of one layer has saved, by place and form. It lives as long as its graph."""

    before: Callable[[], "_Record | None"]
    saved: dict[Any, _Saved] = dataclasses.field(default_factory=dict)
    left: Any = None  # `wait` for these: the copies to the host, and those back
    arrived: Any = None
    in_use: bool = False


class ActivationOffload:
    """Wraps layers of one model, whose backward passes come in the opposite order of their forward passes."""

    def __init__(self, streams: Callable[[torch.device], Streams] = Streams) -> None:
        self._new_streams = cache(streams)
        self._streams = streams(torch.device("cpu"))
        self._leaving: deque[_Record] = deque()
        self._last: Callable[[], _Record | None] = lambda: None

    def around(self, forward: Forward, layer: nn.Module) -> Forward:
        """Return `forward` of `layer`, with all that autograd saves inside it kept on the host, except parameters and
        tensors that layers share (the encoder's output, rotary tables, boundaries)."""

        def offloading_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
            self._streams = self._new_streams(hidden_states.device)
            self._let_go(self._streams.layers_on_their_way)
            record = _Record(before=self._last)
            staying = {tensor.untyped_storage().data_ptr() for tensor in _tensors((shared, options))}
            with saved_tensors_hooks(partial(_pack, record, staying, layer), self._unpack):
                output = forward(hidden_states, *shared, **options)
            if record.saved:
                record.left = self._streams.run(partial(_copy_out, list(record.saved.values())))
                self._last = weakref.ref(record)
                self._leaving.append(record)
                if not self._streams.layers_on_their_way:
                    self._let_go(0)
            return output

        return offloading_forward

    def _let_go(self, layers: int) -> None:
        """Drop the device's tensors of all but the last `layers` layers, once they are on the host."""
        while len(self._leaving) > layers:
            record = self._leaving.popleft()
            self._streams.wait(record.left)
            for one in record.saved.values():
                one.tensor = None

    def _unpack(self, packed: Tensor | tuple[_Record, _Saved]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        record, saved = packed
        if not record.in_use:
            record.in_use = True
            self._leaving.clear()  # the backward pass frees them from here on
            self._fetch(record)
            self._streams.wait(record.left if record.arrived is None else record.arrived)
            before = record.before()
            if before is not None:
                self._fetch(before)
        saved.uses -= 1
        # A second backward pass over the graph reads its tensors from the host.
        tensor = saved.host.to(saved.device, non_blocking=True) if saved.tensor is None else saved.tensor
        if saved.uses <= 0:
            saved.tensor = None
        return tensor

    def _fetch(self, record: _Record) -> None:
        missing = [one for one in record.saved.values() if one.tensor is None]
        if missing and record.arrived is None:
            record.arrived = self._streams.run(partial(_copy_back, missing))


def _copy_out(saved: list[_Saved]) -> None:
    for one in saved:
        assert one.tensor is not None
        one.host.copy_(one.tensor, non_blocking=True)


def _copy_back(missing: list[_Saved]) -> None:
    for one in missing:
        one.tensor = one.host.to(one.device, non_blocking=True)


def _pack(record: _Record, staying: set[int], layer: nn.Module, tensor: Tensor) -> Tensor | tuple[_Record, _Saved]:
    """Record `tensor` once, however often it is saved; return tensors that stay on the device as they are."""
    address = tensor.untyped_storage().data_ptr()
    # Parameters may have been gathered since the layer began.
    of_layer = (parameter.untyped_storage().data_ptr() for parameter in layer.parameters())
    if tensor.numel() == 0 or address in staying or address in of_layer:
        return tensor
    if (
        torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    ):  # gaps or repeated elements: a copy has none
        return tensor
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in record.saved:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        record.saved[key] = _Saved(tensor, tensor.device, host)
    record.saved[key].uses += 1
    return record, record.saved[key]


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
        return
    if isinstance(item, Segments) or dataclasses.is_dataclass(item):
        item = vars(item)
    parts = item.values() if isinstance(item, dict) else item
    for one in parts if isinstance(item, dict | tuple | list) else ():
        yield from _tensors(one)
