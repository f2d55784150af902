"""Windows, step sums and the metrics made of them, against sums written out by hand."""

import ast
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch

from ds_encdec.base.types import LossSum, StepResult
from ds_encdec.engine.sharded_engine import HOST_STATES
from ds_encdec.monitor import metrics
from ds_encdec.monitor.machine import Lap, MachineWatch, measure_rank_stats
from ds_encdec.monitor.metrics import (
    MetricWindow,
    StepAccumulator,
    StepRecord,
    eval_metrics,
    loss_metrics,
    train_metrics,
)
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.objectives import COLUMNS


def loss_sum(*by_denoiser: float, tokens: tuple[float, ...] = (10, 0, 0, 0, 30)) -> LossSum:
    losses, counts = (torch.tensor([*values, *[0.0] * (len(COLUMNS) - 5)]) for values in (by_denoiser, tokens))
    return LossSum(losses.sum(), losses, counts)


def step_result(norm: float = 1.0, *, applied: bool = True, learning_rate: float = 1e-3) -> StepResult:
    return StepResult(applied, torch.tensor(norm), learning_rate)


def named(*values: float) -> dict[str, float]:
    return dict.fromkeys(COLUMNS, 0.0) | dict(zip(COLUMNS, values, strict=False))


def record(**changes: object) -> StepRecord:
    values: dict[str, object] = {
        "global_step": 1,
        "data_step": 1,
        "applied": True,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "sums": named(20.0, 0.0, 0.0, 0.0, 90.0),
        "counts": named(10, 0, 0, 0, 30),
        "tokens": 65,
    }
    return StepRecord(**(values | changes))  # type: ignore[arg-type]


def test_window_keeps_only_the_last_values() -> None:
    window = MetricWindow(3)
    assert (window.mean, window.std, window.min, window.max) == (0.0, 0.0, math.inf, -math.inf)
    for value in (100.0, 1.0, 2.0, 4.0):
        window.add(value)
    assert list(window.values) == [1.0, 2.0, 4.0]
    assert window.mean == pytest.approx(7 / 3, rel=1e-15)
    assert window.std == pytest.approx(statistics.pstdev([1.0, 2.0, 4.0]), rel=1e-15)
    assert (window.min, window.max, len(window)) == (1.0, 4.0, 3)
    window.add(math.inf)
    assert math.isnan(window.std)


def test_step_loss_is_sum_over_tokens_not_mean_of_means() -> None:
    accumulator = StepAccumulator(torch.device("cpu"))
    accumulator.add(loss_sum(20, 0, 0, 0, 90), tokens=47)
    accumulator.add(loss_sum(0, 0, 0, 0, 5, tokens=(0, 0, 0, 0, 1)), tokens=6)
    accumulator.end_step(step_result(2.5), global_step=4, data_step=6)
    (step,) = accumulator.take()
    assert step.sums == named(20, 0, 0, 0, 95)
    assert step.counts == named(10, 0, 0, 0, 31)
    assert step.loss == 115 / 41
    assert (step.tokens, step.grad_norm) == (53, 2.5)
    assert (step.global_step, step.data_step, step.applied) == (4, 6, True)


def test_sums_do_not_lose_small_losses_beside_large_ones() -> None:
    accumulator, losses = StepAccumulator(torch.device("cpu")), torch.ones(len(COLUMNS), requires_grad=True) * 2.0**24
    accumulator.add(LossSum(losses.sum(), losses, torch.ones(len(COLUMNS))), tokens=1)
    with torch.no_grad():
        losses.zero_()
    for _ in range(3):
        accumulator.add(loss_sum(0, 0, 0, 0, 1.0), tokens=0)
    accumulator.end_step(step_result(), global_step=1, data_step=1)
    assert accumulator.take()[0].sums == dict.fromkeys(COLUMNS, 2.0**24) | {"S": 2.0**24 + 3}


def test_interval_interrupted_by_a_checkpoint_gives_the_same_floats() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(5, generator=generator) * 1000 / 3 for _ in range(6)]

    def run(accumulator: StepAccumulator, first: int, last: int) -> None:
        for index in range(first, last):
            accumulator.add(loss_sum(*steps[index].tolist()), tokens=index)
            norm = math.inf if index == 1 else 0.1 * index
            accumulator.end_step(step_result(norm, applied=index != 1), global_step=index, data_step=index)

    uninterrupted = StepAccumulator(torch.device("cpu"))
    run(uninterrupted, 0, 6)
    before = StepAccumulator(torch.device("cpu"))
    run(before, 0, 4)
    checkpoint = json.dumps(before.state_dict(), allow_nan=False)
    resumed = StepAccumulator(torch.device("cpu"))
    resumed.load_state_dict(json.loads(checkpoint))
    run(resumed, 4, 6)
    expected = uninterrupted.take()
    assert resumed.take() == expected
    run(before, 4, 6)  # the run that saved goes on unchanged as well
    assert before.take() == expected
    assert before.take() == []


def test_train_metrics_of_an_interval() -> None:
    second = record(
        sums=named(0, 4, 0, 0, 0), counts=named(0, 4, 0, 0, 0), learning_rate=2e-3, grad_norm=3.0,
        extra={"train/clipped": 0.5, "train/rare": 4.0},
    )  # fmt: skip
    skipped = record(applied=False, sums=named(*[math.nan] * 5), grad_norm=math.nan, extra={"train/clipped": math.nan})
    expected = {
        "train/loss": 114 / 44,
        "train/loss_R1": 2.0,
        "train/loss_R2": 1.0,
        "train/loss_S": 3.0,
        "train/learning_rate": 2e-3,
        "train/grad_norm": 3.0,
        "train/skipped_steps": 1,
        "train/clipped": 0.25,
        "train/rare": 4.0,
    }
    assert train_metrics([skipped, record(extra={"train/clipped": 0.0}), second]) == expected
    assert math.isnan(train_metrics([second, skipped])["train/grad_norm"])
    assert math.isnan(train_metrics([skipped])["train/loss"])


def test_eval_metrics_have_perplexities_per_denoiser() -> None:
    metrics = eval_metrics(named(2.0, 0, 0, 0, 30.0), named(2, 0, 0, 0, 10))
    assert metrics["eval/loss"] == 32 / 12
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(32 / 12), rel=1e-15)
    assert metrics["eval/perplexity_S"] == pytest.approx(math.exp(3), rel=1e-15)
    assert metrics["eval/loss_R1"] == 1.0
    assert "eval/loss_X1" not in metrics
    assert eval_metrics(named(1e4, 0, 0, 0, 0), named(1, 0, 0, 0, 0))["eval/perplexity"] == math.inf
    assert math.isnan(loss_metrics("eval", named(*[0.0] * 5), named(*[0] * 5))["eval/loss"])  # and never zero


def test_a_step_is_the_sum_over_the_ranks_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[torch.Tensor] = []

    def take(rank: int) -> list[StepRecord]:
        accumulator = StepAccumulator(torch.device("cpu"))
        for step, extra in ((1, {}), (2, {"train/extra": torch.tensor(1.0 + rank)})):
            tokens = (0, 0, 0, 0, 0) if (rank, step) == (1, 2) else (1, 0, 0, 0, 2)
            accumulator.add(loss_sum(rank / 3, 0, 0, 0, step, tokens=tokens), tokens=10 * rank + step)
            result = StepResult(True, torch.tensor(float(step)), 0.1, extra)
            accumulator.end_step(result, global_step=step, data_step=step)
        return accumulator.take()

    monkeypatch.setattr(metrics, "_gather", lambda row: [*rows, row])
    alone = take(rank=0)
    monkeypatch.setattr(metrics, "_gather", lambda row: rows.append(row) or [row])
    take(rank=0)
    monkeypatch.setattr(metrics, "_gather", lambda row: [*rows, row])
    first, second = take(rank=1)
    assert alone[0].tokens == 1
    assert (first.tokens, second.tokens) == (12, 14)
    assert first.counts == named(2, 0, 0, 0, 4)
    assert second.counts == named(1, 0, 0, 0, 2)
    assert first.sums == pytest.approx(named(1 / 3, 0, 0, 0, 2), rel=1e-7)
    assert (first.grad_norm, second.grad_norm) == (1.0, 2.0)
    assert (first.extra, second.extra) == ({}, {"train/extra": 1.5})


ROOT = Path(__file__).parents[2]
NAME = re.compile(
    r"(train|eval|perf|mem|health|ckpt|data)/[a-z][A-Za-z0-9_]*[A-Za-z0-9]"
)  # no beginning of an f-string


def published() -> set[str]:
    """Names that stand in the code as they are, and those made of a prefix and something else."""
    nodes = [node for path in (ROOT / "ds_encdec").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    written = {node.value for node in nodes if isinstance(node, ast.Constant)}
    methods = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "_held"]
    tables = (table for method in methods for table in ast.walk(method) if isinstance(table, ast.Dict))
    held = {ast.literal_eval(key) for table in tables for key in table.keys if key} | {HOST_STATES}
    rank = measure_rank_stats(torch.device("cpu"), Lap(1.0, 0.0, 0.0), dict.fromkeys(held | {"device", "reserved"}, 1))
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
