"""Profiles some steps of a run: `ds-encdec train --profile N`.

RUN/profile/
  trace-rank-0.json   the trace of torch.profiler, for https://ui.perfetto.dev or chrome://tracing; one per rank
  rank-0.txt          the shares of the step, and torch's table of the operators that take longest
  rank-0.json         the shares

Profiled steps are slower than others, so go by shares and counts.
"""

from __future__ import annotations

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

WARM_UP_STEPS = 3
"""Steps of this process before the first that is profiled: compilation, first allocations, the optimizer's states."""
_OPERATORS = 25
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
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
            self._began = time.perf_counter()
        elif self._seen == WARM_UP_STEPS + self._steps:
            self._end()

    def finish(self) -> None:
        """Write a profile that the end of the run cut short, or log that there is none."""
        self._end()
        if self._seen <= WARM_UP_STEPS and self._rank == 0:
            logger.warning(
                "--profile: no profile, since the first %d steps are warm-up and the run took %d",
                WARM_UP_STEPS,
                self._seen,
            )

    def _end(self) -> None:
        if (profiled := self._profile) is None:
            return
        self._profile = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work that is under way belongs to these steps
        seconds, steps = time.perf_counter() - self._began, self._seen - WARM_UP_STEPS
        if not steps:
            profiled.stop()
            return
        if self._rank == 0:
            logger.info("writing the profile of %d steps into %s", steps, self._folder)  # which takes seconds
        profiled.stop()
        figures = {"rank": self._rank, "last_step": self._last_step, **summarize(profiled, steps, seconds)}
        text = describe(figures, profiled)
        self._folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(self._folder / f"trace-rank-{self._rank}.json"))
        (self._folder / f"rank-{self._rank}.json").write_text(json.dumps(figures, indent=1) + "\n")
        (self._folder / f"rank-{self._rank}.txt").write_text(text)
        if self._rank == 0:
            logger.info("%s", text)


def summarize(profiled: profile, steps: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a finished profile of `steps` steps, which took `seconds`. Shares are of that time.
    `data_wait_share`: waits for the next micro-batches. `communication_share`: time with a collective under way, alone
    or beside other work, on the device if there is one. `host_waits`: by name, how often a step made the host wait for
    the device or read a number of a tensor."""
    events: Any = profiled.events()
    averages: Any = profiled.key_averages()
    # Annotations, such as FSDP2's of its phases, also come back as work of the device.
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    collectives = _spans(on_device or events, _COMMUNICATION)
    return {
        "device": torch.cuda.get_device_name() if on_device else "cpu",
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "data_wait_share": _covered_us(_spans(events, ("waits for data",))) / (1e6 * seconds),
        "communication_share": _covered_us(collectives) / (1e6 * seconds),
        "host_waits": {row.key: row.count / steps for row in averages if row.key in _HOST_WAITS},
    }


def describe(figures: dict[str, Any], profiled: profile) -> str:
    """Format the figures of `summarize`, above torch's table of the operators of all profiled steps."""
    waits = ", ".join(f"{name} {count:g}" for name, count in figures["host_waits"].items()) or "none"
    on_cpu = figures["device"] == "cpu"
    lines = [
        f"rank {figures['rank']} ({figures['device']}), {figures['steps']} steps to step {figures['last_step']}: "
        f"{figures['step_ms']:.1f} ms each",
        f"waits for data: {figures['data_wait_share']:.1%} of the time; collectives: "
        f"{figures['communication_share']:.1%}",
        *([] if on_cpu else [f"host waits a step: {waits}"]),
        profiled.key_averages().table(
            sort_by=f"self_{'cpu' if on_cpu else 'cuda'}_time_total", row_limit=_OPERATORS, max_name_column_width=60
        ),
        f"every call in its place: trace-rank-{figures['rank']}.json, for https://ui.perfetto.dev",
    ]
    return "\n".join(lines) + "\n"


def _spans(events: Iterable[Any], prefixes: tuple[str, ...]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events if event.name.startswith(prefixes)]


def _covered_us(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time inside at least one of `spans`: nested ones, and those of several threads, count once."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
