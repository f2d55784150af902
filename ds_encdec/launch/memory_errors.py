"""Which errors mean that memory has run out: torch has a class of its own for one of them only."""

from __future__ import annotations

import errno

import torch

from ds_encdec.types import OutOfMemoryError

_HOST_MESSAGES = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "std::bad_alloc")
"""Of torch's allocator on the host (c10/core/impl/alloc_cpu.cpp, on Linux and on Windows), and of C++."""
_DEVICE_MESSAGES = (
    "CUDA out of memory",  # torch's allocator
    "HIP out of memory",
    "CUDA driver error: out of memory",  # the driver, mapping memory for torch's expandable segments
    "HIP driver error: out of memory",
    "Triton Error [CUDA]: out of memory",  # loading a compiled kernel
    "BLAS_STATUS_ALLOC_FAILED",  # of CUBLAS and HIPBLAS: workspaces
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)
_DRIVER_MESSAGES = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL, which allocates past torch
    "Cuda failure 'out of memory'",  # older ones
    "HIP failure: 'out of memory'",  # RCCL
)
"""The driver's error 2. It is the same where the host has no memory left that could be page-locked (cudaHostAlloc)."""
_MESSAGES = (*_HOST_MESSAGES, *_DEVICE_MESSAGES, *_DRIVER_MESSAGES)

_DRIVER_SHORTAGE = 2**30
"""Bytes. A device on which so many are free has not refused what the driver is asked for past torch: contexts, kernels,
NCCL's buffers. Then it was the host."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device or the host has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _says(str(error), _MESSAGES)


def is_of_device(error: BaseException, free_device_bytes: float) -> bool:
    """Whether what ran out, by `is_out_of_memory`, is a GPU's memory and not the host's.

    `free_device_bytes`: what is free on the GPU now, as the driver says: it decides where the message does not.
    """
    if isinstance(error, torch.OutOfMemoryError) or _says(str(error), _DEVICE_MESSAGES):
        return True
    return is_of_driver(error) and free_device_bytes < _DRIVER_SHORTAGE


def is_of_driver(error: BaseException) -> bool:
    """Whether it was a GPU's driver that had none: on the device, or page-locked memory of the host."""
    return _says(str(error), _DRIVER_MESSAGES)


def out_of_memory(error: BaseException, rank: int) -> OutOfMemoryError:
    """The error as one of ours, with the first line of what it says; `rank` is the one that met it.

    NCCL says what it was only in the last of its lines; then that is there, too.
    """
    if isinstance(error, OutOfMemoryError):
        return error
    first, *others = str(error).strip().splitlines() or [type(error).__name__]  # Python's MemoryError says nothing
    telling = [] if _says(first, _MESSAGES) else [line.strip() for line in others if _says(line, _MESSAGES)]
    said = ": ".join([first.rstrip(".:"), *telling[:1]])
    return OutOfMemoryError(f"rank {rank} ran out of memory: {said.rstrip('.')}.")


def _says(message: str, texts: tuple[str, ...]) -> bool:
    return any(text in message for text in texts)
