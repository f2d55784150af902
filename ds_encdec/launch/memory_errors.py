"""Which errors mean that memory has run out: torch has a class of its own for one of them only."""

from __future__ import annotations

import errno

import torch

from ds_encdec.types import OutOfMemoryError

_HOST_MESSAGES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "std::bad_alloc")
"""Of torch's allocator on the host (c10/core/impl/alloc_cpu.cpp, on Linux and on Windows), and of C++."""
_DEVICE_MESSAGES = (
    "CUDA out of memory",  # torch's allocator
    "CUDA error: out of memory",  # the driver, asked past it
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or the host has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    message = str(error)
    return isinstance(error, RuntimeError) and any(text in message for text in (*_HOST_MESSAGES, *_DEVICE_MESSAGES))


def is_of_device(error: BaseException) -> bool:
    """Whether what ran out, by `is_out_of_memory`, is a GPU's memory and not the host's."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _DEVICE_MESSAGES)


def out_of_memory(error: BaseException, rank: int) -> OutOfMemoryError:
    """The error as one of ours, with the first line of what it says; `rank` is the one that met it."""
    if isinstance(error, OutOfMemoryError):
        return error
    asked, *_ = str(error).strip().splitlines() or [type(error).__name__]  # Python's MemoryError says nothing
    return OutOfMemoryError(f"rank {rank} ran out of memory: {asked.rstrip('.')}.")
