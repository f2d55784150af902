"""Which errors are out of memory: real ones where they can be had."""

import mmap
from collections.abc import Callable

import pytest
import torch
from torch.distributed import DistBackendError

from ds_encdec.base.types import DsEncDecError, OutOfMemoryError
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.launch.memory_errors import is_of_device, is_out_of_memory
from ds_encdec.launch.peers import named_error

GIB = 2**30


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: torch.empty(2**50), id="torch"),
        pytest.param(lambda: bytearray(2**60), id="python"),
        pytest.param(lambda: mmap.mmap(-1, 2**56), id="the kernel"),
    ],
)
def test_a_host_without_memory(action: Callable[[], object]) -> None:
    error = attempt(action)[1]
    assert type(error) is OutOfMemoryError
    assert is_out_of_memory(error)
    assert not is_of_device(error, 0)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        action()
    assert str(named_error(raised.value, 3)).startswith("rank 3 ran out of memory: ")


# A device that has room was not what the driver meant: it says the same of page-locked memory.
@pytest.mark.parametrize(
    ("error", "free_bytes", "elsewhere"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), 64 * GIB, None),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 64 * GIB, None),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError"), GIB / 4, 10 * GIB),
        (
            DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: "
                "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            *(GIB / 4, 10 * GIB),
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_device_without_memory(error: BaseException, free_bytes: float, elsewhere: float | None) -> None:
    named = named_error(error, 0)
    assert is_out_of_memory(error)
    assert elsewhere is None or not is_of_device(error, elsewhere)
    assert is_of_device(named, free_bytes)
    assert (named.exit_code, "\n" in str(named)) == (6, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_that_the_host_does_not_have() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46, dtype=torch.uint8, pin_memory=True)
    assert is_out_of_memory(raised.value)
    assert not is_of_device(raised.value, torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize("error", [RuntimeError("NCCL timeout"), ValueError("not enough memory"), OSError(28, "")])
def test_other_errors_are_others(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert named_error(error, 0).exit_code == 1
    assert type(attempt(lambda: [][0])[1]) is DsEncDecError
