"""How fast the run is: real tokens per second, model FLOPs utilisation, and where the time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

# Dense bfloat16 tensor-core peak in TFLOP/s with float32 accumulation, from NVIDIA's and AMD's data sheets
# (which print twice the number where they count 2:4 sparsity). The longest matching key wins, so that the
# PCIe and NVL cards, which are slower, are not taken for the SXM ones.
_DENSE_BF16_TFLOPS: dict[str, float] = {
    "A100": 312,  # A100 data sheet: SXM and PCIe alike
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "L4": 121,
    "L40S": 362,
    "H100": 989,  # H100 data sheet, SXM5: 1,979 sparse
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H200": 989,  # H200 data sheet, SXM: 1,979 sparse
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,  # HGX B200: 36 PFLOP/s sparse over 8
    "GB200": 2500,  # GB200 NVL72: 360 PFLOP/s sparse over 72
    "MI300X": 1307,  # MI300X data sheet
}


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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the device that `torch.cuda.get_device_name()` names; None if unknown.

    A key matches whole words only: an "A100-SXM4-80GB" is an A100, an "A10G" is no A10.
    """
    words = f" {device_name.replace('-', ' ')} "
    matches = [key for key in _DENSE_BF16_TFLOPS if f" {key} " in words]
    return _DENSE_BF16_TFLOPS[max(matches, key=len)] * 1e12 if matches else None
