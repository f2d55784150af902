"""docs/metrics.md names every metric that the code publishes."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_encdec.monitor.machine import Lap, MachineWatch, measure_rank_stats
from ds_encdec.monitor.metrics import eval_metrics, loss_metrics
from ds_encdec.registry.denoisers import DENOISERS

ROOT = Path(__file__).parents[2]
NAME = re.compile(
    r"(train|eval|perf|mem|health|ckpt|data)/[a-z][A-Za-z0-9_]*[A-Za-z0-9]"
)  # no beginning of an f-string


def source(*patterns: str) -> Iterator[ast.AST]:
    for pattern in patterns:
        for path in (ROOT / "ds_encdec").glob(pattern):
            yield from ast.walk(ast.parse(path.read_text()))


def published() -> set[str]:
    """Names that stand in the code as they are, and those made of a prefix and something else."""
    written = {node.value for node in source("**/*.py") if isinstance(node, ast.Constant)}
    rank = measure_rank_stats(torch.device("cpu"), Lap(1.0, 0.0, 0.0))
    rank = dataclasses.replace(rank, memory={**rank.memory, "device": 1, "reserved": 1})
    sums = dict.fromkeys(DENOISERS, 1.0)
    made = MachineWatch.metrics([rank, rank]) | loss_metrics("train", sums, sums) | eval_metrics(sums, sums)
    return {name for name in written if isinstance(name, str) and NAME.fullmatch(name)} | made.keys()


def test_every_metric_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`([^`]+)`", page))
    first = next(iter(DENOISERS))  # the page names one denoiser for all
    of_a_denoiser = re.compile(rf"_({'|'.join(DENOISERS)})$")
    found = {of_a_denoiser.sub(f"_{first}", name) for name in published()}
    assert len(found) > 30
    assert found <= named, f"docs/metrics.md lacks {', '.join(sorted(found - named))}"
