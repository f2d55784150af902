"""Counting what a host would wait for on a GPU, without one: reads and copies that wait, streams, events."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READING = ("_local_scalar_dense", "nonzero")
"""Operations whose result, or its size, the host needs at once."""
_COPYING = ("cpu", "tolist", "numpy", "tensor", "as_tensor", "new_tensor")
"""Functions that copy from a device to the host, or numbers of the host to a device, and return when that is done."""


class _Reads(TorchDispatchMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._counted[name] += name in _READING
        return func(*args, **kwargs or {})


class _Copies(TorchFunctionMode):
    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self._counted[name] += name in _COPYING
        return func(*args, **kwargs or {})


def _accelerator() -> Any:
    """DeepSpeed's, which must not be imported for FSDP2."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


@contextmanager
def device_waits() -> Iterator[Counter[str]]:
    """Inside, what the host would wait for is counted by name."""
    counted: Counter[str] = Counter()

    def synchronize(*_: Any) -> None:
        counted["synchronize"] += 1

    used = "deepspeed" in sys.modules
    watched = patch.object(_accelerator(), "synchronize", synchronize) if used else nullcontext()
    with _Copies(counted), _Reads(counted), watched:
        yield counted
    for name in [name for name, count in counted.items() if not count]:
        del counted[name]


class StandInStream:
    """A stream of no device: it runs nothing, and notes what waits for what."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")

    def wait_stream(self, other: StandInStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self.name} waits for an event")


class StandInEvent:
    """An event that has always happened."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._log.append("host waits for an event")


@contextmanager
def streams() -> Iterator[list[str]]:
    """Inside, DeepSpeed's accelerator has streams, as on a GPU; gives the list of what waits for what."""
    log: list[str] = []
    default = StandInStream(log, "default")
    replaced: dict[str, Any] = {
        "is_synchronized_device": lambda: False,
        "resolves_data_dependency": lambda: False,
        "current_stream": lambda *_: default,
        "default_stream": lambda *_: default,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda *_: log.append("host waits for the device"),
    }
    accelerator = _accelerator()
    with (
        patch.multiple(accelerator, **replaced),
        patch.object(type(accelerator), "Stream", lambda *_, **__: StandInStream(log, "side")),
        patch.object(type(accelerator), "Event", lambda *_, **__: StandInEvent(log)),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield log
