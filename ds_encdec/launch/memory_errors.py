"""Recognises errors that mean exhausted memory; torch has a class for only one of them."""

import errno

import torch

from ds_encdec.base.types import OutOfMemoryError

_HOST_MESSAGES = (
    "DefaultCPUAllocator",  # torch's allocator (c10/core/impl/alloc_cpu.cpp)
    "can't allocate memory",
    "not enough memory",  # the same on Windows
    "std::bad_alloc",  # C++
    "Cannot allocate memory",  # the kernel: strerror(ENOMEM), for instance of torch's mmap
)
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
# The driver's error 2, which also means that the host has no memory left to page-lock (cudaHostAlloc).
_DRIVER_MESSAGES = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL, which allocates past torch
    "Cuda failure 'out of memory'",  # older ones
    "HIP failure: 'out of memory'",  # RCCL
)
# Bytes. A device with more than this free has not refused the driver (contexts, kernels, NCCL's buffers): the host has.
_DRIVER_SHORTAGE = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device or the host has no memory left."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and says_out_of_memory(str(error)))
    )


def says_out_of_memory(text: str) -> bool:
    """Return whether `text`, an error's message or the last output of a process, is about exhausted memory."""
    return any(message in text for message in (*_HOST_MESSAGES, *_DEVICE_MESSAGES, *_DRIVER_MESSAGES))


def is_of_device(error: BaseException, free_device_bytes: float) -> bool:
    """Return whether an `is_out_of_memory` error is about a GPU's memory and not the host's. `free_device_bytes`: free
    on the GPU now, by its driver; it decides if the message does not."""
    return (
        isinstance(error, torch.OutOfMemoryError)
        or any(words in str(error) for words in _DEVICE_MESSAGES)
        or (is_of_driver(error) and free_device_bytes < _DRIVER_SHORTAGE)
    )


def is_of_driver(error: BaseException) -> bool:
    """Return whether a GPU's driver had no memory left: on the device, or page-locked memory of the host."""
    return any(message in str(error) for message in _DRIVER_MESSAGES)


def out_of_memory(error: BaseException, rank: int) -> OutOfMemoryError:
    """Return the error as an OutOfMemoryError in one line; `rank` is the one that met it."""
    if isinstance(error, OutOfMemoryError):
        return error
    return OutOfMemoryError(f"rank {rank} ran out of memory: {in_one_line(error).rstrip('.')}.")


def in_one_line(error: BaseException) -> str:
    """Return the first line of an out-of-memory error, and the line that names the memory (NCCL's is the last)."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]  # Python's MemoryError has no message
    telling = [] if says_out_of_memory(first) else [line.strip() for line in others if says_out_of_memory(line)]
    return ": ".join([first.rstrip(".:"), *telling[:1]]) if telling else first
