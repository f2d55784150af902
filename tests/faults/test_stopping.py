"""Two real ranks, with their data workers, that are asked to stop: one checkpoint, exit code 75, nothing lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked_runs
import pytest
from forked_runs import Finished, ForkedRuns, status
from tiny_run import losses

from ds_encdec.base.types import Preempted
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.launch.run_folder import RunFolder

pytestmark = [pytest.mark.distributed]

STOPS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
# A micro-batch of more than the 64 KB that a pipe holds: 160 x 128 tokens of 4 bytes.
LARGE = {"training__per_device_train_batch_size": 160}


def arguments(folder: Path, engine: str, *options: str, **changes: Any) -> list[str]:
    settings = {
        "data__preprocessing_num_workers": 1,
        "training__num_train_steps": 1000,
        "training__save_steps": 1000,
        "training__logging_steps": 1,
    }
    return forked_runs.arguments(folder, engine, *options, **settings | changes)


def assert_preempted(result: Finished, folder: Path) -> int:
    """With one checkpoint, of the last step; returns that."""
    assert not result.ended_with(75).left
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("preempted", 75)
    trained = [step for step, *_ in losses(folder)]
    (saved,) = committed_steps(folder / "checkpoints")
    assert max(trained) == saved
    return saved


@pytest.mark.parametrize(
    ("engine", "workers", "changes", "fault"),
    [
        ("deepspeed", 1, LARGE, {"kind": "signal_all_at_start", "signals": ["SIGTERM"]}),
        ("deepspeed", 0, {}, {"kind": "signal_all", "signals": ["SIGUSR2", *STOPS], "at": 4}),
    ],
    ids=["TERM at the start", "all, without workers"],
)
def test_a_signal_to_every_process_saves_and_no_rank_leaves_before_the_copy_is_made(
    runs: ForkedRuns, tmp_path: Path, engine: str, workers: int, changes: dict[str, Any], fault: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    there = tmp_path / "there"
    settings = {"data__preprocessing_num_workers": workers, "infra__upload_to": f"file://{there}"} | changes
    faults = [fault, {"kind": "slow_uploads", "seconds": 1.0, "alone": False}]
    result = runs.run(arguments(folder, engine, **settings), ranks=2, faults=faults)
    saved = assert_preempted(result, folder)
    assert ("most recent call first" in result.output) == ("SIGUSR2" in fault["signals"])  # shows what it does
    assert verify_checkpoint(there / "checkpoints" / f"step-{saved:08d}").step == saved, result.output
    assert status(there)["state"] == "preempted"


@pytest.mark.parametrize("signals", [["SIGTERM"], []])
def test_a_killed_worker_is_a_lost_process_or_part_of_a_stop(
    runs: ForkedRuns, tmp_path: Path, signals: list[str]
) -> None:
    """One rank has the data of step 4, the other does not: step 3 is saved, and step 4 is not left out afterwards."""
    short = {"training__num_train_steps": 6}
    runs.run(arguments(tmp_path / "whole", "fsdp", **short), ranks=2).ended_with(0)
    fault = {"kind": "kill_workers", "at": 4, "on_rank": 1, "signals": signals}
    folder = tmp_path / "run"
    result = runs.run(arguments(folder, "fsdp", **short), ranks=2, faults=[fault])
    if signals:
        assert assert_preempted(result, folder) == 3
    else:
        result.ended_with(9)
    assert [*committed_steps(folder / "checkpoints")] == [3]
    runs.run(arguments(folder, "fsdp", "--resume", "auto", **short), ranks=2).ended_with(0)
    assert losses(folder) == losses(tmp_path / "whole")


def test_signals_after_the_last_step_change_nothing(runs: ForkedRuns, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = {"kind": "slow_uploads", "seconds": 2.0, "alone": True}
    faults = [{"kind": "signal_after_training", "signals": STOPS}, slow]
    settings = {"training__num_train_steps": 3, "infra__upload_to": f"file://{tmp_path / 'there'}"}
    runs.run(arguments(folder, "fsdp", **settings), ranks=2, faults=faults).ended_with(0)
    for run in (folder, tmp_path / "there"):
        assert status(run)["state"] == "completed"
        assert (run / "checkpoints/step-00000003/manifest.json").exists()


def test_a_stop_file_ends_the_run_once(runs: ForkedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_over = RunFolder(str(tmp_path / "run")), threading.Event()

    def ask() -> None:
        while not (run.metrics.exists() and run.metrics.read_text().count("\n") > 2):
            if is_over.wait(0.1):
                return
        assert "saves" in run.ask_to_stop()

    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(ask)
        try:
            result = runs.run(arguments(run.root, "fsdp"), ranks=2)
        finally:
            is_over.set()
        asked.result()
    assert_preempted(result, run.root)
    assert "ds-encdec stop" in run.read_status()["reason"]
    assert "nothing to stop, the run has ended: preempted, exit code 75" in run.ask_to_stop()
    with monkeypatch.context() as agent:
        agent.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        with pytest.raises(Preempted, match="max-restarts does not start it again"):
            run.claim(resume=True)
    run.claim(resume=True)
    assert not run.stop_file.exists()  # the next start is not meant
    run.release()
