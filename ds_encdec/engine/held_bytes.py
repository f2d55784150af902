"""How much memory an engine's own tensors take, read from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

HOST_STATES = "host_states"
"""The category of what is held for a device but is not on it."""


def held_bytes(device: torch.device, tensors: Mapping[str, Iterable[Any]]) -> dict[str, int]:
    """Bytes by category of `tensors` on `device`, and as `HOST_STATES` of all those elsewhere.

    Each category: tensors, or containers of them at any depth; what is neither is passed over. Storages are counted,
    not views, each once: in the first category that it is found in.
    """
    held = dict.fromkeys((*tensors, HOST_STATES), 0)
    counted: set[tuple[torch.device, int]] = set()
    for category, items in tensors.items():
        for tensor in _local_tensors(items):
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if storage.nbytes() and key not in counted:
                counted.add(key)
                held[category if tensor.device.type == device.type else HOST_STATES] += storage.nbytes()
    return held


def _local_tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, DTensor):
        yield item.to_local()
    elif isinstance(item, Tensor):
        yield item.detach()
    elif isinstance(item, Mapping):
        yield from _local_tensors(item.values())
    elif isinstance(item, Iterable) and not isinstance(item, str):
        for inner in item:
            yield from _local_tensors(inner)
