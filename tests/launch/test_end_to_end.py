"""The main job through a real launcher, on real ranks: train, profile, export, generate."""

import json
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import QUICKSTART, launcher, metrics, overrides, run

from ds_encdec import cli

pytestmark = pytest.mark.launch


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
    settings = overrides(cwd / "run", training__callbacks="[counts:Counts]")
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
        assert (found["rank"], found["steps"], found["last_step"]) == (rank, 2, 5)
        assert 0 < found["communication_share"] < 1
        assert 0 < found["data_wait_share"] < 1
        trace = json.loads((finished / "profile" / f"trace-rank-{rank}.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {"waits for data", "c10d::allreduce_"} <= names
        assert "aten::mm" in (finished / "profile" / f"rank-{rank}.txt").read_text()


def test_zero_to_fp32_equals_the_export_which_generates(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, exported = finished / "checkpoints" / "final", tmp_path / "export"
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", str(checkpoint), str(tmp_path / "fp32")])
    runpy.run_path(str(checkpoint / "zero_to_fp32.py"), run_name="__main__")
    assert cli.main(["export", str(checkpoint), str(exported)]) == 0
    theirs = torch.load(tmp_path / "fp32" / "pytorch_model.bin")
    ours = load_file(exported / "model.safetensors")
    assert set(ours) <= set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in set(theirs) - set(ours):  # the tied output layer is stored once
        assert torch.equal(theirs[name], theirs["shared.weight"])
    assert cli.main(["generate", "--model", str(exported), "--text", "The <extra_id_0> of"]) == 0
