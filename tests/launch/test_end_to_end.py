"""The main job through the real launchers, on real ranks: train, export, generate, convert, go on, be stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import BIN, QUICKSTART, environment, launcher, losses, metrics, overrides, run

pytestmark = pytest.mark.launch


def in_float32(folder: Path, **changes: Any) -> list[str]:
    """Settings of runs that are compared: in float32 all engines agree, on any number of ranks."""
    return overrides(folder, training__bf16="false", **changes)


# Every moment is a collective, so one rank that is told less often than another hangs the run.
CALLBACK = """
from torch import distributed
from ds_encdec import Callback
class Counts(Callback):
    def __init__(self, config):
        self.path, self.told = config.infra.output_dir + "/told.txt", []
    def _meet(self, moment, state):
        steps = [None] * distributed.get_world_size()
        distributed.all_gather_object(steps, [moment, state.global_step])
        assert steps == steps[:1] * 2
        self.told.append(f"{moment} {state.global_step}")
        if distributed.get_rank() == 0:
            open(self.path, "w").write(", ".join(self.told))
    def after_step(self, state, result):
        self._meet("step", state)
    def after_evaluation(self, state, metrics):
        self._meet("evaluation", state)
    def after_save(self, state, checkpoint):
        self._meet("save", state)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two ranks under `deepspeed`, started from another directory."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    (cwd / "counts.py").write_text(CALLBACK)
    settings = in_float32(cwd / "run", training__callbacks="[counts:Counts]")
    result = run([*launcher("deepspeed"), "--config", QUICKSTART, "--profile", "2", *settings], cwd)
    assert result.returncode == 0, result.stdout
    return cwd / "run"


def test_a_run_leaves_what_the_readme_promises(finished: Path) -> None:
    status = json.loads((finished / "run.json").read_text())
    assert (status["state"], status["exit_code"], status["world_size"]) == ("completed", 0, 2)
    assert status["hosts"] == {socket.gethostname(): "0-1"}
    told = (finished / "told.txt").read_text().split(", ")
    saves = [one for one in told if one.startswith("save")]
    assert saves == ["save 3", "save 6"]  # of the first, while training goes on
    assert [one for one in told if one not in saves] == [
        *("step 1", "step 2", "step 3", "evaluation 3"),
        *("step 4", "step 5", "step 6", "evaluation 6"),
    ]
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


def test_a_profile_is_of_every_rank(finished: Path) -> None:
    for rank in (0, 1):
        found = json.loads((finished / "profile" / f"rank-{rank}.json").read_text())
        assert (found["rank"], found["first_step"], found["last_step"]) == (rank, 4, 5)
        assert 0 < found["communication_share"] < 1
        assert 0 < found["data_wait_share"] < 1
        assert "aten::mm" in {row["name"] for row in found["operators"]}
        trace = json.loads((finished / "profile" / f"trace-rank-{rank}.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {"waits for data", "c10d::allreduce_"} <= names
        assert "aten::mm" in (finished / "profile" / f"rank-{rank}.txt").read_text()


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


def test_torchrun_sees_the_same_data(finished: Path, tmp_path: Path) -> None:
    result = run([*launcher("torchrun"), "--config", QUICKSTART, *in_float32(tmp_path / "run")], tmp_path)
    assert result.returncode == 0, result.stdout
    assert_alike(tmp_path / "run", finished, 0.0)


def assert_alike(found: Path, expected: Path, tolerance: float, after: int = 0) -> None:
    """Both runs have logged the same losses after step `after`, and one of them none before."""
    theirs = [item for item in losses(expected) if item[0] > after]
    assert [item[:2] for item in losses(found)] == [item[:2] for item in theirs]
    assert [item[2] for item in losses(found)] == pytest.approx([item[2] for item in theirs], abs=tolerance)


def test_a_run_of_the_other_engine_goes_on_from_a_converted_checkpoint(finished: Path, tmp_path: Path) -> None:
    """Converted on two ranks, trained on one: the same losses as the run that DeepSpeed made in one go."""
    convert = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "ds_encdec.cli", "convert"]
    converted = str(tmp_path / "converted")
    result = run([*convert, str(finished / "checkpoints" / "step-00000003"), converted, "--to", "dcp"], tmp_path)
    assert result.returncode == 0, result.stdout
    settings = in_float32(tmp_path / "run", infra__distributed_type="fsdp")
    result = run([*launcher("python"), "--config", QUICKSTART, "--resume", converted, *settings], tmp_path)
    assert result.returncode == 0, result.stdout
    assert_alike(tmp_path / "run", finished, 1e-5, after=3)


def test_a_second_run_is_refused_and_a_signal_saves(finished: Path, tmp_path: Path) -> None:
    command = [*launcher("python"), "--config", QUICKSTART]
    result = run([*command, *overrides(finished)], tmp_path)
    assert result.returncode == 3, result.stdout
    assert "--resume auto" in result.stdout

    settings = overrides(tmp_path / "run", training__num_train_steps=5000, training__save_steps=5000)
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen([*command, *settings], cwd=tmp_path, env=environment(), stderr=file)

    def wait_for(happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 600
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and metrics(tmp_path / "run"))
    process.send_signal(signal.SIGUSR2)  # it shows what it does, and goes on
    wait_for(lambda: "trainer.py" in said.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    status = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


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
    result = run([*launcher("python"), f"infra.output_dir={tmp_path / 'run'}"], tmp_path)
    assert result.returncode == 2, result.stdout
    assert "quickstart.yaml" in result.stdout
    result = run(
        [*launcher("torchrun"), "--config", QUICKSTART, *overrides(tmp_path / "run", data__num_lanes=3)], tmp_path
    )
    assert "data.num_lanes=3" in result.stdout
    assert not (tmp_path / "run").exists()
