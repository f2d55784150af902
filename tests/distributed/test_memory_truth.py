"""The whole estimate against real steps on two ranks: what the benchmark of it calls within the goal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = {"deepspeed": (0, 1, 2, 3), "fsdp": (0, 2, 3)}


def test_estimates_are_within_the_goal(tmp_path: Path) -> None:
    """On a CPU: not more than 5 % over what was measured, and not more than 3 % under it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["scripts/bench/memory.py", "--quick", "--device", "cpu", "--json", str(tmp_path / "rows.json")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for _ in range(2):  # what threads hold when a peak is reached is not the same each time on a busy machine
        run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900)
        if run.returncode == 0:
            break
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(row["settings"]["engine"], row["settings"]["stage"]) for row in rows}
    assert found == {(engine, f"zero{stage}") for engine, stages in STAGES.items() for stage in stages}
    for row in rows:
        assert 0.97 <= row["estimated"] / row["measured"] <= 1.05, row["row"]
        assert row["measured"] > row["resting"] > 4 * row["trained parameters"], row["row"]
