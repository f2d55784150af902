"""Copies the state to save to host memory, and judges it: no state that is not finite is saved."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ds_encdec.engine.protocol import Piece
from ds_encdec.engine.sharded_engine import local_part
from ds_encdec.model.weights import is_finite

logger = logging.getLogger(__name__)

Named = tuple[str, Sequence[Piece], Tensor]  # a kind of tensor (`weight`, a moment), its pieces, and the tensor
_Storages = dict[tuple[torch.device, int], torch.UntypedStorage]  # by their places in memory
_SEARCHED = 2**22  # elements of a tensor that are searched at one time for the first that is not finite


def first_non_finite(staged: Iterable[Named], loss_scaler: Mapping[str, float | int] | None = None) -> str | None:
    """Return the first element of a piece that is NaN or infinite, in words, or None. Each floating tensor is read
    once, where it is, and nothing beside it is allocated. Elements in no piece are padding, which may be anything."""
    for name, value in (loss_scaler or {}).items():
        if not math.isfinite(value):
            return f"{name} of the loss scaler is {value}"
    for kind, pieces, tensor in staged:
        for piece in pieces if tensor.is_floating_point() and not is_finite(tensor) else ():
            of_piece = tensor.reshape(-1)[piece.offset : piece.offset + piece.length]
            for part in of_piece.split(_SEARCHED):
                if len(bad := part[~part.isfinite()]):
                    return f"{kind} of {piece.name} is {float(bad[0])}"
    return None


class StagingArea:
    """Copies the state to save to host memory, which is kept for the next save, so that training goes on while the
    copies are written. Shared storages stay shared."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._kept: list[torch.UntypedStorage] = []

    @torch.no_grad()
    def take_all(self, item: Any, *, copy: bool) -> tuple[int, Any]:
        """Return the bytes of the tensors in `item`, and `item` with them copied to the host, over earlier copies, or
        referred to without `copy`. Once there is memory for copies, all calls use it: a save at once would otherwise
        take as much host memory again. Waits for the device once."""
        storages: _Storages = {}
        copies = copy or bool(self._kept)
        taken = self._take(item, storages, copies)
        if copies and any(device.type == "cuda" for device, _ in storages):
            torch.cuda.current_stream().synchronize()
        return sum(storage.nbytes() for storage in storages.values()), taken

    def _take(self, item: Any, storages: _Storages, copies: bool) -> Any:
        if isinstance(item, dict):
            taken = ((key, self._take(value, storages, copies)) for key, value in item.items())
            return OrderedDict(taken) if isinstance(item, OrderedDict) else dict(taken)
        if type(item) in (list, tuple):
            return type(item)(self._take(one, storages, copies) for one in item)
        if not isinstance(item, Tensor):
            return deepcopy(item)
        tensor, is_sharded = item.detach(), isinstance(item, DTensor)
        local = local_part(tensor)
        source = local.untyped_storage()
        key = (local.device, source.data_ptr())
        if key not in storages:
            storages[key] = self._copy(source, len(storages)) if copies else source
        if is_sharded and not copies:
            return tensor
        storage = storages[key]
        copied = torch.empty_like(tensor, device="cpu") if is_sharded else tensor.new_empty(0, device=storage.device)
        local_part(copied).set_(storage, local.storage_offset(), local.size(), local.stride())
        return copied

    def _copy(self, source: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
        if index == len(self._kept) or self._kept[index].nbytes() != source.nbytes():
            self._kept[index : index + 1] = [self._allocate(source.nbytes()).untyped_storage()]
        return self._kept[index].copy_(source, non_blocking=True)

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        except RuntimeError as error:
            if not self._pin_memory:
                raise
            self._pin_memory = False
            logger.warning(
                "Saves are copied into pageable memory, which is slower: the host cannot lock more pages (%s). "
                "infra.pin_memory=false uses pageable memory from the start",
                " ".join(str(error).split())[:200],
            )
            return self._allocate(num_bytes)
