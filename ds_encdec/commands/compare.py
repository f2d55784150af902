"""Compares what two runs have written: where their tokens, losses, gradient norms and rates part, to the last digit."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ds_encdec.base.quantities import count, listed
from ds_encdec.base.terminal import print_text
from ds_encdec.base.types import GateError
from ds_encdec.config.schema import Mark, marked
from ds_encdec.config.settings import Problem
from ds_encdec.config.yaml.text import read_yaml
from ds_encdec.launch.agreement import differences, flat, ranks_in_words
from ds_encdec.monitor.metrics_file import read_step_lines
from ds_encdec.monitor.token_digests import StepDigest, read_digests
from ds_encdec.report.read_run import read_json, require_run

_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate")
# The beginnings of fields that may decide what is trained on, or how.
_DECIDING = ("model.", "data.", "training.", "monitor.", "infra.distributed_type", "infra.sharding", "infra.offload")


class _Run(NamedTuple):
    name: str
    tokens: Mapping[int, StepDigest]  # by data step
    metrics: Mapping[int, Mapping[str, Any]]  # by step
    settings: Mapping[str, str]
    hosts: Mapping[int, str]  # by rank, of the last start

    def servers(self, lanes: list[int], step: StepDigest) -> str:
        """Return in words the ranks that served these lanes."""
        hosts = self.hosts if len(self.hosts) == step.ranks else {}
        return f"{ranks_in_words({lane % step.ranks for lane in lanes}, hosts)} in {self.name}"


def compared(*paths: Path) -> Iterator[str]:
    """Yield sentences about two runs. Raises GateError behind the last one if their tokens or metrics differ (settings
    alone are no difference), and ConfigError for a folder that is no run's. Unreadable content is a warning."""
    one, other = runs = [_read(path) for path in paths]
    unset = {name for name in marked(Mark.FORM) for run in runs if run.settings.get(name) == "null"}  # until a resume
    settings = {run.name: {name: run.settings[name] for name in sorted(run.settings.keys() - unset)} for run in runs}
    if lines := differences(settings, {}, whose=lambda names, _: " and ".join(names)):
        yield f"Settings that differ:{listed(lines, 20)}"
    found = [*_partings(one, other), *_alone(one, other), *_alone(other, one)]
    yield from found
    steps, intervals = one.tokens.keys() & other.tokens, one.metrics.keys() & other.metrics
    if found or not (steps or intervals):
        raise GateError("the runs are not equal" if found else "the runs have written nothing that could be compared")
    yield f"Equal: the tokens of {count(steps, 'data step')}, and {count(intervals, 'line')} of metrics."


def _partings(one: _Run, other: _Run) -> Iterator[str]:
    steps = sorted(one.tokens.keys() & other.tokens)
    if step := next((step for step in steps if one.tokens[step].digest != other.tokens[step].digest), None):
        ours, theirs = one.tokens[step], other.tokens[step]
        where, as_many = "", len(ours.lanes) == len(theirs.lanes) and ours.ranks and theirs.ranks
        if as_many and (ours.first, ours.last) == (theirs.first, theirs.last):
            lanes = [lane for lane, pair in enumerate(zip(ours.lanes, theirs.lanes, strict=True)) if len({*pair}) > 1]
            served = f"{one.servers(lanes, ours)}, {other.servers(lanes, theirs)}"
            where = f", in lane{'s' * (len(lanes) > 1)} {', '.join(map(str, lanes))} ({served})" if lanes else ""
        yield f"Data step {step} is the first with other tokens{where}."
    for step in sorted(one.metrics.keys() & other.metrics):
        values = [(name, one.metrics[step].get(name), other.metrics[step].get(name)) for name in _METRICS]
        if apart := [f"{name} is {a} in {one.name}, {b} in {other.name}" for name, a, b in values if a != b]:
            yield f"Step {step} is the first with other metrics: {'; '.join(apart)}."
            break


def _alone(one: _Run, other: _Run) -> Iterator[str]:
    for what, ours, theirs in (("tokens", one.tokens, other.tokens), ("metrics", one.metrics, other.metrics)):
        if alone := sorted(ours.keys() - theirs.keys()):
            yield f"Only {one.name} has the {what} of {count(alone, 'step')}, from {alone[0]} to {alone[-1]}."


def _read(path: Path) -> _Run:
    folder = require_run(path)
    notes: list[str] = []
    problems: list[Problem] = []
    (entries, *more), (lines, *others) = read_step_lines(folder.events), read_step_lines(folder.metrics)
    tokens, values = read_digests(entries), flat(read_yaml(folder.config_yaml, problems).values)
    hosts: dict[int, str] = {}
    with suppress(KeyError, AttributeError, TypeError, ValueError):
        for host, spans in (read_json(folder.run_json, notes) or {})["hosts"].items():  # {"node0": "0-7, 12"}
            for first, _, last in (span.partition("-") for span in spans.split(", ")):
                hosts |= dict.fromkeys(range(int(first), int(last or first) + 1), host)
    for note in filter(None, (*notes, *more[:1], *others[:1], *(problem.message for problem in problems))):
        print_text(f"warning: {path}: {note}", file=sys.stderr)
    ignored = set(marked(Mark.UNTRAINED))
    settings = {name: value for name, value in values.items() if name.startswith(_DECIDING) and name not in ignored}
    if tokens:
        newest = tokens[max(tokens)]
        settings |= {"ranks": str(newest.ranks), "lanes": str(len(newest.lanes))}
    return _Run(str(path), tokens, {int(one["step"]): one for one in lines if "train/loss" in one}, settings, hosts)
