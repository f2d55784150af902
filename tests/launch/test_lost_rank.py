"""A rank that is killed outright under a real launcher, which then ends the other one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from tiny_run import QUICKSTART, environment, launcher, overrides, wait_until

pytestmark = pytest.mark.launch


def test_the_rank_that_was_killed_is_named_and_the_one_that_torchrun_ends_claims_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = overrides(
        run,
        infra__distributed_type="fsdp",
        infra__offload_optimizer="none",
        training__num_train_steps=10**6,
        training__eval_samples=0,
        training__logging_steps=1,
        training__report_to="none",
    )
    with open(tmp_path / "output", "w") as output:
        torchrun = subprocess.Popen(
            [*launcher("torchrun"), "--config", QUICKSTART, *settings],
            cwd=tmp_path,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: torchrun.poll() is not None or (run / "checkpoints" / "latest").exists())
            assert torchrun.poll() is None, (tmp_path / "output").read_text()
            killed, survivor = sorted(
                psutil.Process(torchrun.pid).children(), key=lambda child: child.environ()["RANK"], reverse=True
            )
            killed.kill()
            assert torchrun.wait(timeout=100) == 1
        finally:
            torchrun.kill()
            torchrun.wait()
    assert not survivor.is_running()
    ended = json.loads((run / "run.json").read_text())
    assert (ended["state"], ended["exit_code"]) == ("failed", 9), ended
    assert ended["reason"].startswith(f"rank 1 (process {killed.pid} on {ended['host']}) is gone without a word")
    assert f"exitcode  : 9 (pid: {survivor.pid})" in (tmp_path / "output").read_text()
