"""Activations that wait for the backward pass in host memory.

All that autograd saves inside a layer is copied to the host after the layer, and back before its backward pass. On a
GPU a second stream copies while other layers compute; at most two layers' activations are on the device. The computing
stream waits for a layer's copies before its tensors are freed, and the copying stream for all computation before it
takes memory again. With `record_stream` instead, the host, which runs ahead, would allocate memory twice.
"""

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_encdec.model.attention_kernels import Segments

Forward = Callable[..., Tensor]


class Streams:
    """Runs copies: on a second stream of a GPU; elsewhere copies are done when `run` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device) if device.type == "cuda" else None
        self.layers_on_their_way = 0 if self._side is None else 1
        """Layers whose tensors stay on the device after their forward pass, so that nothing waits for the copies."""

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
                self._send(record)
            return output

        return offloading_forward

    def _send(self, record: _Record) -> None:
        saved = list(record.saved.values())

        def copy() -> None:
            for one in saved:
                assert one.tensor is not None
                one.host.copy_(one.tensor, non_blocking=True)

        record.left = self._streams.run(copy)
        self._last = weakref.ref(record)
        self._leaving.append(record)
        if not self._streams.layers_on_their_way:
            self._let_go(0)

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

            def copy() -> None:
                for one in missing:
                    one.tensor = one.host.to(one.device, non_blocking=True)

            record.arrived = self._streams.run(copy)


def _pack(record: _Record, staying: set[int], layer: nn.Module, tensor: Tensor) -> Tensor | tuple[_Record, _Saved]:
    """Record `tensor` once, however often it is saved; return tensors that stay on the device as they are."""
    address = tensor.untyped_storage().data_ptr()
    # Parameters may have been gathered since the layer began.
    of_layer = (parameter.untyped_storage().data_ptr() for parameter in layer.parameters())
    if tensor.numel() == 0 or address in staying or address in of_layer or not _keeps_strides(tensor):
        return tensor
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in record.saved:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        record.saved[key] = _Saved(tensor, tensor.device, host)
    record.saved[key].uses += 1
    return record, record.saved[key]


def _keeps_strides(tensor: Tensor) -> bool:
    """Return whether a copy has the strides of `tensor`, which gaps or repeated elements prevent."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, tuple | list):
        for one in item:
            yield from _tensors(one)
    elif isinstance(item, dict):
        yield from _tensors(tuple(item.values()))
    elif isinstance(item, Segments):
        yield from _tensors(vars(item))
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from _tensors(getattr(item, field.name))
