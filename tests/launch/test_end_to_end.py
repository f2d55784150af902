"""The main job through the real launchers, on real ranks: train, die, resume, export, generate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import BIN, QUICKSTART, environment, launcher, losses, metrics, overrides, run

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two ranks under `deepspeed`, started from another directory."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    result = run([*launcher("deepspeed"), "--config", QUICKSTART, *overrides(cwd / "run")], cwd)
    assert result.returncode == 0, result.stdout
    return cwd / "run"


def test_a_run_leaves_what_the_readme_promises(finished: Path) -> None:
    status = json.loads((finished / "run.json").read_text())
    assert (status["state"], status["exit_code"], status["world_size"]) == ("completed", 0, 2)
    lines = metrics(finished)
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "eval/loss" in line] == [3, 6]
    assert lines[-1]["train/tokens_seen" if "train/loss" in lines[-1] else "eval/loss"] > 0
    checkpoints = finished / "checkpoints"
    assert sorted(p.name for p in checkpoints.glob("step-*")) == ["step-00000003", "step-00000006"]
    assert (checkpoints / "final").resolve().name == "step-00000006"
    assert (checkpoints / "best").exists()
    assert (finished / "config.yaml").exists()
    assert json.loads((finished / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3
    events = EventAccumulator(str(next((finished / "logs" / "tensorboard").glob("events*")).parent))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]


def test_zero_to_fp32_equals_the_export(finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "checkpoints" / "final"
    result = run(
        [sys.executable, str(checkpoint / "zero_to_fp32.py"), str(checkpoint), str(tmp_path / "fp32")], tmp_path
    )
    assert result.returncode == 0, result.stdout
    result = run([str(BIN / "ds-encdec"), "export", str(checkpoint), str(tmp_path / "export")], tmp_path)
    assert result.returncode == 0, result.stdout
    theirs = torch.load(tmp_path / "fp32" / "pytorch_model.bin")
    ours = load_file(tmp_path / "export" / "model.safetensors")
    assert set(ours) <= set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in set(theirs) - set(ours):  # the tied output layer is stored once
        assert torch.equal(theirs[name], theirs["shared.weight"])
    result = run(
        [str(BIN / "ds-encdec"), "generate", "--model", str(tmp_path / "export"), "--text", "The <extra_id_0> of"],
        tmp_path,
    )
    assert result.returncode == 0, result.stdout


def test_killed_ranks_resume_to_the_same_losses(finished: Path, tmp_path: Path) -> None:
    command = [*launcher("deepspeed"), "--config", QUICKSTART, *overrides(tmp_path / "run"), "--resume", "auto"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True)
    deadline = time.monotonic() + 600
    while not (tmp_path / "run" / "checkpoints" / "step-00000003").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    for child in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(child.info["cmdline"] or ()):
            child.kill()
    process.wait()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "running"  # nobody could say otherwise
    result = run(command, tmp_path)
    assert result.returncode == 0, result.stdout
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.parametrize("names", [["torchrun"], ["python", "module"]], ids=" and ".join)
def test_every_launcher_sees_the_same_data(finished: Path, tmp_path: Path, names: list[str]) -> None:
    """Two ranks or one, the same steps: only the order of sums differs. Those of one rank run at the same time."""
    with ThreadPoolExecutor() as pool:
        results = pool.map(
            lambda name: run([*launcher(name), "--config", QUICKSTART, *overrides(tmp_path / name)], tmp_path), names
        )
    for name, result in zip(names, results, strict=True):
        assert result.returncode == 0, result.stdout
        expected = losses(finished)
        found = losses(tmp_path / name)
        assert [item[:2] for item in found] == [item[:2] for item in expected]
        tolerance = 0.0 if name == "torchrun" else 2e-2  # bf16 gradients are summed in another order on one rank
        assert [item[2] for item in found] == pytest.approx([item[2] for item in expected], abs=tolerance)


def test_a_second_run_is_refused_and_a_signal_saves(finished: Path, tmp_path: Path) -> None:
    command = [*launcher("python"), "--config", QUICKSTART]
    result = run([*command, *overrides(finished)], tmp_path)
    assert result.returncode == 3, result.stdout
    assert "--resume auto" in result.stdout

    settings = overrides(tmp_path / "run", training__num_train_steps=5000, training__save_steps=5000)
    process = subprocess.Popen([*command, *settings], cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 600
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    status = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.one_process
def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    settings = overrides(
        tmp_path / "run",
        training__num_train_steps=30,
        training__save_steps=1000,
        training__save_interval_hours=0.25 / 3600,
        training__save_total_limit="null",
        training__eval_samples=0,
    )
    result = run([*launcher("python"), "--config", QUICKSTART, *settings], tmp_path)
    assert result.returncode == 0, result.stdout
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert len(saved) > 1  # without the clock only the last step's
    assert "step-00000030" in saved


def test_bad_data_of_one_rank_ends_all_with_its_reason(tmp_path: Path) -> None:
    """One lane meets a broken line in the middle of the run; the other rank must not wait for it."""
    lines = [
        json.dumps({"text": f"{number} " + "the quick brown fox jumps over the lazy dog. " * 12})
        for number in range(400)
    ]
    lines[200] = json.dumps({"text": 5})
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    settings = overrides(
        tmp_path / "run",
        data__dataset_name="json",
        data__data_files=tmp_path / "data.jsonl",
        training__num_train_steps=2000,
        training__save_steps=2000,
        training__eval_steps=2000,
    )
    result = run([*launcher("torchrun"), "--config", QUICKSTART, *settings], tmp_path)
    assert result.returncode != 0
    status = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4), result.stdout
    assert "line 201" in status["reason"]
    assert result.stdout.count("exitcode  : 4") == 2, result.stdout  # both ranks, by torchrun's own report


def test_config_errors_come_before_anything_is_built(tmp_path: Path) -> None:
    result = run(
        [*launcher("python"), "--config", QUICKSTART, f"infra.output_dir={tmp_path / 'run'}", "training.lr=1"], tmp_path
    )
    assert result.returncode == 2
    assert "training.lr" in result.stdout
    result = run([*launcher("python"), f"infra.output_dir={tmp_path / 'run'}"], tmp_path)
    assert result.returncode == 2, result.stdout
    assert "quickstart.yaml" in result.stdout
    result = run(
        [*launcher("torchrun"), "--config", QUICKSTART, *overrides(tmp_path / "run", data__num_lanes=3)], tmp_path
    )
    assert "data.num_lanes=3" in result.stdout
    assert not (tmp_path / "run").exists()
