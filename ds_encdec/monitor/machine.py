"""How fast the run is, and the machines under it: clocked, measured on every rank once per logging interval, watched.

Tokens per second, model FLOPs utilisation, and where the time goes; slow and late ranks, memory, and waits for data. In
synchronous training every rank has the same step time, since the others wait for the slow one inside collectives (under
ZeRO-3 in the forward pass of every layer). What does tell them apart: how long each of them waits for the others before
a step, and how long each takes for a piece of arithmetic that involves nobody else.
"""

import math
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median_low
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from torch.profiler import record_function

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.metrics import MetricWindow
from ds_encdec.monitor.metrics_file import PERSISTENT_INTERVALS, make_alert
from ds_encdec.quantities import gib

MIN_THROUGHPUT_VALUES = 5  # intervals that must be in the throughput window before a drop can be seen
MEMORY_BASELINE_INTERVALS = range(2, 5)
"""Intervals of this process, and then after its first save, whose largest memory is the baseline: what is allocated
late belongs to it."""
_WARMUP_PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one interval. `training_s` contains the waits for data, and no pauses.

    `exchange_wait_s`: by which this rank was there before the last one, in the exchanges before the steps.
    """

    training_s: float
    data_wait_s: float
    exchange_wait_s: float


class IntervalClock:
    """Monotonic time since the last lap, kept apart by what it was spent on.

    The first lap begins with the first wait for data: building or loading a model is no training time.
    """

    def __init__(self) -> None:
        self._has_begun, self._lap_began, self._seconds = False, time.monotonic(), defaultdict[str, float](float)

    @contextmanager
    def spent_on(self, what: Literal["data", "pause"]) -> Iterator[None]:
        """Time that the loop waits for its next batch.

        A `pause` is no training time: evaluation, checkpoints. One inside another counts once.
        """
        if what == "data" and not self._has_begun:
            self.lap()
        began, before = time.monotonic(), self._seconds[what]
        try:
            with record_function(f"waits for {what}"):  # so that a profile shows it
                yield
        finally:
            if self._lap_began > began:  # a lap has ended in between
                began, before = self._lap_began, 0.0
            self._seconds[what] = before + time.monotonic() - began

    def add_exchange(self, seconds: float) -> None:
        """Time by which this rank came to the exchange before a step earlier than the last one."""
        self._seconds["ranks"] += seconds

    def lap(self) -> Lap:
        """The time since the last lap, and start a new one."""
        now, spent = time.monotonic(), self._seconds
        lap = Lap(now - self._lap_began - spent["pause"], spent["data"], spent["ranks"])
        self._has_begun, self._lap_began, self._seconds = True, now, defaultdict(float)
        return lap


def performance_metrics(
    lap: Lap,
    *,
    num_steps: int,
    tokens: float,
    num_devices: int,
    flops: float | None = None,
    peak_flops_per_device: float | None = None,
) -> dict[str, float]:
    """The `perf/` metrics of an interval.

    `tokens`: non-padding tokens of both sides over all ranks. `flops`: model FLOPs of the interval over all
    ranks, recomputation not counted. `perf/mfu` (a fraction) is there where FLOPs and the peak are known.
    """
    seconds = max(lap.training_s, 1e-9)
    metrics = {
        "perf/tokens_per_sec": tokens / seconds,
        "perf/tokens_per_sec_per_gpu": tokens / seconds / num_devices,
        "perf/step_time_s": seconds / max(num_steps, 1),
        "perf/data_wait_frac": lap.data_wait_s / seconds,
    }
    if flops is not None and peak_flops_per_device is not None:
        metrics["perf/mfu"] = flops / seconds / (peak_flops_per_device * num_devices)
    return metrics


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
        memory |= {
            "peak": torch.cuda.max_memory_allocated(device),
            "device": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return RankStats(**asdict(lap), arithmetic_s=measure_arithmetic(device), memory={**memory, **held_bytes})


def peak_host_bytes() -> int:
    """The most resident memory that this program has had.

    Linux's `ru_maxrss` begins with that of the process that started this one, which may be larger; VmHWM does not.
    """
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
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


class MachineWatch:
    """Looks at the statistics of all ranks once per logging interval; its alerts are those of `MACHINE_ALERTS`.

    An alert is raised once, and again when what it says has ended and come back (memory: when it has grown further).
    The first interval of a process pays for compiling and for starting workers, and is left out of throughput.
    """

    def __init__(self, settings: MonitorConfig) -> None:
        self._settings = settings
        self._intervals = self._memory_intervals = 0
        # Tokens per second and rank: comparable with what it was before a resume on more or fewer ranks. It is saved;
        # memory and streaks are this process's own, and start anew.
        self.throughput = MetricWindow(settings.window_size)
        self._streaks: dict[tuple[str, int], int] = {}
        self._memory_levels: dict[str, list[float]] = {}
        self._saved = False

    def update(self, step: int, rank_stats: Sequence[RankStats], *, tokens_per_second: float) -> list[dict[str, Any]]:
        """Take in one logging interval, and return its new alerts.

        `rank_stats` of all ranks in their order; `tokens_per_second` of all ranks together, NaN if it was not measured.
        """
        self._intervals += 1
        self._memory_intervals += 1
        return [
            *self._judge_persistent(step, rank_stats, tokens_per_second / len(rank_stats)),
            *self._judge_memory(step, "host", [rank.memory["host"] for rank in rank_stats]),
            *self._judge_memory(step, "device", [rank.memory.get("device", 0) for rank in rank_stats]),
        ]

    def note_save(self) -> None:
        """A checkpoint was saved. The first one of a process keeps its staging buffers: memory has a new baseline."""
        if not self._saved:
            self._saved, self._memory_intervals, self._memory_levels = True, 0, {}

    @staticmethod
    def metrics(rank_stats: Sequence[RankStats]) -> dict[str, float]:
        """Memory, the largest of all ranks', and of two ranks or more who is slowest and latest in an interval."""
        metrics = {
            f"mem/{name}_bytes": largest
            for name in rank_stats[0].memory
            if (largest := max(rank.memory[name] for rank in rank_stats))
        }
        if len(rank_stats) > 1:
            ratios, (latest, lateness) = _slowness(rank_stats), _latest(rank_stats)
            slowest = ratios.index(max(ratios))
            metrics |= {"health/slowest_rank": slowest, "health/slowest_rank_ratio": ratios[slowest]}
            metrics |= {"health/latest_rank": latest, "health/latest_rank_late_frac": lateness}
        return metrics

    def _judge_persistent(self, step: int, rank_stats: Sequence[RankStats], speed: float) -> list[dict[str, Any]]:
        """Alerts of what has now been beyond its threshold in `PERSISTENT_INTERVALS` intervals in a row.

        `speed`: tokens per second and rank.
        """
        settings, usual = self._settings, self.throughput.mean
        is_compared = self._intervals > 1 and len(self.throughput) >= MIN_THROUGHPUT_VALUES
        least = settings.throughput_drop_threshold * usual if is_compared else 0.0
        if self._intervals > 1 and not math.isnan(speed):
            # A low value counts like any other: a speed that stays becomes the one to be compared with.
            self.throughput.add(speed)
        shares = [rank.data_wait_s / max(rank.training_s, 1e-9) for rank in rank_stats]
        share, (latest, lateness) = max(shares), _latest(rank_stats)
        waits, slow, late = (
            settings.data_wait_threshold,
            settings.straggler_threshold,
            settings.straggler_late_threshold,
        )
        ranks = len(rank_stats)
        low_speed = (
            f"{speed * ranks:,.0f} tokens/s over all ranks are below {least * ranks:,.0f}, "
            f"monitor.throughput_drop_threshold={settings.throughput_drop_threshold:g} times the mean of the "
            "intervals before"
        )
        waiting = (
            f"rank {shares.index(share)} waits for its next batch for {share:.1%} of the time, more than the share "
            f"monitor.data_wait_threshold={waits:g} in {PERSISTENT_INTERVALS} logging intervals in a row"
        )
        waited_for = (
            f"rank {latest} is late: others wait for it before the steps for {lateness:.1%} of the time, more than the "
            f"share monitor.straggler_late_threshold={late:g}"
        )
        # What and whose, whether it is beyond its threshold, and the alert. Ranks that wait for data take turns, so it
        # does not count which one does.
        rows = [
            (("throughput", 0), speed < least, make_alert("throughput_drop", step, speed, least, low_speed)),
            (("data_wait", 0), share > waits, make_alert("data_wait", step, share, waits, waiting)),
        ]
        for rank, ratio in enumerate(_slowness(rank_stats)):
            message = (
                f"rank {rank} is slow: for the same arithmetic it takes {ratio:.2f} times as long as the "
                f"{'faster' if ranks == 2 else 'median'} rank, more than monitor.straggler_threshold={slow:g} times"
            )
            rows.append((("slow", rank), ratio > slow, make_alert("straggler", step, ratio, slow, message)))
        rows.append((("late", latest), lateness > late, make_alert("straggler", step, lateness, late, waited_for)))
        seen = {key: alert for key, is_beyond, alert in rows if is_beyond}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in seen}
        return [alert for key, alert in seen.items() if self._streaks[key] == PERSISTENT_INTERVALS]

    def _judge_memory(self, step: int, place: str, now: Sequence[float]) -> list[dict[str, Any]]:
        """One alert for all ranks that have grown: mostly they do so together."""
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


def _slowness(rank_stats: Sequence[RankStats]) -> list[float]:
    """Each rank's time for the arithmetic over the median rank's: of two ranks, over the faster one's."""
    median = median_low(rank.arithmetic_s for rank in rank_stats)
    return [rank.arithmetic_s / median for rank in rank_stats]


def _latest(rank_stats: Sequence[RankStats]) -> tuple[int, float]:
    """The rank that the others wait for most, and for which share of the interval its last one does."""
    waits = [rank.exchange_wait_s for rank in rank_stats]
    latest = waits.index(min(waits))
    return latest, (max(waits) - waits[latest]) / max(rank_stats[latest].training_s, 1e-9)
