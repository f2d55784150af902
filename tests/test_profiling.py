"""`--profile`: which steps it looks into, and what it makes of what it sees. Whole runs: tests/launch."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from ds_encdec.base.types import StepResult, TrainingState
from ds_encdec.training.profiling import WARM_UP_STEPS, StepProfiler


def run(steps: int, profiler: StepProfiler) -> None:
    matrix = torch.ones(8, 8)
    for step in range(1, steps + 1):
        with record_function("waits for data"):
            pass
        (matrix @ matrix @ matrix @ matrix).sum().item()
        state, result = TrainingState(global_step=100 + step), StepResult(True, torch.ones(()), 1.0)
        profiler.after_step(state, result)
    profiler.finish()


@pytest.mark.parametrize(("steps_of_the_run", "last"), [(WARM_UP_STEPS + 6, 2), (WARM_UP_STEPS + 1, 1)])
def test_as_many_steps_as_asked_for_or_as_there_are(tmp_path: Path, steps_of_the_run: int, last: int) -> None:
    run(steps_of_the_run, StepProfiler(2, tmp_path / "profile", rank=3))
    found = json.loads((tmp_path / "profile" / "rank-3.json").read_text())
    assert (found["steps"], found["last_step"]) == (last, 100 + WARM_UP_STEPS + last)
    assert found["host_waits"] == {"aten::_local_scalar_dense": 1}
    assert 0 < found["data_wait_share"] < 1
    assert found["communication_share"] == 0
    table = (tmp_path / "profile" / "rank-3.txt").read_text()
    (products,) = [line.split() for line in table.splitlines() if line.split()[:1] == ["aten::mm"]]
    assert products[-1] == str(3 * last)
    assert "CUDA" not in table  # a CPU has none, and nothing to wait for
    assert "host waits" not in table
    assert json.loads((tmp_path / "profile" / "trace-rank-3.json").read_text())["traceEvents"]


def test_a_run_without_steps_behind_the_warm_up_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(WARM_UP_STEPS, StepProfiler(2, tmp_path / "profile", rank=0))
    assert "none of 3 steps is behind the 3 of the warm-up" in caplog.text
    assert not (tmp_path / "profile").exists()
