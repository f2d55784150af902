"""metrics.jsonl of a run, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_encdec.types import ConfigError

SETTLING_LINES = 1
"""First lines of metrics whose throughput is not a run's usual one: compilation, caches, workers that start."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of the file at `path`; a value is a float, or None where it was not finite.

    A last line that a kill has torn is left out. Raises ConfigError where there is no line, or one is not JSON.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        raise ConfigError(f"{path}: has no line of metrics")
    return [_parse(line, path, number) for number, line in enumerate(lines, start=1)]


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
        if isinstance(values["step"], int):
            return values
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path}:{number}: not a line of metrics, which is a JSON object with a `step`")


def measured_tokens_per_second(run: Path) -> float:
    """Mean throughput of the run in the folder `run`, over all ranks, without its first lines. Raises ConfigError."""
    path = run / "metrics.jsonl"
    rates = [rate for line in read_metrics(path) if (rate := line.get("perf/tokens_per_sec"))]
    settled = rates[SETTLING_LINES:]
    if not settled:
        raise ConfigError(
            f"{path}: {len(rates)} lines have perf/tokens_per_sec, and the first one does not count; measure a longer "
            "run, or give --tokens-per-second"
        )
    return sum(settled) / len(settled)
