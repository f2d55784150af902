"""A whole run of two ranks under a launcher, one of which stops taking batches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from tiny_run import QUICKSTART, REPOSITORY, launcher, overrides, run

pytestmark = pytest.mark.launch

# train.py, but for one rank's loader, which hands out four batches and no fifth.
HANGING_TRAIN = f"""
import os, sys, time
sys.path[0] = {str(REPOSITORY)!r}
from ds_encdec import train
from ds_encdec.data.loader import LaneLoader

handed_out = 0
next_batches = LaneLoader.__next__

def waits_for_the_fifth_batch(loader):
    global handed_out
    handed_out += 1
    if handed_out == 5:
        time.sleep(600)
    return next_batches(loader)

def leaves(code):
    with open(os.environ["RANK"] + ".left", "w") as file:
        file.write(str(code))
    leave(code)

leave, os._exit = os._exit, leaves
if os.environ["RANK"] == "1":
    LaneLoader.__next__ = waits_for_the_fifth_batch
os._exit(train.main())
"""


def test_a_rank_that_hangs_ends_the_run_and_both_say_where(tmp_path: Path) -> None:
    """Under torchrun, which ends the others as soon as it sees one end, and looks more often than `deepspeed`."""
    (tmp_path / "train.py").write_text(HANGING_TRAIN)
    settings = overrides(tmp_path / "run", infra__distributed_type="deepspeed", infra__hang_timeout_minutes=0.1)
    result = run(
        [*launcher("torchrun", script=str(tmp_path / "train.py")), "--config", QUICKSTART, *settings], tmp_path
    )
    assert result.returncode != 0
    left = {path.name: path.read_text() for path in tmp_path.glob("*.left")}  # and no launcher had to kill them
    assert left == {"0.left": "8", "1.left": "8"}, result.stdout

    status = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 8), status
    (stacks,) = (tmp_path / "run" / "stacks").iterdir()
    assert status["reason"] == f"no step for more than 6 s; stacks in {stacks}"
    assert {path.name for path in stacks.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    waits, hangs = ((stacks / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert waits.startswith("rank 0 of 2, process ")
    assert "in step" in waits  # it waits for the other in the step before
    assert "in waits_for_the_fifth_batch" in hangs
    heartbeats = [int(re.findall(r"heartbeat (\d+) was", text)[0]) for text in (waits, hangs)]
    assert heartbeats[0] > heartbeats[1], "which of them is behind"
    assert result.stdout.count("exitcode  : 8") == 2, result.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").exists()  # to go on from
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(tmp_path) in command] == []
