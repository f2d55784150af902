"""metrics.jsonl and ledger.jsonl of a run, read back: what others wrote, believed as little as possible."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.types import DataError

SETTLING_LINES = 1
"""First lines of metrics whose throughput is not a run's usual one: compilation, caches, workers that start."""


class StepLines(NamedTuple):
    """The JSON objects of a file of lines that have a finite `step`.

    `problem`: what else is in the file, in words without a full stop; empty where nothing is. `is_torn`: its last line
    is not whole, as while a run is writing it or after a kill.
    """

    lines: list[dict[str, Any]]
    problem: str
    is_torn: bool


def read_step_lines(path: Path) -> StepLines:
    """The file at `path`; a missing one has no lines."""
    try:
        *whole, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return StepLines([], "", False)
    except OSError as error:
        return StepLines([], f"{path.name} cannot be read: {error.strerror}", False)
    lines = [line for text in whole if (line := _parse(text)) is not None]
    unreadable = len(whole) - len(lines)
    problem = f"{path.name}: {unreadable:,} lines cannot be read and are left out" if unreadable else ""
    return StepLines(lines, problem, bool(last.strip()))


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and is_number(line.get("step")) else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number. JSON has no NaN: what was not finite is null, but some writers put NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def measured_tokens_per_second(run: Path) -> float:
    """Throughput of the run in the folder `run`, over all ranks, without its first lines. Raises DataError.

    Every line stands for about as many tokens, so the mean over the time is the harmonic one.
    """
    metrics = RunFolder(str(run)).metrics
    if not metrics.exists():
        raise DataError(f"{run} has no {metrics.name}: it is not the folder of a run, or the run has logged nothing")
    lines, problem, _ = read_step_lines(metrics)
    rates = [rate for line in lines if is_number(rate := line.get("perf/tokens_per_sec")) and rate > 0]
    if len(rates) <= SETTLING_LINES:
        raise DataError(
            f"{metrics}: {problem or f'{len(rates)} lines have perf/tokens_per_sec, and the first does not count'}; "
            "measure a longer run, or give --tokens-per-second"
        )
    return statistics.harmonic_mean(rates[SETTLING_LINES:])
