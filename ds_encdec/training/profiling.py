"""Profiles some steps of a run: `ds-encdec train --profile N`.

RUN/profile/
  trace-rank-0.json   the trace of torch.profiler, for https://ui.perfetto.dev or chrome://tracing; one per rank
  rank-0.txt          the shares of the step, and torch's table of the operators that take longest
  rank-0.json         the shares

Profiled steps are slower than others, so go by shares and counts.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ds_encdec.base.types import Callback, StepResult, TrainingState

logger = logging.getLogger(__name__)

# Steps of this process before the first that is profiled: compilation, first allocations, the optimizer's states.
WARM_UP_STEPS = 3
_COMMUNICATION = ("nccl", "gloo:", "c10d::", "ncclDevKernel")
_HOST_WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "hipStreamSynchronize",
    "hipDeviceSynchronize",
    "aten::_local_scalar_dense",
)


class StepProfiler(Callback):
    """Profiles `steps` steps after the warm-up, and writes the files above into `folder`."""

    def __init__(self, steps: int, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = steps, folder, rank
        self._seen, self._last_step, self._began = 0, 0, 0.0
        self._profile: profile | None = None

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """Start the profile after the warm-up, and end it after the last step to profile."""
        self._seen += 1
        self._last_step = state.global_step
        if self._seen == WARM_UP_STEPS:
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()], acc_events=True
            )
            self._profile.start()
            self._began = time.perf_counter()
        elif self._seen == WARM_UP_STEPS + self._steps:
            self.finish()

    def finish(self) -> None:
        """Write the profile, also one that the end of the run cut short, or log that no step was profiled."""
        profiled, self._profile = self._profile, None
        steps, is_main = self._seen - WARM_UP_STEPS, self._rank == 0
        if profiled is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # work that is under way belongs to these steps
            seconds = time.perf_counter() - self._began
            if steps and is_main:
                logger.info("writing the profile of %d steps into %s", steps, self._folder)  # which takes seconds
            profiled.stop()
            if steps:
                self._write(profiled, steps, seconds)
        if steps <= 0 and is_main:
            logger.warning("--profile: none of %d steps is behind the %d of the warm-up", self._seen, WARM_UP_STEPS)

    def _write(self, profiled: profile, steps: int, seconds: float) -> None:
        """Write the three files, and log the text of rank 0's second. Shares are of `seconds`: `data_wait_share`, waits
        for the next micro-batches; `communication_share`, time with a collective under way, alone or beside other work,
        on the device if there is one. `host_waits`: by name, how often a step made the host wait for the device or read
        a number of a tensor."""
        events: Any = profiled.events()
        averages: Any = profiled.key_averages()
        # Annotations, such as FSDP2's of its phases, also come back as work of the device.
        on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
        figures: dict[str, Any] = {
            "rank": self._rank,
            "last_step": self._last_step,
            "device": torch.cuda.get_device_name() if on_device else "cpu",
            "steps": steps,
            "step_ms": 1e3 * seconds / steps,
            "data_wait_share": _covered_us(_spans(events, ("waits for data",))) / (1e6 * seconds),
            "communication_share": _covered_us(_spans(on_device or events, _COMMUNICATION)) / (1e6 * seconds),
            "host_waits": {row.key: row.count / steps for row in averages if row.key in _HOST_WAITS},
        }
        waits = ", ".join(f"{name} {times:g}" for name, times in figures["host_waits"].items()) or "none"
        waits = f"host waits a step: {waits}\n" if on_device else ""
        table = averages.table(
            sort_by=f"self_{'cuda' if on_device else 'cpu'}_time_total", row_limit=25, max_name_column_width=60
        )
        text = (
            f"rank {self._rank} ({figures['device']}), {steps} steps to step {self._last_step}: "
            f"{figures['step_ms']:.1f} ms each\n"
            f"waits for data: {figures['data_wait_share']:.1%} of the time; collectives: "
            f"{figures['communication_share']:.1%}\n"
            f"{waits}{table}\n"
            f"every call in its place: trace-rank-{self._rank}.json, for https://ui.perfetto.dev\n"
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(self._folder / f"trace-rank-{self._rank}.json"))
        (self._folder / f"rank-{self._rank}.json").write_text(json.dumps(figures, indent=1) + "\n")
        (self._folder / f"rank-{self._rank}.txt").write_text(text)
        if self._rank == 0:
            logger.info("%s", text)


def _spans(events: Iterable[Any], prefixes: tuple[str, ...]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events if event.name.startswith(prefixes)]


def _covered_us(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time inside at least one of `spans`: nested ones, and those of several threads, count once."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
