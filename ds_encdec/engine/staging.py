"""Host memory for the copies of saves, so that training goes on while they are written."""

import copy
import logging
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ds_encdec.engine.sharded_engine import local_part

logger = logging.getLogger(__name__)


class StagingArea:
    """Copies the state to save, and keeps the copies' memory for the next save. Shared storages stay shared."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._kept: list[torch.UntypedStorage] = []
        self._copies = False
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    @torch.no_grad()
    def take_all(self, item: Any, *, copy: bool) -> tuple[int, Any]:
        """Return the bytes of the tensors in `item`, and `item` with them copied to the host, over earlier copies, or
        referred to without `copy`. Once there is memory for copies, all calls use it: a save at once would otherwise
        take as much host memory again. Waits for the device once."""
        self._copies, self._storages = copy or bool(self._kept), {}
        taken = self._take(item)
        if self._copies and any(device.type == "cuda" for device, _ in self._storages):
            torch.cuda.current_stream().synchronize()
        num_bytes, self._storages = sum(storage.nbytes() for storage in self._storages.values()), {}
        return num_bytes, taken

    def _take(self, item: Any) -> Any:
        if isinstance(item, dict):
            taken = ((key, self._take(value)) for key, value in item.items())
            return OrderedDict(taken) if isinstance(item, OrderedDict) else dict(taken)
        if type(item) in (list, tuple):
            return type(item)(map(self._take, item))
        if not isinstance(item, torch.Tensor):
            return copy.deepcopy(item)
        tensor, is_sharded = item.detach(), isinstance(item, DTensor)
        local = local_part(tensor)
        source = local.untyped_storage()
        key = (local.device, source.data_ptr())
        if key not in self._storages:
            self._storages[key] = self._copy(source) if self._copies else source
        if is_sharded and not self._copies:
            return tensor
        storage = self._storages[key]
        copied = torch.empty_like(tensor, device="cpu") if is_sharded else tensor.new_empty(0, device=storage.device)
        local_part(copied).set_(storage, local.storage_offset(), local.size(), local.stride())
        return copied

    def _copy(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        index = len(self._storages)
        if index == len(self._kept) or self._kept[index].nbytes() != source.nbytes():
            self._kept[index : index + 1] = [self._allocate(source.nbytes()).untyped_storage()]
        return self._kept[index].copy_(source, non_blocking=True)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        except (RuntimeError, MemoryError) as error:
            if not self._pin_memory:
                raise
            self._pin_memory, reason = False, " ".join(str(error).split())[:200]
        logger.warning(
            "Saves are copied into pageable memory, which is slower: the host cannot lock more pages (%s). "
            "infra.pin_memory=false uses pageable memory from the start",
            reason,
        )
        return torch.empty(num_bytes, dtype=torch.uint8)
