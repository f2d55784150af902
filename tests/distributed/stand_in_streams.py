"""A GPU's streams for DeepSpeed on a CPU: they run nothing of their own, and note who waits for whom and for what.

Memory is watched as a GPU's allocator sees it. A block belongs to the stream that asked for it. Once it is dropped,
that stream may get it back for its next tensor, whatever other streams still do with it, unless `record_stream` has
named them or the owner has waited for them by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_cases import accumulate, own_batches, short_engine, short_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Seen = dict["StandInStream", int]
"""The number of works, by stream, that are over for whoever comes next."""


class StandInStream:
    """`works`: how many it was given. `seen`: whose works its next one follows."""

    def __init__(self, device: StandInDevice, name: str) -> None:
        self._device, self.name = device, name
        self.works = 0
        self.seen: Seen = {}
        device.streams.append(self)

    def mark(self) -> Seen:
        return {**self.seen, self: self.works}

    def follow(self, mark: Seen) -> None:
        for stream, works in mark.items():
            self.seen[stream] = max(works, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        self._device.host_waits(self.name, self.mark())

    def wait_stream(self, other: StandInStream) -> None:
        self._device.waits.append(f"{self.name} waits for {other.name}")
        self.follow(other.mark())

    def wait_event(self, event: StandInEvent) -> None:
        self._device.waits.append(f"{self.name} waits for an event")
        self.follow(event.mark)


class StandInEvent:
    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self.mark: Seen = {}

    def record(self, stream: StandInStream | None = None) -> None:
        self.mark = (stream or self._device.current).mark()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.host_waits("an event", self.mark)


class _Block:
    """One storage: who asked for it, the last work of each stream on it, and the streams that it was recorded for."""

    def __init__(self, owner: StandInStream, size: int) -> None:
        self.owner, self.size = owner, size
        self.last: Seen = {}
        self.recorded: set[StandInStream] = set()

    def in_use(self) -> list[str]:
        """The streams that may still be at work on it when its owner gets it back."""
        return [
            stream.name
            for stream, work in self.last.items()
            if stream is not self.owner and stream not in self.recorded and self.owner.seen.get(stream, 0) < work
        ]


class StandInDevice(TorchDispatchMode):
    """`waits`: what waits for what. `overwritten`: blocks that were reused under a stream at work on them, in words."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.overwritten: list[str] = []
        self.streams: list[StandInStream] = []
        self.default = self.current = StandInStream(self, "default")
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        for tensor in given:
            self._block(tensor)
        result = func(*args, **kwargs or {})
        self.current.works += 1
        for tensor in [*given, *tree_leaves(result)]:
            if (block := self._block(tensor)) is not None:
                block.last[self.current] = self.current.works
        return result

    def record(self, tensor: torch.Tensor, stream: StandInStream) -> None:
        """What `Tensor.record_stream` promises: the block is not reused before `stream` is through with it."""
        block = self._block(tensor)
        assert block is not None
        block.recorded.add(stream)

    def host_waits(self, what: str, mark: Seen) -> None:
        self.waits.append(f"host waits for {what}")
        for stream in self.streams:
            stream.follow(mark)

    def host_waits_for_all(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    @contextmanager
    def on(self, stream: StandInStream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def _block(self, tensor: Any) -> _Block | None:
        """The block of a tensor, which the current stream has asked for if it is new. None for what is no tensor."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._reuse()
            self._blocks[key] = _Block(self.current, storage.nbytes())
            weakref.finalize(storage, self._drop, key).atexit = False
        return self._blocks[key]

    def _drop(self, key: int) -> None:
        self._free.append(self._blocks.pop(key))

    def _reuse(self) -> None:
        """The current stream asks for memory: it may get what it had before."""
        ours = [block for block in self._free if block.owner is self.current]
        self._free = [block for block in self._free if block.owner is not self.current]
        self.overwritten += [f"{block.size} bytes, in use by {name}" for block in ours for name in block.in_use()]


@contextmanager
def streams() -> Iterator[StandInDevice]:
    from deepspeed.accelerator import get_accelerator

    device, accelerator = StandInDevice(), get_accelerator()
    replaced: dict[str, Any] = {
        "is_synchronized_device": lambda: False,
        "resolves_data_dependency": lambda: False,
        "current_stream": lambda *_: device.current,
        "default_stream": lambda *_: device.default,
        "stream": device.on,
        "synchronize": lambda *_: device.host_waits_for_all(),
    }
    with (
        patch.multiple(accelerator, **replaced),
        patch.object(type(accelerator), "Stream", lambda *_, **__: StandInStream(device, "side")),
        patch.object(type(accelerator), "Event", lambda *_, **__: StandInEvent(device)),
        patch.object(torch.Tensor, "record_stream", lambda tensor, stream: device.record(tensor, stream)),
        device,
    ):
        yield device


def waits_of_streams(**overrides: Any) -> dict[str, Any]:
    """What waits for what, and what is overwritten, in the fourth step; and the losses of the three before."""
    with streams() as device:
        engine = short_engine(**overrides)
        losses = [short_step(engine, step)["loss"] for step in range(3)]
        device.waits.clear()
        device.overwritten.clear()
        accumulate(engine, own_batches())
        engine.step()
        found = {"losses": losses, "waits": [*device.waits], "overwritten": [*device.overwritten]}
        engine.close()
    return found
