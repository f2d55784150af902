"""A run that hangs: real ranks that wait for one another, each of which says what it was doing, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_run import environment, free_port

from ds_encdec.launch import peers
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.peers import Watchdog
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import World

pytestmark = pytest.mark.launch

# A rank of two. From its third step on rank 1 does what it is told to; the loop ends after the fifth.
RANK = """
import ctypes, os, signal, subprocess, sys, time
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

def waits_for_a_batch_for_ever():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as a data worker that hangs would
    time.sleep(600)

def takes_its_time():
    with stop.heartbeat.busy():
        time.sleep(2 * timeout_seconds)
    for _ in range(8):  # an evaluation
        time.sleep(0.3 * timeout_seconds)
        stop.heartbeat.beat()

act = {
    "hangs": waits_for_a_batch_for_ever,
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


@dataclass(frozen=True)
class Ended:
    """Both ranks' exit codes and stderr; None for the rank that had to be killed."""

    codes: list[int | None]
    stderr: list[str]


def run_ranks(folder: Path, kind: str) -> Ended:
    """Both ranks to their ends. As a launcher would, kill the one that cannot end once the other has."""
    (folder / "rank.py").write_text(RANK)
    shared = environment() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    command = [sys.executable, str(folder / "rank.py"), str(folder / "run"), kind, str(TIMEOUT_SECONDS)]
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    codes: list[int | None] = []
    stderr = []
    for rank in ranks:
        is_stopped = bool(codes) and kind == "is stopped"
        if is_stopped:
            rank.kill()
        stderr.append(rank.communicate(timeout=300)[1])
        codes.append(None if is_stopped else rank.returncode)
    return Ended(codes, stderr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run in it that hung at an earlier start."""
    earlier = tmp_path / "run" / "stacks" / "20260101-000000"
    earlier.mkdir(parents=True)
    (earlier / "rank-1.txt").write_text("an earlier hang")
    return tmp_path


def stacks_of(folder: Path) -> dict[str, str]:
    """The text that each rank wrote at this start of the run."""
    (now,) = [path for path in (folder / "run" / "stacks").iterdir() if path.name != "20260101-000000"]
    return {path.name: path.read_text() for path in now.iterdir()}


def test_both_ranks_say_where_one_hangs(folder: Path) -> None:
    ended = run_ranks(folder, "hangs")
    assert ended.codes == [8, 8], ended.stderr
    stacks = stacks_of(folder)
    assert set(stacks) == {"rank-0.txt", "rank-1.txt"}
    assert "waits_for_a_batch_for_ever" in stacks["rank-1.txt"]
    assert "host_collectives.py" in stacks["rank-0.txt"]
    assert stacks["rank-0.txt"].startswith("rank 0 of 2, process ")
    assert "heartbeat 3 was" in stacks["rank-0.txt"]
    assert "heartbeat 2 was" in stacks["rank-1.txt"]  # who is behind
    assert "watchdog" in stacks["rank-0.txt"]
    status = json.loads((folder / "run" / "run.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 8)
    assert status["reason"].startswith("no step for more than 3 s; stacks in ")
    assert "wrote none" not in status["reason"]


def test_a_stopped_rank_is_named(folder: Path) -> None:
    ended = run_ranks(folder, "is stopped")
    assert ended.codes == [8, None]
    assert set(stacks_of(folder)) == {"rank-0.txt"}
    assert "(rank 1 wrote none" in json.loads((folder / "run" / "run.json").read_text())["reason"]


def test_a_rank_that_holds_the_lock_speaks_on_stderr_and_ends(folder: Path) -> None:
    ended = run_ranks(folder, "holds the lock")
    assert ended.codes == [8, 1]
    assert set(stacks_of(folder)) == {"rank-0.txt"}
    assert "Timeout" in ended.stderr[1]
    assert "<lambda>" in ended.stderr[1]


def test_saves_evaluations_and_all_until_the_first_step_is_over_are_no_hangs(folder: Path) -> None:
    ended = run_ranks(folder, "lives")
    assert ended.codes == [0, 0], ended.stderr
    assert [path.name for path in (folder / "run" / "stacks").iterdir()] == ["20260101-000000"]
    assert not (folder / "run" / "run.json").exists()


def test_one_rank_of_a_node_looks_at_the_shared_folder_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks, over eight turns: each looks once, and all do once one of them has been told."""
    looked: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(peers.os, "listdir", lambda path: looked.append(str(path)) or listdir(path))
    dogs = []
    for rank in range(8):
        stop = StopRequest(World(rank=rank, local_rank=rank, world_size=8, local_world_size=8))
        dog = Watchdog(stop, 1.0, RunFolder(str(tmp_path)), HostCollectives())
        dog.stacks, dog._sign, dog._world_size = tmp_path / "stacks", tmp_path / "sign", 8
        dogs.append(dog)
    for _ in range(8):
        assert not any(dog._others_end() for dog in dogs)
    assert looked == [str(tmp_path / "stacks")] * 8
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank-9.txt").touch()  # nobody of this run
    assert sum(dog._others_end() for dog in dogs) == 0
    (tmp_path / "stacks" / "rank-3.txt").touch()
    assert sum(dog._others_end() for dog in dogs) == 1
    (tmp_path / "sign").touch()
    assert all(dog._others_end() for dog in dogs)
