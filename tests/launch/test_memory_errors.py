"""Which errors are out of memory: real ones where they can be had."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch.distributed import DistBackendError

from ds_encdec.base.types import DsEncDecError, OutOfMemoryError
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.launch.memory_errors import is_of_device, is_out_of_memory, says_out_of_memory
from ds_encdec.launch.peers import named_error

GIB = 2**30
ON_DEVICE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
BY_DRIVER = [
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in its documentation"),
    torch.AcceleratorError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
    DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
]


def raised_by(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        action()
    return raised.value


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: torch.empty(2**50), id="torch"),
        pytest.param(lambda: bytearray(2**60), id="python"),
        pytest.param(lambda: torch.zeros(1).expand(2**50).clone(), id="in an operator"),
        pytest.param(lambda: mmap.mmap(-1, 2**56), id="the kernel"),
    ],
)
def test_a_host_without_memory(action: Callable[[], object]) -> None:
    error = raised_by(action)
    assert is_out_of_memory(error)
    assert not is_of_device(error, 0)
    assert named_error(error, 3).exit_code == 6
    assert str(named_error(error, 3)).startswith("rank 3 ran out of memory: ")
    assert type(attempt(action)[1]) is OutOfMemoryError


@pytest.mark.parametrize(
    ("error", "free_bytes", "elsewhere"),
    [
        # A device that has room was not what the driver meant: it says the same of page-locked memory.
        *((error, GIB / 4, 10 * GIB) for error in BY_DRIVER),
        *((error, 64 * GIB, None) for error in ON_DEVICE),  # room, but less than what was asked for
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_device_without_memory(error: BaseException, free_bytes: float, elsewhere: float | None) -> None:
    named = named_error(error, 0)
    assert is_out_of_memory(error)
    assert is_of_device(error, free_bytes)
    assert elsewhere is None or not is_of_device(error, elsewhere)
    assert is_of_device(named, free_bytes)
    assert (named.exit_code, "\n" in str(named)) == (6, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_that_the_host_does_not_have() -> None:
    error = raised_by(lambda: torch.empty(2**46, dtype=torch.uint8, pin_memory=True))
    assert is_out_of_memory(error)
    assert not is_of_device(error, torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize("error", [RuntimeError("NCCL timeout"), ValueError("not enough memory"), OSError(28, "")])
def test_other_errors_are_others(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert named_error(error, 0).exit_code == 1
    assert type(attempt(lambda: [][0])[1]) is DsEncDecError


def test_the_last_words_of_a_process_are_understood() -> None:
    words = "RuntimeError: unable to mmap 17592186044416 bytes from file </weights>: Cannot allocate memory (12)"
    assert says_out_of_memory(f"Traceback (most recent call last):\n  …\n{words}")
    assert not says_out_of_memory("unable to allocate shared memory(shm): No space left on device (28)")
