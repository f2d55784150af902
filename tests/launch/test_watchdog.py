"""Ranks that hang and cannot end as others do, and ranks that only take their time. A hang: test_hanging_runs.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def run_ranks(folder: Path, kind: str) -> tuple[list[int | None], list[str]]:
    """Both ranks' exit codes and stderr. As a launcher would, kill the one that cannot end once the other has: None."""
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
    return codes, stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run in it that hung at an earlier start."""
    earlier = tmp_path / "run" / "stacks" / "20260101-000000"
    earlier.mkdir(parents=True)
    (earlier / "rank-1.txt").write_text("an earlier hang")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "codes", "reason"),
    [("is stopped", [8, None], "(rank 1 wrote none"), ("holds the lock", [8, 1], "no step for more than 3 s")],
)
def test_a_rank_that_cannot_write_its_stacks_is_named_and_ends(
    folder: Path, kind: str, codes: list[int | None], reason: str
) -> None:
    ended, stderr = run_ranks(folder, kind)
    assert ended == codes, stderr
    (now,) = [path for path in (folder / "run" / "stacks").iterdir() if path.name != "20260101-000000"]
    assert [path.name for path in now.iterdir()] == ["rank-0.txt"]
    assert reason in json.loads((folder / "run" / "run.json").read_text())["reason"]
    if kind == "holds the lock":  # it speaks on stderr
        assert "Timeout" in stderr[1]
        assert "<lambda>" in stderr[1]


def test_saves_evaluations_and_all_until_the_first_step_is_over_are_no_hangs(folder: Path) -> None:
    codes, stderr = run_ranks(folder, "lives")
    assert codes == [0, 0], stderr
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
