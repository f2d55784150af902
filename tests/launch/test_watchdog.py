"""Ranks that hang, also those that cannot end as others do, and ranks that only take their time."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_run import QUICKSTART, REPOSITORY, environment, free_port, launcher, overrides, run

pytestmark = pytest.mark.launch

# A rank of two. From its third step on rank 1 does what it is told to; the loop ends after the fifth.
RANK = """
import ctypes, os, signal, sys, time
from datetime import timedelta
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import init_process_group, shutdown
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.peers import Watchdog
from ds_encdec.launch.world import discover
import torch
output, kind, timeout_seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
world = discover(os.environ)
init_process_group(world, torch.device("cpu"), timedelta(seconds=300), "fsdp")
collectives = HostCollectives()

def takes_its_time():
    with stop.heartbeat.busy():
        time.sleep(2 * timeout_seconds)
    for _ in range(8):  # an evaluation
        time.sleep(0.3 * timeout_seconds)
        stop.heartbeat.beat()

act = {
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the lock": lambda: ctypes.PyDLL(None).sleep(600),
    "lives": takes_its_time,
}[kind]
run = RunFolder(output)
stop = StopRequest(world)
with stop, Watchdog(stop, timeout_seconds / 60, run, collectives, grace_seconds=2, poll_seconds=0.1):
    pause = 1.5 * timeout_seconds * (kind == "lives")
    time.sleep(pause)  # what comes before the first batch is no hang
    for step in range(5):
        if step == 2 and (world.rank == 1 or kind == "lives"):
            act()
        collectives.sum(stop.requested)
        time.sleep(0.2 if step else 0.2 + pause)  # nor is the first step, which may compile
        stop.heartbeat.step_over()
shutdown()
"""
TIMEOUT_SECONDS = 3.0


@pytest.mark.parametrize(
    ("kind", "codes", "reason"),
    [
        ("is stopped", [8, -signal.SIGKILL], "(rank 1 wrote none"),
        ("holds the lock", [8, 1], "no step for more than 3 s"),
        ("lives", [0, 0], None),  # saves, evaluations, and all until the first step is over, are no hangs
    ],
)
def test_a_rank_that_cannot_write_its_stacks_is_named_and_ends(
    tmp_path: Path, kind: str, codes: list[int], reason: str | None
) -> None:
    earlier = tmp_path / "run" / "stacks" / "20260101-000000"
    earlier.mkdir(parents=True)
    (earlier / "rank-1.txt").write_text("an earlier hang")
    (tmp_path / "rank.py").write_text(RANK)
    shared = environment() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    command = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "run"), kind, str(TIMEOUT_SECONDS)]
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    stderr = [ranks[0].communicate(timeout=300)[1]]
    if kind == "is stopped":  # as a launcher would once the other has ended
        ranks[1].kill()
    stderr.append(ranks[1].communicate(timeout=300)[1])
    assert [rank.returncode for rank in ranks] == codes, stderr
    written = [path.name for path in earlier.parent.glob("*/*") if path.parent != earlier]
    if reason is None:
        assert written == []
        assert not (tmp_path / "run" / "run.json").exists()
        return
    assert written == ["rank-0.txt"]
    assert reason in json.loads((tmp_path / "run" / "run.json").read_text())["reason"]
    if kind == "holds the lock":  # it speaks on stderr
        assert "Timeout" in stderr[1]
        assert "<lambda>" in stderr[1]


# train.py, but for one rank's loader, which returns four batches and no fifth.
HANGING_TRAIN = f"""
import itertools, os, sys, time
sys.path[0] = {str(REPOSITORY)!r}
from ds_encdec import train
from ds_encdec.data.loader import LaneLoader

numbers, next_batches, leave = itertools.count(1), LaneLoader.__next__, os._exit

def waits_for_the_fifth_batch(loader):
    if next(numbers) == 5:
        time.sleep(600)
    return next_batches(loader)

def leaves(code):
    with open(os.environ["RANK"] + ".left", "w") as file:
        file.write(str(code))
    leave(code)

os._exit = leaves
if os.environ["RANK"] == "1":
    LaneLoader.__next__ = waits_for_the_fifth_batch
os._exit(train.main())
"""


def test_a_rank_that_hangs_ends_a_whole_run_and_both_say_where(tmp_path: Path) -> None:
    """Under torchrun, which ends the others as soon as it sees one end, and looks more often than `deepspeed`."""
    (tmp_path / "train.py").write_text(HANGING_TRAIN)
    settings = overrides(tmp_path / "run", infra__distributed_type="deepspeed", infra__hang_timeout_minutes=0.1)
    command = [*launcher("torchrun", script=str(tmp_path / "train.py")), "--config", QUICKSTART, *settings]
    result = run(command, tmp_path)
    assert result.returncode != 0
    left = {path.name: path.read_text() for path in tmp_path.glob("*.left")}  # and no launcher had to kill them
    assert left == {"0.left": "8", "1.left": "8"}, result.stdout

    status = json.loads((tmp_path / "run" / "run.json").read_text())
    (stacks,) = (tmp_path / "run" / "stacks").iterdir()
    reason = f"no step for more than 6 s; stacks in {stacks}"
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 8, reason)
    assert {path.name for path in stacks.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    waits, hangs = ((stacks / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert waits.startswith("rank 0 of 2, process ")
    assert "in step" in waits  # it waits for the other in the step before
    assert "in waits_for_the_fifth_batch" in hangs
    heartbeats = [int(re.findall(r"heartbeat (\d+) was", text)[0]) for text in (waits, hangs)]
    assert heartbeats[0] > heartbeats[1], "which of them is behind"
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").exists()  # to go on from
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(tmp_path) in command] == []
