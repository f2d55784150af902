"""Compares what two runs have written: where their tokens, losses, gradient norms and rates part, to the last digit."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_encdec.base.quantities import count
from ds_encdec.base.terminal import print_text
from ds_encdec.base.types import GateError
from ds_encdec.monitor.metrics_file import read_step_lines
from ds_encdec.monitor.token_digests import StepDigest, read_digests
from ds_encdec.report.read_run import require_run

_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate")
_NO_TOKENS = " No tokens were compared: neither ledger has digests that this version reads."


def compared(one: Path, other: Path) -> Iterator[str]:
    """Yield sentences about two runs. Raises GateError behind the last one if their tokens or metrics differ, and
    ConfigError for a folder that is no run's. Unreadable lines are a warning."""
    (tokens, metrics), (other_tokens, other_metrics) = _read(one), _read(other)
    steps, intervals = sorted(tokens.keys() & other_tokens), sorted(metrics.keys() & other_metrics)
    found = []
    if step := next((step for step in steps if tokens[step][:2] != other_tokens[step][:2]), None):
        found.append(f"Data step {step} is the first with other tokens.")
        here, there = tokens[step], other_tokens[step]
        if (lane := here.other_lane(there)) is not None:
            where = f"rank {lane % here.ranks} in {one}, rank {lane % there.ranks} in {other}"
            found = [f"Data step {step} is the first with other tokens, in lane {lane} alone ({where})."]
    for step in intervals:
        values = [(name, metrics[step].get(name), other_metrics[step].get(name)) for name in _METRICS]
        if apart := [f"{name} is {ours} in {one}, {its} in {other}" for name, ours, its in values if ours != its]:
            found.append(f"Step {step} is the first with other metrics: {'; '.join(apart)}.")
            break
    for what, ours, its in (("tokens", tokens, other_tokens), ("metrics", metrics, other_metrics)):
        for run, alone in ((one, sorted(ours.keys() - its)), (other, sorted(its.keys() - ours))):
            if alone:
                found.append(f"Only {run} has the {what} of {count(alone, 'step')}, from {alone[0]} to {alone[-1]}.")
    yield from found
    if found or not (steps or intervals):
        raise GateError("the runs are not equal" if found else "the runs have written nothing that could be compared")
    of_tokens = f"the tokens of {count(steps, 'data step')}, and " if steps else ""
    yield f"Equal: {of_tokens}{count(intervals, 'line')} of metrics.{'' if steps else _NO_TOKENS}"


def _read(path: Path) -> tuple[dict[int, StepDigest], dict[int, dict[str, Any]]]:
    folder = require_run(path)
    (entries, problem, _), (lines, other_problem, _) = map(read_step_lines, (folder.events, folder.metrics))
    for note in filter(None, (problem, other_problem)):
        print_text(f"warning: {path}: {note}", file=sys.stderr)
    return read_digests(entries), {int(line["step"]): line for line in lines if "train/loss" in line}
