"""Counting what a host would wait for on a GPU, without one: reads and copies that wait."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

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


@contextmanager
def device_waits() -> Iterator[Counter[str]]:
    """Inside, what the host would wait for is counted by name."""
    counted: Counter[str] = Counter()

    def synchronize(*_: Any) -> None:
        counted["synchronize"] += 1

    used = "deepspeed" in sys.modules
    if used:
        from deepspeed.accelerator import get_accelerator  # which must not be imported for FSDP2
    watched = patch.object(get_accelerator(), "synchronize", synchronize) if used else nullcontext()
    with _Copies(counted), _Reads(counted), watched:
        yield counted
    for name in [name for name, count in counted.items() if not count]:
        del counted[name]
