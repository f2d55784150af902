"""The tables and the drawing of docs/quality.md, from what the runs have left; what is not done yet is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from quality_arms import ARMS, SOURCE, UNTRAINED, Losses, mixture
from quality_runs import MIXTURES, TOTAL_ARMS, Results
from quality_text import TASKS

from ds_encdec.registry.denoisers import DENOISERS

RESAMPLES = 1000
KINDS = [*DENOISERS, "all"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def behind(some: Sequence[Losses], others: Sequence[Losses], kind: str = "all") -> str:
    """How far `some` are behind `others`, seed by seed: the mean, its standard error over the examples (a paired
    bootstrap), and the least and the most of the seeds."""
    of_kind = [kind in ("all", list(DENOISERS)[number]) for number in some[0]["kinds"]]
    examples, rng = np.flatnonzero(of_kind), np.random.default_rng(0)

    def gaps(chosen: np.ndarray) -> list[float]:
        return [mixture(one, chosen) - mixture(other, chosen) for one, other in zip(some, others, strict=True)]

    found = gaps(examples)
    error = np.std([np.mean(gaps(rng.choice(examples, len(examples)))) for _ in range(RESAMPLES)])
    seeds = f" ({min(found):+.3f} to {max(found):+.3f})" if len(found) > 1 else ""
    return f"{np.mean(found):+.3f} ± {error:.3f}{seeds}"


def tables(results: Results) -> Iterator[str]:
    """All tables, line by line."""
    yield from step0(results)
    for name in MIXTURES:
        marks = results.size.marks[name]
        yield from _learning(results, name, "S" if name == "S" else "all", marks)
        yield from _denoisers(results, name, marks)
    for task in TASKS:
        yield from _learning(results, task, "all", (0, *results.size.task_marks))
    yield from _rates(results)
    yield from _totals(results)


def step0(results: Results) -> Iterator[str]:
    """Yield the table of what each form loses before any training."""
    if done := results.result("step0"):
        source = [results.losses(f"step0 {SOURCE}", 0)]
        gaps = {name: behind([results.losses(f"step0 {name}", 0)], source) for name in UNTRAINED}
        rows = ([name, *_three(row), gaps.get(name, "")] for name, row in done["marks"].items())
        yield from table(["step 0", *KINDS, "behind the source"], rows)


def _three(row: dict[str, float]) -> list[str]:
    return [f"{row[kind]:.3f}" for kind in KINDS]


def _seeds(results: Results, kind: str) -> dict[str, list[dict]]:
    """The runs of each arm that has any, of the seeds that all of these have done."""
    runs = {arm: [results.result(f"{kind} {arm} {seed}") for seed in range(results.size.seeds)] for arm in ARMS}
    runs = {arm: rows for arm, rows in runs.items() if rows[0]}
    done = [all(rows) for rows in zip(*runs.values(), strict=True)]
    return {arm: [row for row, is_done in zip(rows, done, strict=True) if is_done] for arm, rows in runs.items()}


def _learning(results: Results, name: str, kind: str, marks: Sequence[int]) -> Iterator[str]:
    """Losses at each mark, the mean of the seeds, and how far each arm is behind `aligned` at the last one."""
    done, facts = _seeds(results, name), ["exact", "input hidden"] if name in TASKS else []

    def row(arm: str) -> Iterator[str]:
        runs = done[arm]
        yield from (arm, f"{runs[0]['rate']:g}")
        yield from (f"{np.mean([run['marks'][str(mark)][kind] for run in runs]):.3f}" for mark in marks)
        if facts:
            yield f"{np.mean([run['marks'][str(marks[-1])]['exact'] for run in runs]):.1%}"
            yield f"{np.mean([run['input hidden'] for run in runs]):.3f}"
        here, best = (
            [results.losses(f"{name} {one} {run['seed']}", marks[-1]) for run in runs] for one in (arm, "aligned")
        )
        yield behind(here, best, kind) if arm != "aligned" else ""

    head = [f"{name}, seeds: {len(done.get('aligned', ()))}", "rate", *(f"{mark:,}" for mark in marks)]
    if done:
        yield from table([*head, *facts, "behind aligned"], ([*row(arm)] for arm in done))


def _denoisers(results: Results, name: str, marks: Sequence[int]) -> Iterator[str]:
    if name != "S" and (done := _seeds(results, name)):
        at = {arm: [run["marks"][str(marks[-1])] for run in runs] for arm, runs in done.items()}
        rows = ([arm, *_three({k: np.mean([row[k] for row in at[arm]]) for k in KINDS})] for arm in at)
        yield from table([f"{name} at {marks[-1]:,}", *KINDS], rows)


def _rates(results: Results) -> Iterator[str]:
    rates = {arm: results.rates(arm) for arm in ARMS}
    if all(all(found.values()) for found in rates.values()):
        rows = ([arm, *(f"{rate:g}: {loss:.3f}" for rate, loss in found.items())] for arm, found in rates.items())
        yield from table([f"rates at {results.size.rate_tokens:,}", "low", "middle", "high"], rows)


def _totals(results: Results) -> Iterator[str]:
    """Losses of the arms from random weights at marks of all tokens, and how far they are behind `aligned` by then."""
    runs = {arm: results.result(f"total {arm}") or results.result(f"total {arm}.part") for arm in TOTAL_ARMS}
    done = {arm: run["marks"] for arm, run in runs.items() if run}
    if done:
        best = [results.losses("ul2 aligned 0", max(results.size.marks["ul2"]))]
        cells = (
            [arm, f"{int(mark):,}", *_three(row), behind([results.losses(f"total {arm}", mark)], best)]
            for arm, marks in done.items()
            for mark, row in marks.items()
        )
        yield from table(["total", "tokens", *KINDS, "behind aligned"], cells)


def draw(results: Results, path: Path) -> None:
    """Draw the learning curves of the arms, in UL2 of those from the source alone: the others are far above."""
    figure = Figure((8, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("ul2", "lookup"), strict=True):
        for arm, runs in _seeds(results, name).items():
            if name == "ul2" and ARMS[arm].is_random:
                continue
            marks = [int(mark) for mark in runs[0]["marks"]]
            curves = np.array([[run["marks"][str(mark)]["all"] for mark in marks] for run in runs])
            if name == "ul2":
                start = results.result("step0")["marks"][arm]["all"]
                marks, curves = [0, *marks], np.insert(curves, 0, start, axis=1)
            (line,) = axes.plot(marks, curves.mean(axis=0), marker="o", markersize=3, label=arm)
            axes.fill_between(marks, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.2)
        axes.set(xlabel=f"tokens of {name}", ylabel="nats a target token")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "quality"}):
        figure.savefig(path, metadata={"Date": None})
