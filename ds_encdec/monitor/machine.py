"""Measure speed, memory and waits on every rank once per logging interval, and raise the alerts of the machines. In
synchronous training every rank has the same step time, since the others wait for the slow one inside collectives. Ranks
differ in how long each waits for the others before a step, and in the time of arithmetic without collectives."""

import math
import re
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

import psutil
import torch

from ds_encdec.base.quantities import gib
from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.metrics import MetricWindow
from ds_encdec.monitor.metrics_file import PERSISTENT_INTERVALS, make_alert

MIN_THROUGHPUT_VALUES = 5  # intervals that must be in the throughput window before a drop can be seen
# Intervals of a process, and again after its first save, whose largest memory is the baseline.
MEMORY_BASELINE_INTERVALS = range(2, 5)
_WARMUP_PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one interval. `training_s` contains the waits for data, and no pauses. `exchange_wait_s`: the waits
    for the last rank in the exchanges before the steps."""

    training_s: float
    data_wait_s: float
    exchange_wait_s: float


class IntervalClock:
    """Monotonic time since the last lap, by its use. The first lap begins with the first wait for data."""

    def __init__(self) -> None:
        self._has_begun, self._lap_began, self._seconds = False, time.monotonic(), defaultdict[str, float](float)

    @contextmanager
    def spent_on(self, what: Literal["data", "pause"]) -> Iterator[None]:
        """Count the time inside as a wait for data, or as a pause (evaluation, checkpoints), which is no training time.
        A pause inside another counts once."""
        if what == "data" and not self._has_begun:
            self.lap()
        began, before = time.monotonic(), self._seconds[what]
        try:
            with torch.profiler.record_function(f"waits for {what}"):  # shown in profiles
                yield
        finally:
            if self._lap_began > began:  # a lap has ended in between
                began, before = self._lap_began, 0.0
            self._seconds[what] = before + time.monotonic() - began

    def add_exchange(self, seconds: float) -> None:
        """Count a wait for the last rank, in the exchange before a step."""
        self._seconds["ranks"] += seconds

    def lap(self) -> Lap:
        """End the lap and start a new one."""
        now, spent = time.monotonic(), self._seconds
        lap = Lap(now - self._lap_began - spent["pause"], spent["data"], spent["ranks"])
        self._has_begun, self._lap_began, self._seconds = True, now, defaultdict(float)
        return lap


@dataclass(frozen=True, slots=True)
class RankStats(Lap):
    """One rank's figures of one logging interval; gathered, so that all ranks judge by the same. `arithmetic_s`: see
    `measure_arithmetic`. `memory`, in bytes: `host`, resident now; `device`, allocated on the accelerator now; `peak`,
    the largest of that so far (of the host's without an accelerator); `reserved`, by the allocator; and once in a
    process the engine's tensors by category (engine/protocol.py)."""

    arithmetic_s: float
    memory: Mapping[str, float]


def measure_rank_stats(device: torch.device, lap: Lap, held_bytes: Mapping[str, int]) -> RankStats:
    """Return this rank's figures of `lap`; memory and arithmetic are measured now."""
    host = psutil.Process().memory_info().rss
    # The kernel brings its peak up to date a little later.
    memory = {"host": host, "peak": max(peak_host_bytes(), host)}
    if device.type == "cuda":
        memory |= {
            "peak": torch.cuda.max_memory_allocated(device),
            "device": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return RankStats(**asdict(lap), arithmetic_s=measure_arithmetic(device), memory={**memory, **held_bytes})


def peak_host_bytes() -> int:
    """Return the peak of this program's resident memory. Linux's `ru_maxrss` begins with the parent process's."""
    import resource  # Unix only, and only here

    return own_status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_status(name: str) -> int:
    """Return a figure of this process, in bytes, from Linux's /proc; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text(errors="replace")
    except OSError:
        return 0
    match = re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def measure_arithmetic(device: torch.device) -> float:
    """Return the seconds that `device` takes for a fixed number of matrix products; waits for them, about 10 ms. On a
    GPU this is the time between two events of its stream, without earlier work in the queue. On a CPU it is wall-clock
    time: a rank without its core is slow, though its CPU time shows nothing. The operands stay allocated."""
    if device.type != "cuda":
        _multiply(cpu := torch.device("cpu"), _WARMUP_PRODUCTS)
        # The shortest of three: another program's turn on the core is noise, a core that is always shared is not.
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
def _operands(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return two random square matrices (zeros would draw less power) and one for their product."""
    # float16 is fast on every GPU with tensor cores; 2,048 wide, a product takes longer than its launch.
    size, dtype = (2048, torch.float16) if device.type == "cuda" else (256, torch.float32)
    seeded = torch.Generator(device).manual_seed(0)
    return tuple(torch.randn(3, size, size, device=device, dtype=dtype, generator=seeded))


class MachineWatch:
    """Judges the figures of all ranks once per logging interval; its alerts are those of `MACHINE_ALERTS`. An alert is
    raised once, and again when it has ended and come back (memory: when it has grown further). The first interval of a
    process (compilation, start of workers) is left out of throughput."""

    def __init__(self, settings: MonitorConfig) -> None:
        self._settings = settings
        self._intervals = self._memory_intervals = 0
        # Tokens per second and rank, comparable after a resume on other ranks. Checkpoints save this window only.
        self.throughput = MetricWindow(settings.window_size)
        self._streaks: dict[str, int] = {}
        self._memory_levels: dict[str, list[float]] = {}
        self._saved = False

    def update(self, step: int, rank_stats: Sequence[RankStats], *, tokens_per_second: float) -> list[dict[str, Any]]:
        """Add one logging interval and return its new alerts. `tokens_per_second` is of all ranks, NaN if it was not
        measured."""
        self._intervals += 1
        self._memory_intervals += 1
        ranks, settings = len(rank_stats), self._settings
        speed, drop = tokens_per_second / ranks, settings.throughput_drop_threshold
        is_compared = self._intervals > 1 and len(self.throughput) >= MIN_THROUGHPUT_VALUES
        least = drop * self.throughput.mean if is_compared else 0.0
        if self._intervals > 1 and not math.isnan(speed):
            self.throughput.add(speed)  # a low one too: a speed that stays becomes the usual one
        shares = [rank.data_wait_s / max(rank.training_s, 1e-9) for rank in rank_stats]
        share, most = max(shares), settings.data_wait_threshold
        slow, late = settings.straggler_threshold, settings.straggler_late_threshold
        ratios, latest, lateness = _compared(rank_stats)
        rows: list[tuple[Any, ...]] = [
            ("throughput", "throughput_drop", speed < least, speed, least,
             f"{speed * ranks:,.0f} tokens/s over all ranks are below {least * ranks:,.0f}, "
             f"monitor.throughput_drop_threshold={drop:g} times the mean of the intervals before"),
            ("data", "data_wait", share > most, share, most,  # of any rank: ranks that wait for data take turns
             f"rank {shares.index(share)} waits for its next batch for {share:.1%} of the time, more than the share "
             f"monitor.data_wait_threshold={most:g} in {PERSISTENT_INTERVALS} logging intervals in a row"),
            *((f"slow {rank}", "straggler", ratio > slow, ratio, slow,
               f"rank {rank} is slow: for the same arithmetic it takes {ratio:.2f} times as long as the "
               f"{'faster' if ranks == 2 else 'median'} rank, more than monitor.straggler_threshold={slow:g} times")
              for rank, ratio in enumerate(ratios)),
            (f"late {latest}", "straggler", lateness > late, lateness, late,
             f"rank {latest} is late: others wait for it before the steps for {lateness:.1%} of the time, more than "
             f"the share monitor.straggler_late_threshold={late:g}"),
        ]  # fmt: skip
        # Faults by streak; a fault that has lasted for long enough is an alert.
        faults = {streak: (kind, step, *facts) for streak, kind, is_fault, *facts in rows if is_fault}
        self._streaks = {streak: self._streaks.get(streak, 0) + 1 for streak in faults}
        return [
            *(make_alert(*fault) for key, fault in faults.items() if self._streaks[key] == PERSISTENT_INTERVALS),
            *self._judge_memory(step, "host", [rank.memory["host"] for rank in rank_stats]),
            *self._judge_memory(step, "device", [rank.memory.get("device", 0) for rank in rank_stats]),
        ]

    def note_save(self) -> None:
        """Begin a new baseline of memory at the first checkpoint of a process, which keeps its staging buffers."""
        if not self._saved:
            self._saved, self._memory_intervals, self._memory_levels = True, 0, {}

    @staticmethod
    def metrics(rank_stats: Sequence[RankStats]) -> dict[str, float]:
        """Return the largest memory of all ranks and, of several ranks, the slowest and the latest."""
        metrics = {
            f"mem/{name}_bytes": largest
            for name in rank_stats[0].memory
            if (largest := max(rank.memory[name] for rank in rank_stats))
        }
        if len(rank_stats) > 1:
            ratios, latest, lateness = _compared(rank_stats)
            metrics |= {
                "health/slowest_rank": ratios.index(max(ratios)),
                "health/slowest_rank_ratio": max(ratios),
                "health/latest_rank": latest,
                "health/latest_rank_late_frac": lateness,
            }
        return metrics

    def _judge_memory(self, step: int, place: str, now: Sequence[float]) -> list[dict[str, Any]]:
        if self._memory_intervals < MEMORY_BASELINE_INTERVALS.start:
            return []
        levels = self._memory_levels.setdefault(place, list(now))
        if self._memory_intervals in MEMORY_BASELINE_INTERVALS:
            levels[:] = [max(pair) for pair in zip(levels, now, strict=True)]
            return []
        threshold = self._settings.memory_growth_threshold
        growth = {rank: now[rank] / level - 1 for rank, level in enumerate(levels) if level}
        grown = [rank for rank in growth if growth[rank] > threshold]
        if not grown:
            return []
        worst = max(grown, key=lambda rank: growth[rank])
        message = (
            f"{place} memory of rank {worst} has grown from {gib(levels[worst])} to {gib(now[worst])}; "
            f"that of {len(grown)} of {len(now)} ranks by more than the share "
            f"monitor.memory_growth_threshold={threshold:g}"
        )
        for rank in grown:
            levels[rank] = now[rank]
        return [make_alert("memory_growth", step, growth[worst], threshold, message)]


def _compared(rank_stats: Sequence[RankStats]) -> tuple[list[float], int, float]:
    """Return each rank's time for the arithmetic over the median rank's (of two ranks, over the faster one's), the rank
    that the others wait for most, and the share of the interval that they wait."""
    median = median_low(rank.arithmetic_s for rank in rank_stats)
    waits = [rank.exchange_wait_s for rank in rank_stats]
    latest = waits.index(min(waits))
    lateness = (max(waits) - waits[latest]) / max(rank_stats[latest].training_s, 1e-9)
    return [rank.arithmetic_s / median for rank in rank_stats], latest, lateness
