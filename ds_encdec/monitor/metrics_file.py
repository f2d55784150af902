"""metrics.jsonl and ledger.jsonl of a run, read back: what others wrote, believed as little as possible."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard


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
