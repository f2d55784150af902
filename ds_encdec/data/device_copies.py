"""Micro-batches copied to a GPU while it works on the ones before them."""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from ds_encdec.types import Batch


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`, each copied on a side stream as soon as the one before it has been handed out.

    The copies of page-locked memory then run beside the device's work instead of behind it, and the host waits for
    none. At most two batches are on the device. Without a GPU the batches are handed on as they are.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = _side_stream(device)
    ahead: list[tuple[Batch, torch.cuda.Event]] = []
    for batch in batches:
        # Not behind the work that is queued: the memory of these copies is the side stream's own.
        with torch.cuda.stream(side):
            ahead.append((batch.to(device), side.record_event()))
        if len(ahead) == 2:
            yield _taken(*ahead.pop(0), device)
    if ahead:
        yield _taken(*ahead.pop(), device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all steps: memory that a stream has used serves no other."""
    return torch.cuda.Stream(device)


def _taken(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """The batch for the current stream, which waits for the copies; their memory is kept until it has done with it."""
    using = torch.cuda.current_stream(device)
    using.wait_event(copied)
    for name in Batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            value.record_stream(using)
    return batch
