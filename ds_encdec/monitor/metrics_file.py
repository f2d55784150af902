"""Write, cut and read back a run's metrics.jsonl and ledger.jsonl, one strict JSON object a line. The ledger has the
events of the run in the order of time, and is never cut (docs/recovery.md has the fields). Lines that are read may come
from other programs, and are checked."""

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from ds_encdec.base.types import DataError
from ds_encdec.config.schema import MonitorConfig
from ds_encdec.launch.disk import flush_folder, write_atomically
from ds_encdec.launch.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Alerts that the loop finds in the run's state, and the alert whose answer each has.
STATE_ALERTS = {
    "non_finite_state": "non_finite",
    "non_finite_evaluation": "non_finite",
    "replicas_differ": "replicas_differ",
}
# Those of them that no checkpoint can have: a rollback takes the newest, at whatever age.
JUDGED_AT_SAVES = ("non_finite_state", "replicas_differ")
# Alerts about the machines of the run: raised by `MachineWatch`.
MACHINE_ALERTS = ("throughput_drop", "straggler", "memory_growth", "data_wait")
# Logging intervals in a row with the same fault (but for memory) that make an alert: one is noise.
PERSISTENT_INTERVALS = 3

Kind = Literal["start", "tokens", "alert", "rollback", "no_rollback", "early_stop", "stop"]


class StepLines(NamedTuple):
    """The JSON objects of a file of lines that have a finite `step`. `problem`: words about unreadable lines, without a
    full stop. `is_torn`: the last line is not whole, as after a kill."""

    lines: list[dict[str, Any]]
    problem: str
    is_torn: bool


def strict_json(value: Any) -> Any:
    """Return `value` for strict JSON, which has no NaN and no infinity: those become strings that `float` reads."""
    if isinstance(value, Mapping):
        return {name: strict_json(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [strict_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line to the file in one write, so that a killed process leaves at most its last line torn. A disk that
    refuses costs an error in the log, never the run, and leaves no torn line behind."""
    text = json.dumps(values, allow_nan=False).encode() + b"\n"
    try:
        if not path.exists():
            logger.warning("%s was deleted, and begins again: the lines before are lost", path)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(text) != len(text):
                file.truncate(size)
                raise OSError("the disk took only a part of the line")
    except OSError as error:
        logger.error("%s: a line could not be written: %s", path, error)


def cut_after(path: Path, step: int, *, aside: Path | None = None, **mark: int) -> None:
    """Keep the whole lines up to `step` (none at all for 0), by an atomic replacement of the file. Raises OSError. The
    later ones are appended to the file `aside` first, if given, each with `mark`. Unreadable lines are cut out."""
    content = _step_lines(path.name, path.read_bytes())
    kept = [line for line in content.lines if 0 < step >= line["step"]]
    if aside is not None:
        with aside.open("a") as file:
            file.writelines(json.dumps(line | mark) + "\n" for line in content.lines if not 0 < step >= line["step"])
        flush_folder(aside)
    if content.problem:
        logger.warning("%s", content.problem)
    if content.problem or content.is_torn or len(kept) < len(content.lines):
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_step_lines(path: Path) -> StepLines:
    """Read the file at `path`; a missing one has no lines."""
    try:
        return _step_lines(path.name, path.read_bytes())
    except FileNotFoundError:
        return StepLines([], "", False)
    except OSError as error:
        return StepLines([], f"{path.name} cannot be read: {error.strerror}", False)


def _step_lines(name: str, content: bytes) -> StepLines:
    *whole, last = content.split(b"\n")
    lines: list[dict[str, Any]] = []
    for text in whole:
        with suppress(ValueError):
            line = json.loads(text)
            lines += [line] if isinstance(line, dict) and is_number(line.get("step")) else []
    unreadable = len(whole) - len(lines)
    problem = f"{name}: {unreadable:,} lines cannot be read and are left out" if unreadable else ""
    return StepLines(lines, problem, bool(last.strip()))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number. JSON has null for others, but some writers put NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def measured_tokens_per_second(run: Path) -> float:
    """Return the median throughput of the run in the folder `run`, over all ranks. Raises DataError."""
    metrics = RunFolder(str(run)).metrics
    if not metrics.exists():
        raise DataError(f"{run} has no {metrics.name}: it is not the folder of a run, or the run has logged nothing")
    lines, problem, _ = read_step_lines(metrics)
    rates = [rate for line in lines if is_number(rate := line.get("perf/tokens_per_sec")) and rate > 0]
    if not rates:
        raise DataError(
            f"{metrics}: {problem or 'no line has perf/tokens_per_sec'}; measure a longer run, or give "
            "--tokens-per-second"
        )
    return statistics.median(rates)


def make_alert(kind: str, step: int, value: float, threshold: float, message: str) -> dict[str, Any]:
    """Return an alert as plain data. `value` is the figure seen and `threshold` its limit, in the same unit."""
    return {"type": kind, "step": step, "value": value, "threshold": threshold, "message": f"step {step}: {message}"}


def answer_field(alert_type: str) -> str:
    """Return the name of the field of `MonitorConfig` that has the answer to an alert."""
    return f"on_{STATE_ALERTS.get(alert_type, alert_type)}"


def answer(alert_type: str, settings: MonitorConfig) -> str:
    """Return the configured action: `warn`, `skip_step`, `rollback` or `stop`."""
    return str(getattr(settings, answer_field(alert_type)))


class EventLog:
    """Appends to the file, without its unreadable lines; does nothing if `path` is None, as on all ranks but 0."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.touch()
            cut_after(path, sys.maxsize)

    def write(self, kind: Kind, *, step: int, data_step: int, **facts: Any) -> None:
        """Append an entry."""
        if self._path is not None:
            entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, "step": step, "data_step": data_step}
            append_line(self._path, entry | strict_json(facts))
