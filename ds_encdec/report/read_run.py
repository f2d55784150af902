"""Read a run's folder: metrics, events, configuration, checkpoints. It writes nothing and does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ds_encdec.base.types import CheckpointError, ConfigError, DataError
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import read_manifest, verify_listing
from ds_encdec.config.settings import Problem, Settings
from ds_encdec.config.yaml import plain_files
from ds_encdec.config.yaml.text import read_yaml
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.monitor.metrics_file import is_number, read_step_lines

# A line of `ledger.jsonl` (monitor/metrics_file.py) or a JSON file, whose content is not trusted.
Entry = Mapping[str, Any]

SMOOTHED_PART = 40  # divisor of the number of points: a smoothed value is the mean of at most that many of them
# Fewest points of a curve that is smoothed: with fewer, a mean of three would be more than that part.
SMOOTHED_FROM = 3 * SMOOTHED_PART


@dataclass(frozen=True)
class Curve:
    """Values of one metric: `steps` float64 [n], `values` float64 [n] with NaN for `null` in the log."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def known(self) -> np.ndarray:
        """Return the finite values in order."""
        return self.values[np.isfinite(self.values)]

    def at(self, steps: np.ndarray, beyond: float | None = None) -> np.ndarray:
        """Return the values at `steps` (float64 [n]), interpolated between finite ones; NaN for a curve without any.
        `beyond` is the value before the first and after the last finite one; None repeats those."""
        finite = np.isfinite(self.values)
        if not finite.any():
            return np.full(len(steps), np.nan)
        return np.interp(steps, self.steps[finite], self.values[finite], left=beyond, right=beyond)

    def smoothed(self) -> Curve:
        """Return the mean of a fortieth of the points around each, fewer towards both ends, so that nothing lags. Below
        `SMOOTHED_FROM` points the curve stays as it is. Values that are not finite leave a gap."""
        finite = np.isfinite(self.values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, self.values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(finite)])
        index = np.arange(len(self))
        reach = np.minimum(np.minimum(index, index[::-1]), max(len(self) // SMOOTHED_PART - 1, 0) // 2)
        first, last = index - reach, index + reach + 1
        means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
        return Curve(self.steps, np.where(finite, means, np.nan))


NO_CURVE = Curve(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Run:
    """The content of the folder `path`. `curves` are by metric, `abandoned` by number of the rollback, then by metric.
    `config` is nested, as in `config.yaml`, not validated. `data` has the facts of tokenizer and sources in the newest
    checkpoint. `checkpoints`, by rising `step`, have a `manifest` (None if unreadable), the `pointers` to them (latest,
    best, final), and the `damage` of their listing. `samples` are the texts of the last evaluation that generated any.
    `verdict` is the phase's, if the run is one. `notes` are sentences about unreadable content."""

    path: Path
    status: Entry
    curves: Mapping[str, Curve]
    abandoned: Mapping[int, Mapping[str, Curve]]
    events: Sequence[Entry]
    config: Mapping[str, Any]
    data: Entry
    checkpoints: Sequence[Entry]
    samples: Sequence[Entry]
    verdict: Entry | None
    notes: Sequence[str]

    def curve(self, metric: str) -> Curve:
        """Return the metric's curve, empty if it was never logged."""
        return self.curves.get(metric, NO_CURVE)

    def entries(self, kind: str) -> list[Entry]:
        """Return the events of one kind."""
        return [entry for entry in self.events if entry["kind"] == kind]

    @property
    def steps(self) -> int:
        """Return the last step at which metrics were logged."""
        return int(max(curve.steps[-1] for curve in self.curves.values()))

    @property
    def skipped_steps(self) -> int:
        """Return the steps without an update, those of abandoned branches too."""
        branches = [self.curves, *self.abandoned.values()]
        return int(sum(branch.get("train/skipped_steps", NO_CURVE).known.sum() for branch in branches))

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the configuration's value at a dotted path."""
        return Settings(dict(self.config)).get(path, default)


def require_run(path: Path) -> RunFolder:
    """Return the paths of the run in the folder `path`. Raises ConfigError if it is not a run's folder."""
    folder = RunFolder(str(path))
    if not folder.root.is_dir():
        raise ConfigError(f"{path}: no such folder; give the infra.output_dir of a run.")
    if not any(part.exists() for part in (folder.metrics, folder.run_json, folder.config_yaml)):
        raise ConfigError(
            f"{path} is not the folder of a run: it has none of metrics.jsonl, run.json and config.yaml. "
            "Give the infra.output_dir of a run."
        )
    return folder


def read_run(path: Path) -> Run:
    """Read the run in the folder `path`. Raises ConfigError if it is not a run's folder, and DataError without metrics.
    Other unreadable content becomes a note."""
    folder = require_run(path)
    root = folder.root.resolve()
    notes: list[str] = []
    problems: list[Problem] = []  # of the configuration
    status = read_json(folder.run_json, notes) or {}
    curves = _curves(_read_lines(folder.metrics, notes))
    if not curves:
        state = f"its state is {status['state']}" if "state" in status else "it has no run.json"
        reason = f" ({status['reason']})" if status.get("reason") else ""
        raise DataError(
            f"{folder.metrics}: no line of metrics, so there is nothing to draw; {state}{reason}. "
            "The first line is written after training.logging_steps steps."
        )
    gaps = {name: len(curve) - len(curve.known) for name, curve in curves.items()}
    if named := ", ".join(sorted(name for name, count in gaps.items() if count)):
        notes.append(f"{sum(gaps.values()):,} values are not finite and are gaps in the curves: {named}.")
    branches: dict[int, list[Entry]] = defaultdict(list)
    for line in _read_lines(folder.abandoned_metrics, notes):
        branches[int(line["rollback"]) if is_number(line.get("rollback")) else 0].append(line)
    events = _read_events(folder.events, notes)
    config = read_yaml(folder.config_yaml, problems).values
    notes.extend(f"config.yaml: {problem.message}." for problem in problems)
    samples = _read_lines(folder.samples, notes)
    saved = committed_steps(folder.checkpoints)
    facts = _facts(saved[max(saved)], "data.fingerprint") if saved else {}
    return Run(
        path=root,
        status=status,
        curves=curves,
        abandoned={number: _curves(lines) for number, lines in sorted(branches.items())},
        events=events,
        config=config,
        data=facts,
        checkpoints=_read_checkpoints(folder.checkpoints),
        samples=[line for line in samples if line["step"] == samples[-1]["step"]],
        verdict=read_json(root / "result.json", notes),
        notes=notes,
    )


def read_json(path: Path, notes: list[str]) -> Entry | None:
    """Return the JSON object in the file, or None, with a note unless the file is missing."""
    try:
        return plain_files.read_json(path, None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return None


def _facts(checkpoint: Path, path: str) -> dict[str, Any]:
    found = Settings(dict(read_json(checkpoint / "trainer.json", []) or {})).get(path)
    return found if isinstance(found, dict) else {}


def back_to(rollback: Entry) -> float:
    """Return the step that a rollback went back to."""
    target = rollback.get("to_step")
    return float(target) if is_number(target) else float(rollback["step"])


def read_time(written: object) -> datetime | None:
    """Return a time of run.json or the events; None for anything else."""
    try:
        return datetime.strptime(str(written), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines, problem, is_torn = read_step_lines(path)
    torn = f"{path.name}: the last line is not complete and is left out" if is_torn else ""
    notes.extend(f"{note}." for note in (problem, torn) if note)
    return lines


def _curves(lines: Sequence[Entry]) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step, name, value in ((line["step"], *item) for line in lines for item in line.items()):
        if "/" in name and isinstance(value, int | float | None):
            points[name].append((step, value if is_number(value) else np.nan))
    return {name: Curve(*np.array(found, dtype=np.float64).T) for name, found in points.items()}


def _read_events(path: Path, notes: list[str]) -> list[Entry]:
    # Of an event that a resume met again, at the same data step, the last one counts.
    lines = _read_lines(path, notes)
    entries = [line for line in lines if isinstance(line.get("kind"), str) and line["kind"] != "tokens"]
    starts = list(accumulate(entry["kind"] == "start" for entry in entries))
    events = [(one["kind"], str(one.get("type")), str(one.get("data_step"))) for one in entries]
    last_start = dict(zip(events, starts, strict=True))
    known = zip(entries, starts, events, strict=True)
    return [entry for entry, start, event in known if entry["kind"] == "start" or start == last_start[event]]


def _read_checkpoints(folder: Path) -> list[Entry]:
    pointed = {name: (folder / name).resolve() for name in ("latest", "best", "final") if (folder / name).exists()}
    found: list[Entry] = []
    for step, path in sorted(committed_steps(folder).items()):
        manifest, damage = None, ""
        try:
            manifest = read_manifest(path)
            verify_listing(path, manifest)
        except CheckpointError as error:
            damage = str(error)
        pointers = [name for name, target in pointed.items() if target == path.resolve()]
        facts = _facts(path, "saved")
        found.append({"step": step, "manifest": manifest, "pointers": pointers, "facts": facts, "damage": damage})
    return found
