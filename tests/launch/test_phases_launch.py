"""Phases with a real launcher and its rank: trained, interrupted, continued, judged."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tiny_run import BIN, QUICKSTART, environment, is_running, metrics, overrides, wait_until

TINY_PHASES = {
    "infra__distributed_type": "fsdp",  # torchrun: starts sooner than deepspeed
    "infra__num_gpus": 1,  # several ranks under it: test_watchdog.py
    "training__max_grad_norm": 1.0,
    "training__logging_steps": 1,
    "phases__sanity_check__num_train_steps": 4,
    "phases__sanity_check__max_loss_after_warmup": 9.0,
    "phases__sanity_check__min_loss_decrease": 0.0,
    "phases__validation__num_train_steps": 24,  # so many that a signal finds it training
    "phases__validation__logging_steps": 1,
    "phases__validation__save_steps": 1000,
    "phases__validation__max_loss_after_warmup": 9.0,
    "phases__validation__min_loss_decrease": 0.0,
}


def phases(output: Path) -> subprocess.Popen[str]:
    settings = overrides(output, **TINY_PHASES)
    return subprocess.Popen(
        [str(BIN / "ds-encdec"), "phases", "--config", QUICKSTART, "--to", "validation", *settings],
        cwd=output.parent,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.launch
def test_phases_stopped_and_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "run"
    first, second = output / "phases" / "sanity_check", output / "phases" / "validation"

    # Stopped in the second phase: saved, and no process left.
    started = phases(output)
    log = second / "metrics.jsonl"
    wait_until(lambda: started.poll() is not None or (log.exists() and log.stat().st_size))
    below = psutil.Process(started.pid).children(recursive=True)
    os.kill(started.pid, signal.SIGTERM)
    text, _ = started.communicate(timeout=240)
    assert started.returncode == 75, text
    assert "phase sanity_check passed its gate" in text
    assert "error:" not in text
    assert not [process for process in below if is_running(process.pid)]
    stopped_at = json.loads((second / "run.json").read_text())
    assert stopped_at["state"] == "preempted"
    assert not (second / "result.json").exists()

    # Once more: the first phase is left alone, the second continues.
    text, _ = (again := phases(output)).communicate(timeout=240)
    assert again.returncode == 0, text
    assert "phase sanity_check has passed its gate already" in text
    assert "resumed from" in text
    results = [json.loads((folder / "result.json").read_text()) for folder in (first, second)]
    assert [result["passed"] for result in results] == [True, True]
    assert [result["steps"] for result in results] == [4, 24]
    assert len({result["pipeline_initial_loss"] for result in results}) == 1

    # Weights were handed on: the second phase begins where the first one ended, not at the first one's beginning.
    ended, began = metrics(first), metrics(second)
    initial = results[0]["pipeline_initial_loss"]
    last = [line["train/loss"] for line in ended if "train/loss" in line][-1]
    assert abs(began[0]["train/loss"] - last) < abs(began[0]["train/loss"] - initial)
