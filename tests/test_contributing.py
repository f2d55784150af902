"""An engine is added here as CONTRIBUTING.md says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.launch
def test_an_engine_is_a_module_and_a_row(tmp_path: Path) -> None:
    """It trains a run that `auto` gives it, and another engine goes on from its checkpoint."""
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    try:
        import tiny_run
    finally:
        sys.path.remove(str(ROOT / "tests" / "launch"))
    settings = tiny_run.overrides(
        tmp_path / "run",
        **{"infra__device": "cpu", "infra__offload_optimizer": "none", "training__bf16": "false"},
        **{"training__logging_steps": 1, "training__save_steps": 4, "training__average_checkpoints": 0},
        **{"training__activation_checkpointing": "none", "training__report_to": "none"},
        training__export_at_end="false",
    )
    code = f"import plain_engine; plain_engine.train_and_go_on({tiny_run.QUICKSTART!r}, {settings!r})"
    environment = tiny_run.environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'distributed'}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [line["train/loss"] for line in tiny_run.metrics(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    starts = [line for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines() if '"start"' in line]
    assert ["plain" in starts[0], "fsdp" in starts[1]] == [True, True]
