"""A whole run, resumed, where deepspeed cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_run import QUICKSTART, losses, overrides, run

pytestmark = pytest.mark.launch

BLOCKED = """
import sys
sys.modules["deepspeed"] = None  # what an import finds where it is not installed
from ds_encdec.train import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_without_deepspeed(tmp_path: Path) -> None:
    start = [sys.executable, "-c", BLOCKED, "--config", QUICKSTART]
    refused = run([*start, *overrides(tmp_path / "refused")], tmp_path)
    assert refused.returncode == 2
    assert "deepspeed is not installed" in refused.stdout

    output = tmp_path / "run"
    finished = run([*start, *overrides(output, infra__distributed_type="auto")], tmp_path)
    assert finished.returncode == 0, finished.stdout
    assert "deepspeed is not installed; training with FSDP2" in finished.stdout
    whole = losses(output)

    part = tmp_path / "part"
    first = run([*start, *overrides(part, infra__distributed_type="fsdp", training__save_steps=2)], tmp_path)
    assert first.returncode == 0, first.stdout
    resume = ["--resume", str(part / "checkpoints" / "step-00000004")]
    resumed = run([*start, *resume, *overrides(part, infra__distributed_type="fsdp")], tmp_path)
    assert resumed.returncode == 0, resumed.stdout
    assert losses(part)[-1] == whole[-1]
