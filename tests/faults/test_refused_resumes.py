"""Resumes that cannot be what is wanted are refused cheaply and by name; what can go on does. On the real program."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_runs import Finished, ForkedRuns, flip_byte, status
from tiny_run import QUICKSTART, losses, metrics, overrides

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.data.randomness import Permutation

pytestmark = pytest.mark.distributed

STEPS = 6
BAD_PLACES = (90, 91, 93, 94, 96)


def arguments(folder: Path, *options: str, **changes: Any) -> list[str]:
    settings = {
        "infra__distributed_type": "fsdp",
        "data__num_lanes": 3,
        "training__num_train_steps": STEPS,
        "training__save_steps": 2,
        "training__eval_steps": 2,
        "training__save_total_limit": 5,
        "training__average_checkpoints": 5,
        "training__report_to": "none",
    }
    return ["--config", QUICKSTART, *overrides(folder, **settings | changes), *options]


@pytest.fixture(scope="module")
def finished(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank under FSDP2. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    runs.run(arguments(folder)).ended_with(0)
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def assert_refused(result: Finished, code: int, *words: str) -> None:
    assert set(result.codes) == {code}, result.output
    for word in words:
        assert word in result.output
    assert "Traceback" not in result.output


def test_a_finished_run_may_be_resumed_again(runs: ForkedRuns, run_folder: Path) -> None:
    """As a queue that starts a job until it succeeds may do; not begun again by mistake."""
    averaged, before = run_folder / "export" / "averaged", losses(run_folder)
    assert "2, 4, 6" in (averaged / "README.md").read_text()
    assert sorted(path.name for path in averaged.parent.iterdir()) == ["averaged", "final"]
    assert_refused(runs.run(arguments(run_folder)), 3, "--resume auto")
    result = runs.run(arguments(run_folder, "--resume", "auto")).ended_with(0)
    assert f"nothing is left to train after step {STEPS}. To train on, raise training.num_train_steps" in result.output
    assert status(run_folder)["state"] == "completed"
    assert losses(run_folder) == before


def test_ranks_that_do_not_divide_the_lanes_are_told_which_do(runs: ForkedRuns, finished: Path, tmp_path: Path) -> None:
    before = (finished / "run.json").read_text()
    result = runs.run(arguments(finished, "--resume", "auto"), ranks=2)
    assert_refused(result, 2, "(fixed when this run first started)=3 cannot be divided", "numbers of ranks: 1, 3.")
    assert (finished / "run.json").read_text() == before
    assert_refused(runs.run(arguments(tmp_path / "new"), ranks=2), 2, "data.num_lanes=3")
    assert not (tmp_path / "new").exists()


def test_other_data_is_refused_unless_one_insists(runs: ForkedRuns, run_folder: Path) -> None:
    weights = {"data__ul2_task_weights": "[0,0,0,0,1]", "training__num_train_steps": 8}
    refused = runs.run(arguments(run_folder, "--resume", "auto", **weights))
    assert_refused(refused, 5, "data.ul2_task_weights: [1.0, 1.0, 1.0, 1.0, 4.0] there", "--allow-data-change")
    insisted = runs.run(arguments(run_folder, "--resume", "auto", "--allow-data-change", **weights)).ended_with(0)
    assert "continue where they were" in insisted.output
    last = [line for line in metrics(run_folder) if "train/loss" in line][-1]
    assert last["step"] == 8
    assert [name for name in last if name.startswith("train/loss_")] == ["train/loss_S"]
    documents = {"data__dataset_name": "random", "training__num_train_steps": 10}
    other = runs.run(arguments(run_folder, "--resume", "auto", "--allow-data-change", **documents)).ended_with(0)
    assert "begin at their start" in other.output


def test_a_damaged_checkpoint(runs: ForkedRuns, run_folder: Path) -> None:
    newest = run_folder / "checkpoints" / "step-00000006"
    (shard,) = newest.glob("dcp/*.distcp")
    flip_byte(shard)
    assert_refused(runs.run(arguments(run_folder, "--resume", str(newest))), 5, str(shard))
    result = runs.run(arguments(run_folder, "--resume", "auto")).ended_with(0)
    assert f"Passing over a damaged checkpoint: {shard}" in result.output
    assert "step-00000004 (step 4)" in result.output
    assert verify_checkpoint(newest).step == STEPS  # saved again


def test_a_checkpoint_of_another_run_is_not_mixed_into_this_one(
    runs: ForkedRuns, finished: Path, run_folder: Path, tmp_path: Path
) -> None:
    theirs = str(finished / "checkpoints" / "step-00000004")
    result = runs.run(arguments(run_folder, "--resume", theirs))
    assert_refused(result, 5, theirs, str(run_folder / "checkpoints"), "infra.output_dir")
    result = runs.run(arguments(tmp_path / "own", "--resume", theirs)).ended_with(0)
    assert losses(tmp_path / "own") == [item for item in losses(finished) if item[0] > 4]


def test_a_disk_that_takes_no_checkpoint_ends_the_run_only_at_its_last(runs: ForkedRuns, run_folder: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    for engine in ("fsdp", "deepspeed"):
        more = {"training__num_train_steps": 10, "infra__distributed_type": engine, "training__logging_steps": 1}
        result = runs.run(arguments(run_folder, "--resume", "auto", **more), limits={"RLIMIT_FSIZE": 100_000})
        assert_refused(result, 5, "step 8 was not saved", "step 10 was not saved", "File too large", "ulimit")
        assert "The newest is step 6's. Training goes on" in result.output
        assert [line["step"] for line in metrics(run_folder)][-1] == 10  # trained to the end
        assert sorted(committed_steps(run_folder / "checkpoints")) == [2, 4, 6]
        assert (status(run_folder)["state"], status(run_folder)["exit_code"]) == ("failed", 5)
    runs.run(arguments(run_folder, "--resume", "auto", training__num_train_steps=10)).ended_with(0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 JSON lines; of those that the lanes come to between steps 3 and 6, five are cut short."""
    path = tmp_path_factory.mktemp("corpus") / "data.jsonl"
    order = Permutation(2000, 42, "documents", 0, 0)
    bad = {order[place] for place in BAD_PLACES}
    lines = [json.dumps({"text": f"line {i}: " + "some words of a document, " * 8}) for i in range(2000)]
    path.write_text("".join((line[:40] if i in bad else line) + "\n" for i, line in enumerate(lines)))
    return path


def test_bad_rows(runs: ForkedRuns, corpus: Path, tmp_path: Path) -> None:
    """A run that ended at one goes on past it with `skip`; on two ranks the count and the data are the same."""
    data = {"data__dataset_name": "json", "data__data_files": corpus, "data__num_lanes": 2}
    data |= {"training__logging_steps": 1, "training__eval_samples": 0, "training__average_checkpoints": 0}
    skipping = {**data, "data__on_bad_row": "skip"}
    sharded = {"infra__distributed_type": "deepspeed", "infra__sharding_stage": "zero3"}
    stopped = runs.run(arguments(tmp_path / "run", **data, **sharded), ranks=2)
    assert_refused(stopped, 4, "data.jsonl, line ", "not a JSON line", "data.on_bad_row=skip")
    assert sorted(committed_steps(tmp_path / "run" / "checkpoints")) == [2, 3]  # all that was trained, by both ranks
    assert status(tmp_path / "run")["exit_code"] == 4
    resumed = runs.run(arguments(tmp_path / "run", "--resume", "auto", **skipping)).ended_with(0)
    assert resumed.output.count("passed over: data.jsonl, line ") == 5
    runs.run(arguments(tmp_path / "ranks", **skipping), ranks=2).ended_with(0)
    assert [line["data/bad_rows"] for line in metrics(tmp_path / "run")] == [0, 0, 0, 5, 5, 5]
    for name in ("data/bad_rows", "train/tokens_seen"):
        one, two = ([line[name] for line in metrics(tmp_path / folder)] for folder in ("run", "ranks"))
        assert one == two
    limited = runs.run(arguments(tmp_path / "limited", **skipping, data__max_bad_rows=4), ranks=2)
    assert_refused(limited, 4, "more than data.max_bad_rows=4 rows cannot be read, the last one data.jsonl, line ")
