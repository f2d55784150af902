"""Watches the machines under a run: throughput, slow and late ranks, memory, and waits for data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.events import make_alert
from ds_encdec.monitor.metrics import MetricWindow
from ds_encdec.monitor.rank_stats import RankStats

PERSISTENT_INTERVALS = 3
"""Logging intervals in a row in which anything but memory must be seen to be an alert: one is noise."""
MIN_THROUGHPUT_VALUES = 5
"""Intervals that must be in the throughput window before a drop can be seen."""
MEMORY_BASELINE_INTERVALS = range(2, 5)
"""Intervals of this process, and then after its first save, whose largest memory is the baseline: what is allocated
late belongs to it."""


class MachineWatch:
    """Looks at the statistics of all ranks once per logging interval; its alerts are those of `MACHINE_ALERTS`.

    An alert is raised once, and again when what it says has ended and come back (memory: when it has grown further).
    The first interval of a process pays for compiling and for starting workers, and is left out of throughput.
    """

    def __init__(self, settings: MonitorConfig) -> None:
        self._settings = settings
        self._intervals = 0
        # Tokens per second and rank: comparable with what it was before a resume on more or fewer ranks.
        self._throughput = MetricWindow(settings.window_size)
        self._streaks: dict[tuple[str, int], int] = {}
        self._memory_intervals = 0
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
            self._saved = True
            self._memory_intervals = 0
            self._memory_levels = {}

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

    def state_dict(self) -> dict[str, Any]:
        """The throughput window, strictly JSON-able. Memory and streaks are this process's own, and start anew."""
        return {"throughput": self._throughput.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave. For a resume; a rollback changes nothing about the machines."""
        self._throughput.load_state_dict(state["throughput"])

    def _judge_persistent(self, step: int, rank_stats: Sequence[RankStats], speed: float) -> list[dict[str, Any]]:
        """Alerts of what has now been beyond its threshold in `PERSISTENT_INTERVALS` intervals in a row.

        `speed`: tokens per second and rank.
        """
        settings, seen = self._settings, {}
        least = settings.throughput_drop_threshold * self._usual_speed(speed)
        if speed < least:
            message = f"{speed:.1f} tokens/s per rank are below {least:.1f}"
            seen["throughput", 0] = make_alert("throughput_drop", step, speed, least, message)
        shares = [rank.data_wait_s / max(rank.training_s, 1e-9) for rank in rank_stats]
        if (share := max(shares)) > settings.data_wait_threshold:
            message = f"rank {shares.index(share)} waits for its next batch for {share:.0%} of the time"
            # Whichever rank it is: they take turns.
            seen["data_wait", 0] = make_alert("data_wait", step, share, settings.data_wait_threshold, message)
        for rank, ratio in enumerate(_slowness(rank_stats)):
            if ratio > settings.straggler_threshold:
                times = f"it takes {ratio:.2f} times as long as the median rank for the same arithmetic"
                message = f"rank {rank} is slow: {times}"
                seen["slow", rank] = make_alert("straggler", step, ratio, settings.straggler_threshold, message)
        rank, lateness = _latest(rank_stats)
        if lateness > settings.straggler_late_threshold:
            message = f"rank {rank} is late: others wait for it before the steps, for {lateness:.0%} of the time"
            seen["late", rank] = make_alert("straggler", step, lateness, settings.straggler_late_threshold, message)
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in seen}
        return [alert for key, alert in seen.items() if self._streaks[key] == PERSISTENT_INTERVALS]

    def _usual_speed(self, speed: float) -> float:
        """The mean of the window before this interval; 0 while there are too few values to compare `speed` with."""
        if self._intervals == 1 or math.isnan(speed):
            return 0.0
        usual = self._throughput.mean if len(self._throughput) >= MIN_THROUGHPUT_VALUES else 0.0
        # A low value counts like any other: a speed that stays becomes the one to be compared with.
        self._throughput.add(speed)
        return usual

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
            f"{place} memory of rank {worst} has grown from {_gib(levels[worst])} to {_gib(now[worst])}; "
            f"that of {len(grown)} of {len(now)} ranks by more than {threshold:.0%}"
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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
