"""A look inside some steps of a run: `ds-encdec train --profile N`.

RUN/profile/
  trace-rank-0.json   what torch.profiler saw, for https://ui.perfetto.dev or chrome://tracing; one per rank
  rank-0.txt          the shares of the step and the operators that take longest
  rank-0.json         the same figures

Profiled steps are slower than others, so shares and counts are what to go by.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ds_encdec.callbacks import Callback
from ds_encdec.types import StepResult, TrainingState

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
_DATA_WAIT = "waits for data"


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one rank's profiled steps.

    `first_step`, `last_step`: as `TrainingState.global_step` counts them. `step_ms`: the mean, by the clock. Shares are
    of that time: `data_wait_share` of waits for the next micro-batches, `communication_share` of the time in which a
    collective was under way, on the device where there is one, alone or beside something else. `host_waits`: by name,
    how often a step made the host wait for the device, or read a number of a tensor. `operators`: name, calls a step,
    own milliseconds a step on the CPU and on the device, longest first.
    """

    rank: int
    device: str
    first_step: int
    last_step: int
    step_ms: float
    data_wait_share: float
    communication_share: float
    host_waits: dict[str, float]
    operators: list[dict[str, Any]]

    def text(self) -> str:
        """The figures as a table for people."""
        waits = ", ".join(f"{name} {count:g}" for name, count in self.host_waits.items()) or "none"
        steps = f"steps {self.first_step} to {self.last_step}"
        on_cpu = self.device == "cpu"
        lines = [
            f"rank {self.rank} ({self.device}), {steps}: {self.step_ms:.1f} ms each",
            f"waits for data: {self.data_wait_share:.1%} of the time; collectives: {self.communication_share:.1%}",
            *([] if on_cpu else [f"host waits a step: {waits}"]),
            "",
            f"{'operator, without those it calls, a step':<60} {'calls':>8} {'CPU ms':>10}"
            + (f" {'% of step':>10}" if on_cpu else f" {'device ms':>10} {'% of step':>10}"),
        ]
        for row in self.operators:
            name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
            milliseconds = row["cpu_ms" if on_cpu else "device_ms"]
            on_device = "" if on_cpu else f" {milliseconds:>10.3f}"
            share = f" {100 * milliseconds / self.step_ms:>10.1f}"
            lines.append(f"{name:<60} {row['calls']:>8.1f} {row['cpu_ms']:>10.3f}{on_device}{share}")
        lines += ["", f"every call in its place: trace-rank-{self.rank}.json, for https://ui.perfetto.dev"]
        return "\n".join(lines) + "\n"


class StepProfiler(Callback):
    """Profiles `steps` steps after a few others, and writes what it saw into `folder`; see above."""

    def __init__(self, steps: int, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = steps, folder, rank
        self._seen, self._first_step, self._last_step, self._began = 0, 0, 0, 0.0
        self._profile: profile | None = None

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """Begin behind the last step of the warm-up, end behind the last one that was asked for."""
        self._seen += 1
        self._last_step = state.global_step
        if self._seen == WARM_UP_STEPS:
            self._begin(state)
        elif self._seen == WARM_UP_STEPS + self._steps:
            self._end(self._steps)

    def finish(self) -> None:
        """The run has no more steps: write what there is of the profile, or log that there is none."""
        if self._profile is not None:
            self._end(self._seen - WARM_UP_STEPS)
        if self._seen <= WARM_UP_STEPS and self._rank == 0:
            logger.warning(
                "--profile: there is none; %d steps were taken, and the first %d are warm-up", self._seen, WARM_UP_STEPS
            )

    def _begin(self, state: TrainingState) -> None:
        gpu = torch.cuda.is_available()
        self._first_step = state.global_step + 1
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu], acc_events=True)
        self._profile.start()
        self._began = time.perf_counter()

    def _end(self, steps: int) -> None:
        assert self._profile is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is under way belongs to these steps
        seconds = time.perf_counter() - self._began
        done, self._profile = self._profile, None
        if self._rank == 0 and steps:
            logger.info("writing the profile of %d steps into %s", steps, self._folder)  # which takes seconds
        done.stop()
        if steps:
            self._write(done, steps, seconds)

    def _write(self, done: profile, steps: int, seconds: float) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        summary = summarize(done, self._rank, (self._first_step, self._last_step), steps, seconds)
        done.export_chrome_trace(str(self._folder / f"trace-rank-{self._rank}.json"))
        (self._folder / f"rank-{self._rank}.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
        (self._folder / f"rank-{self._rank}.txt").write_text(summary.text())
        if self._rank == 0:
            logger.info("%s", summary.text())


def summarize(done: profile, rank: int, numbers: tuple[int, int], steps: int, seconds: float) -> Summary:
    """The figures of a finished profile of `steps` steps, which are the run's `numbers`, first and last."""
    events: Any = done.events()
    # Annotations, as FSDP2's of its phases, come back as work of the device, too, which they are not.
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    averages: Any = done.key_averages()
    operators = sorted(
        (
            row
            for row in averages
            if row.key != _DATA_WAIT and (row.device_type == DeviceType.CPU or not row.is_user_annotation)
        ),
        key=lambda row: (row.self_device_time_total, row.self_cpu_time_total),
        reverse=True,
    )
    collectives = _spans(on_device or events, _COMMUNICATION)
    return Summary(
        rank=rank,
        device=torch.cuda.get_device_name() if on_device else "cpu",
        first_step=numbers[0],
        last_step=numbers[1],
        step_ms=1e3 * seconds / steps,
        data_wait_share=_covered_us(_spans(events, (_DATA_WAIT,))) / (1e6 * seconds),
        communication_share=_covered_us(collectives) / (1e6 * seconds),
        host_waits={row.key: row.count / steps for row in operators if row.key in _HOST_WAITS},
        operators=[
            {
                "name": row.key,
                "calls": row.count / steps,
                "cpu_ms": row.self_cpu_time_total / 1e3 / steps,
                "device_ms": row.self_device_time_total / 1e3 / steps,
            }
            for row in operators[:_OPERATORS]
        ],
    )


def _spans(events: Iterable[Any], prefixes: tuple[str, ...]) -> list[tuple[float, float]]:
    """Begin and end in microseconds of the events whose names begin so."""
    return [(event.time_range.start, event.time_range.end) for event in events if event.name.startswith(prefixes)]


def _covered_us(spans: Sequence[tuple[float, float]]) -> float:
    """The time that lies in at least one of `spans`: nested ones, and those of several threads, count once."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
