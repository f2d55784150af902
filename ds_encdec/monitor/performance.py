"""How fast the run is: real tokens per second, model FLOPs utilisation, and where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


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
        self._has_begun = False
        self._lap_began, self._seconds = time.monotonic(), defaultdict[str, float](float)

    @contextmanager
    def spent_on(self, what: Literal["data", "ranks", "pause"]) -> Iterator[None]:
        """Time that the loop waits for its next batch, or for the other ranks to come to the next step.

        A `pause` is no training time: evaluation, checkpoints.
        """
        if what == "data" and not self._has_begun:
            self._has_begun = True
            self.lap()
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] += time.monotonic() - max(began, self._lap_began)  # a lap may have ended in between

    def lap(self) -> Lap:
        """The time since the last lap, and start a new one."""
        now, spent = time.monotonic(), self._seconds
        lap = Lap(now - self._lap_began - spent["pause"], spent["data"], spent["ranks"])
        self._lap_began, self._seconds = now, defaultdict(float)
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
