"""How a rank and its machine are doing: measured on every rank once per logging interval, for `MachineWatch`.

In synchronous training every rank has the same step time, since the others wait for the slow one inside collectives
(under ZeRO-3 in the forward pass of every layer). What does tell them apart: how long each of them waits for the
others before a step, and how long each takes for a piece of arithmetic that involves nobody else.
"""

from __future__ import annotations

import timeit
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

import psutil
import torch
from torch import Tensor

from ds_encdec.monitor.performance import Lap

_WARMUP_PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class RankStats(Lap):
    """One rank in one logging interval; gathered from all ranks, so that all judge by the same.

    `exchange_wait_s`: in the exchange before each step the last rank to come waits least. `arithmetic_s`:
    `measure_arithmetic`. `memory`, in bytes: `host`, resident memory of the process now; `device`, allocated on its
    accelerator now, if it has one; `peak`, the largest device memory so far, without an accelerator the largest host
    memory; `reserved`, what the allocator has taken from the accelerator's driver; and once in a process the engine's
    tensors by category (engine/protocol.py).
    """

    arithmetic_s: float
    memory: Mapping[str, float]


def measure_rank_stats(device: torch.device, lap: Lap, held_bytes: Mapping[str, int]) -> RankStats:
    """This rank's statistics: the seconds and what is held as they are given, the rest measured now."""
    host = psutil.Process().memory_info().rss
    # The kernel brings its peak up to date a little later.
    memory = {"host": host, "peak": max(peak_host_bytes(), host)}
    if device.type == "cuda":
        memory |= {"peak": torch.cuda.max_memory_allocated(device), "device": torch.cuda.memory_allocated(device)}
        memory["reserved"] = torch.cuda.memory_reserved(device)
    return RankStats(**asdict(lap), arithmetic_s=measure_arithmetic(device), memory={**memory, **held_bytes})


def peak_host_bytes() -> int:
    """The most resident memory that this process has had."""
    import resource  # Unix only, and only here

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_arithmetic(device: torch.device) -> float:
    """Seconds that `device` takes for a fixed number of matrix products; waits for them.

    On a GPU this is the time between two events of its stream, so what was queued before is not in it. On a CPU it
    is wall-clock time: a rank whose core is taken away is slow, though its CPU time shows nothing. Costs about ten
    milliseconds at most; the operands stay allocated (24 MiB on a GPU, less than 1 MiB on a CPU).
    """
    if device.type != "cuda":
        _multiply(cpu := torch.device("cpu"), _WARMUP_PRODUCTS)
        # The shortest of three: another program's turn on the core is noise, but who is short of a core always waits.
        return min(timeit.repeat(lambda: _multiply(cpu, 16), repeat=3, number=1))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        _multiply(device, _WARMUP_PRODUCTS)
        start.record()
        _multiply(device, 50)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000


def _multiply(device: torch.device, times: int) -> None:
    left, right, product = _operands(device)
    for _ in range(times):
        torch.mm(left, right, out=product)


@cache
def _operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two random square matrices (zeros would draw less power) and room for their product."""
    # float16 is fast on every GPU with tensor cores; 2,048 wide, a product takes longer than its launch.
    size, dtype = (2048, torch.float16) if device.type == "cuda" else (256, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    return left, right, torch.empty_like(left)
