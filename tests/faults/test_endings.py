"""How a run ends is told, whatever became of its disk, its folder or its ranks: the exit code, and run.json."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_runs
import pytest
from forked_runs import ForkedRuns, status

from ds_encdec.checkpoint.folder import verify_checkpoints

pytestmark = [pytest.mark.distributed]

KILLED = {"kind": "killed_rank", "at": 6, "on_rank": 1}


def arguments(folder: Path, engine: str = "fsdp", **changes: Any) -> list[str]:
    settings = {"training__num_train_steps": 8, "training__save_steps": 4, "training__async_save": "false"}
    return forked_runs.arguments(folder, engine, **settings | changes)


@pytest.mark.parametrize(
    ("engine", "ranks", "lost", "faults"),
    [
        pytest.param("deepspeed", 2, 1, [KILLED], id="deepspeed, in a step"),
        pytest.param("fsdp", 2, 0, [{"kind": "killed_in_save", "on_rank": 0}], id="fsdp, in a save"),
        pytest.param("fsdp", 3, 1, [KILLED, {"kind": "own_machine"}], id="fsdp, of three machines"),
        pytest.param("fsdp", 2, 1, [KILLED, {"kind": "deaf", "at": 6, "on_rank": 0}], id="fsdp, in native code"),
    ],
)
def test_a_killed_rank_is_named_and_the_others_do_not_take_the_blame(
    runs: ForkedRuns, tmp_path: Path, engine: str, ranks: int, lost: int, faults: list[dict[str, Any]]
) -> None:
    """Of three machines: each rank takes the others' processes to be elsewhere, and sees none of them go. In native
    code: as in a GPU's collective, which gloo's connections tell nothing; a stand-in that sleeps."""
    result = runs.run(arguments(tmp_path, engine, data__num_lanes=ranks), ranks=ranks, faults=faults)
    result.ended_with(*(-signal.SIGKILL if rank == lost else 9 for rank in range(ranks)))
    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"]) == ("failed", 9), ended
    if {"kind": "own_machine"} in faults:
        assert ended["reason"].startswith("the connection between the ranks broke: one on another machine is gone")
    else:
        assert ended["reason"].startswith(f"rank {lost} (process ")
        assert f"on {ended['host']}) is gone without a word" in ended["reason"]
        assert "Connection closed" not in result.output
    assert "Traceback" not in result.output
    assert [checkpoint.manifest.step for checkpoint in verify_checkpoints(tmp_path)] == [4]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_no_loss_of_it_and_its_secrets_are_masked(
    runs: ForkedRuns, tmp_path: Path, rank: int
) -> None:
    fault = {"kind": "bug", "at": 6, "on_rank": rank, "text": "no https://user:hunter2@host"}
    runs.run(arguments(tmp_path), ranks=2, faults=[fault]).ended_with(1)
    assert "KeyError: 'no https://***@host'" in status(tmp_path)["reason"]
    ledger = (tmp_path / "ledger.jsonl").read_text()
    assert rank or "https://***@host" in ledger  # rank 0 may end before it knows of another's error
    assert "hunter2" not in ledger + (tmp_path / "run.json").read_text()


def test_a_run_that_was_killed_whole_does_not_stay_running(runs: ForkedRuns, tmp_path: Path) -> None:
    """Where its next start is refused that is its end: no supervisor is to try again."""
    runs.run(arguments(tmp_path), faults=[KILLED | {"on_rank": 0}]).ended_with(-signal.SIGKILL)
    assert status(tmp_path)["state"] == "running"
    refused = runs.run([*arguments(tmp_path, model__num_sentinel_tokens=7), "--resume", "auto"]).ended_with(5)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 5)
    assert status(tmp_path)["reason"] in refused.output


def test_a_folder_that_is_deleted_ends_the_run_and_one_of_checkpoints_is_made_again(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    fault = {"kind": "deleted_folder", "at": 5, "path": str(folder)}
    result = runs.run(arguments(folder), ranks=2, faults=[fault]).ended_with(5)
    assert f"infra.output_dir: {folder} was deleted or replaced" in result.output
    assert "Traceback" not in result.output
    assert not folder.exists()

    fault["path"] = str(folder / "checkpoints")
    result = runs.run(arguments(folder), ranks=2, faults=[fault]).ended_with(0)
    assert f"{folder}/checkpoints was moved away or deleted in mid-run: it is made again" in result.output
    assert [checkpoint.manifest.step for checkpoint in verify_checkpoints(folder)] == [8]


def test_a_disk_that_cannot_hold_the_checkpoints_is_told_at_the_start(runs: ForkedRuns, tmp_path: Path) -> None:
    endless = {"training__num_train_steps": 10**9, "training__save_steps": 1, "training__save_total_limit": "null"}
    refuses = arguments(tmp_path, **endless, infra__require_disk_space="true")
    problem = "has up to 1,000,000,000 checkpoints of 728.8 KB at a time (training.save_total_limit=None"
    assert problem in runs.run(refuses, ranks=2).ended_with(5).output
    assert status(tmp_path)["exit_code"] == 5


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkedRuns, Path, Path]]:
    """Runs on a disk of 24 MB, where it is for them, and where this process sees it."""
    mount = tmp_path_factory.mktemp("disk")
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
    if not shutil.which("unshare") or subprocess.run([*unshare, f"mount -t tmpfs none {mount}"]).returncode:
        pytest.skip("no file system may be mounted here")
    with ForkedRuns((*unshare, f'mount -t tmpfs -o size=24m none "{mount}" && exec "$@"', "bash")) as started:
        yield started, mount, Path(f"/proc/{started.pid}/root{mount}")


@pytest.mark.parametrize(
    ("full_after", "stopped_at", "state", "code"),
    [(2, None, "completed", 0), (1, 5, "preempted", 75), (1, None, "failed", 5)],
    ids=["completed", "preempted", "the last save fails"],
)
def test_on_a_full_disk_the_ending_is_the_true_one(
    small_disk: tuple[ForkedRuns, Path, Path], full_after: int, stopped_at: int | None, state: str, code: int
) -> None:
    runs, mount, seen = small_disk
    faults: list[dict[str, Any]] = [{"kind": "full_disk", "after_commits": full_after, "path": str(mount / "ballast")}]
    if stopped_at:
        faults.append({"kind": "asked_to_stop", "at": stopped_at})
    result = runs.run(arguments(mount / "run", training__save_steps=100 if stopped_at else 4), faults=faults)
    ended = status(seen / "run")
    clear(seen)
    result.ended_with(code)
    assert (ended["state"], ended["exit_code"], ended["world_size"]) == (state, code, 1)
    assert "Traceback" not in result.output


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
