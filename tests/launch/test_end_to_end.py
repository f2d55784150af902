"""The main job through a real launcher, on real ranks: train, profile, export, generate."""

import json
import re
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import QUICKSTART, launcher, metrics, overrides, run

from ds_encdec import cli
from ds_encdec.config.schema import DataConfig
from ds_encdec.data.sources.sources import named_sources

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


def evaluations(folder: Path, name: str, how: str, *settings: str) -> list[dict[str, float]]:
    words = overrides(
        folder / name,
        training__num_train_steps=2,
        training__warmup_steps=1,
        training__eval_steps=1,
        training__export_at_end="false",
        training__report_to="none",
        data__dataset_name="json",
        data__data_files=folder / "train.jsonl",
        infra__distributed_type="fsdp",
    )
    done = run([*launcher(how), "--config", QUICKSTART, *words, *settings], folder)
    assert done.returncode == 0, done.stdout
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval/loss" in line]


def test_two_sets_on_two_ranks_have_the_figures_of_each_alone(tmp_path: Path) -> None:
    for name, count in (("train", 200), ("easy", 3), ("hard", 9)):
        rows = [{"text": f"{name} {i}: " + "one river runs to the sea " * (1 + i % 5)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")}
    sets = "{" + ", ".join(f"{name}: {{eval_files: {path}}}" for name, path in files.items()) + "}"
    best_by = "training.metric_for_best_model=hard/loss"
    both = evaluations(
        tmp_path, "both", "torchrun", f"data.eval_files={files['easy']}", f"data.eval_sets={sets}", best_by
    )
    assert len(both) == 2
    for name, path in files.items():
        alone = evaluations(tmp_path, name, "python", f"data.eval_files={path}", "infra.num_gpus=1")
        for here, there in zip(both, alone, strict=True):
            for figure in ("loss", "perplexity"):
                assert here[f"eval/{name}/{figure}"] == pytest.approx(there[f"eval/{figure}"], rel=1e-4)
    assert both[0]["eval/easy/loss"] == both[0]["eval/loss"] != both[0]["eval/hard/loss"]
    saved = max((tmp_path / "both" / "checkpoints").rglob("trainer.json")).read_text()
    best = min(line["eval/hard/loss"] for line in both)
    assert [float(value) for value in re.findall(r'"best_value": ([\d.]+)', saved)] == [pytest.approx(best)]


def test_each_set_is_what_its_fields_say() -> None:
    sets: Any = {"old": {"eval_split": "test"}, "new": {"eval_dataset_name": "json", "eval_files": "a.jsonl"}}
    data = DataConfig(dataset_name="a/b", dataset_revision="v1", eval_split="validation", eval_sets=sets)
    sources = named_sources(data)
    assert [*sources] == ["source-0", "validation", "eval-old", "eval-new"]
    assert (sources["eval-old"].dataset_split, sources["eval-old"].dataset_revision) == ("test", "v1")
    assert (sources["eval-new"].dataset_name, sources["eval-new"].data_files) == ("json", ("a.jsonl",))
