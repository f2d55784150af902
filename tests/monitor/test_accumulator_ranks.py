"""Step sums over real ranks."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ds_encdec.monitor.metrics import StepAccumulator
from ds_encdec.monitor.metrics_file import strict_json
from ds_encdec.types import TASKS, LossSum, StepResult

RANKS, STEPS, MICRO_BATCHES = 2, 5, 3


def sums_of(rank: int, step: int, micro_batch: int) -> list[float]:
    """Losses (thirds, so that rounding shows) and tokens of one micro-batch; rank 1 has none at step 2."""
    if (rank, step) == (1, 2):
        return [0.0] * 12
    draw = random.Random(100 * rank + 10 * step + micro_batch)
    return [draw.randrange(1000) / 3 for _ in TASKS] + [float(draw.randrange(1, 50)) for _ in TASKS]


def run_steps(accumulator: StepAccumulator, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        for micro_batch in range(MICRO_BATCHES):
            values = torch.tensor(sums_of(rank, step, micro_batch))
            accumulator.add(LossSum(values[:6].sum(), values[:6], values[6:]), encoder_tokens=10 * rank + step)
        # The first step has no metric of the engine's own, and the others one each, of every rank another value.
        extra = {"train/extra": torch.tensor(1.0 + rank)} if step else {}
        result = StepResult(True, torch.tensor(float(step)), 0.1, extra)
        accumulator.end_step(result, global_step=step, data_step=step)


def work(rank: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    whole = StepAccumulator(torch.device("cpu"))
    run_steps(whole, rank, 0, STEPS)

    first = StepAccumulator(torch.device("cpu"))
    run_steps(first, rank, 0, 3)
    state = first.state_dict()
    resumed = StepAccumulator(torch.device("cpu"))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    run_steps(resumed, rank, 3, STEPS)

    records = {name: [strict_json(asdict(record)) for record in accumulator.take()]
               for name, accumulator in (("whole", whole), ("resumed", resumed))}  # fmt: skip
    Path(out, f"{rank}.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks_agree_with_the_sum_and_a_resume_equals_no_resume(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=RANKS)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert results[0] == results[1]
    assert results[0]["whole"] == results[0]["resumed"]
    for step, record in enumerate(results[0]["whole"]):
        expected = [
            sum(
                sums_of(rank, step, micro_batch)[column]
                for rank in range(RANKS)
                for micro_batch in range(MICRO_BATCHES)
            )
            for column in range(12)
        ]
        # Token losses are float32 (2**-24 relative) before they are added in float64.
        assert list(record["loss_sums"]) == list(record["target_tokens"]) == list(TASKS)
        assert list(record["loss_sums"].values()) == pytest.approx(expected[:6], rel=1e-7)
        assert list(record["target_tokens"].values()) == expected[6:]
        assert record["encoder_tokens"] == MICRO_BATCHES * (2 * step + 10)
        assert record["grad_norm"] == step
        assert record["extra"] == ({"train/extra": 1.5} if step else {})
