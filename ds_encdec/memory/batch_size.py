"""The largest batch that a plain torch model can be trained with on its device, found by trying."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_encdec.launch.memory_errors import in_one_line, is_out_of_memory
from ds_encdec.memory.device_stats import clear_memory
from ds_encdec.types import OutOfMemoryError

logger = logging.getLogger(__name__)


def auto_find_batch_size(
    model: nn.Module, sample_batch_fn: Callable[[int], Any], start_batch_size: int = 32, min_batch_size: int = 1
) -> int:
    """The first of `start_batch_size`, its half, its quarter, …, `min_batch_size` that runs forward and backward.

    `sample_batch_fn(size)` makes a batch on the model's device: a mapping (keyword arguments of the model), a sequence
    (positional ones), or one argument. The loss is the output's `.loss`, or the output itself where that is a tensor
    (summed). Optimizer states are not made: leave room for them. For a run of ds_encdec use
    `training.per_device_train_batch_size: auto` instead.

    Parameters stay as they are, and gradients are gone afterwards; buffers that the model changes (batch normalisation)
    and the random state have moved on. Raises OutOfMemoryError where even `min_batch_size` does not fit, ValueError
    for sizes that are not 1 <= min_batch_size <= start_batch_size, and what the model raises for another reason.
    """
    if not 1 <= min_batch_size <= start_batch_size:
        raise ValueError(
            f"start_batch_size={start_batch_size} and min_batch_size={min_batch_size}: sizes must be "
            "1 <= min_batch_size <= start_batch_size"
        )
    size = start_batch_size
    while (reason := _try(model, sample_batch_fn, size)) is not None:
        if size == min_batch_size:
            raise OutOfMemoryError(f"not even a batch of {size} fits: {reason}")
        logger.info("a batch of %d does not fit (%s)", size, reason)
        size = max(min_batch_size, size // 2)
    return size


def _try(model: nn.Module, sample_batch_fn: Callable[[int], Any], size: int) -> str | None:
    """None where a batch of `size` fits; else the first line of what ran out."""
    reason = None
    try:
        _loss(model, sample_batch_fn(size)).backward()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = in_one_line(error)
    finally:
        model.zero_grad(set_to_none=True)
    # Not inside `except`: there the error still holds the frames, and they the activations.
    clear_memory()
    return reason


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, Sequence) else model(batch)
    return (output if isinstance(output, Tensor) else output.loss).sum()
