"""What a run leaves beside its checkpoints is as durable as they are, and a start goes on where some of it is odd."""

import shutil
from pathlib import Path

import pytest
from forked_runs import ForkedRuns, arguments, status
from tiny_run import metrics

pytestmark = [pytest.mark.distributed]


def test_the_record_of_a_run_is_flushed_before_each_checkpoint_and_its_holes_are_told(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """The lines that a power loss might take are taken here, and zeros are where it leaves them."""
    folder, flushes = tmp_path / "run", tmp_path / "flushes"
    settings = {"training__logging_steps": 1, "training__eval_samples": 4}
    command = arguments(folder, "fsdp", **settings)
    runs.run(command, ranks=2, faults=[{"kind": "written_flushes", "path": str(flushes)}]).ended_with(0)
    names = flushes.read_text().splitlines()
    commits = [place for place, name in enumerate(names) if name.startswith(".manifest.json.")]
    assert len(commits) == 2
    for earlier, commit in zip([0, *commits], commits, strict=False):
        assert {"metrics.jsonl", "ledger.jsonl"} <= {*names[earlier:commit]}

    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[2:]) + bytes(300))
    ledger = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(ledger + bytes(200) + b"\n{")
    (folder / "run.json").write_text("[1]")
    (cached,) = (folder / "evaluation").iterdir()
    cached.write_text("[1]")
    latest = folder / "checkpoints" / "latest"
    latest.unlink()
    shutil.copytree(folder / "checkpoints" / "final", latest)
    (folder / "stop").mkdir()

    fault = {"kind": "unread_metrics", "on_rank": 1}  # rank 0 alone reads them
    more = [*command, "training.num_train_steps=9", "--resume", "auto"]
    resumed = runs.run(more, ranks=2, faults=[fault]).ended_with(0)
    assert "metrics.jsonl has no line for 2 of the 6 logging steps before the checkpoint" in resumed.output
    assert "ledger.jsonl: 1 lines cannot be read and are left out" in resumed.output
    assert resumed.output.count(f"{cached} is damaged, and is made again") == 1
    assert "Traceback" not in resumed.output
    assert (folder / "ledger.jsonl").read_bytes().startswith(ledger + b"{")
    assert [line["step"] for line in metrics(folder) if "train/loss" in line] == [3, 4, 5, 6, 7, 8, 9]
    assert status(folder)["state"] == "completed"
    assert latest.is_symlink()

    again = runs.run([*command, "training.num_train_steps=10", "--resume", "auto"], ranks=2).ended_with(0)
    assert "has no line" not in again.output  # a hole is told once
