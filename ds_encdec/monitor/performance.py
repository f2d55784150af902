"""How fast the run is: real tokens per second, model FLOPs utilisation, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one interval. `training_s` contains the waits, for data and for other ranks, and no pauses."""

    training_s: float
    data_wait_s: float
    exchange_wait_s: float


class IntervalClock:
    """Monotonic time since the last lap, kept apart by what it was spent on.

    The first lap begins with the first wait for data: building or loading a model is no training time.
    """

    def __init__(self) -> None:
        self._running = False
        self._start()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time that the loop waits for its next batch."""
        if not self._running:
            self._running = True
            self._start()
        began = time.monotonic()
        try:
            yield
        finally:
            self._data_wait_s += time.monotonic() - began

    @contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """Time that the loop waits for the other ranks to come to the next step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._exchange_wait_s += time.monotonic() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training: evaluation, checkpoints."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - max(began, self._began)  # a lap may have ended in between

    def lap(self) -> Lap:
        """The time since the last lap, and start a new one."""
        lap = Lap(time.monotonic() - self._began - self._paused_s, self._data_wait_s, self._exchange_wait_s)
        self._start()
        return lap

    def _start(self) -> None:
        self._began = time.monotonic()
        self._data_wait_s = 0.0
        self._exchange_wait_s = 0.0
        self._paused_s = 0.0


def performance_metrics(
    lap: Lap,
    *,
    num_steps: int,
    tokens: int,
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
