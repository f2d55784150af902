"""Real launchers around a rank that does nothing but join: the world it finds, and its end without its launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import QUICKSTART, TRAIN, overrides

from ds_encdec.launch.world import free_port

pytestmark = pytest.mark.launch

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

RANK = """
import dataclasses, json, os, sys, time
from datetime import timedelta
from pathlib import Path
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover

folder, waits = Path(sys.argv[-2]), sys.argv[-1] == "wait"
world = discover(os.environ)
device = choose_device("cpu", world)
init_process_group(world, device, timedelta(seconds=60), sys.argv[-3])
import torch, torch.distributed as dist
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
report = {**dataclasses.asdict(world), "sum": int(total), "backend": dist.get_backend(), "pid": os.getpid()}
with StopRequest(world, poll_seconds=0.1) as stop:
    (folder / f"rank{world.rank}.tmp").write_text(json.dumps(report))
    (folder / f"rank{world.rank}.tmp").rename(folder / f"rank{world.rank}.json")
    while waits and not stop.requested:
        time.sleep(0.05)
    (folder / f"reason{world.rank}").write_text(str(stop.reason))
shutdown()
"""


def command(launcher: str, script: Path) -> list[str]:
    port = str(free_port())
    return {
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", port, str(script)],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", port, str(script)],
        "hostfile": [
            *(str(BIN / "deepspeed"), "--hostfile", str(REPOSITORY / "hostfiles" / "localhost_cpu")),
            *("--no_ssh_check", "--master_addr", "127.0.0.1", "--master_port", port, str(script)),
        ],
    }[launcher]


def environment() -> dict[str, str]:
    """This process's environment, without what another launcher may have left in it."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_EXTENSIONS_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "PATH": f"{BIN}:{kept['PATH']}", "OMP_NUM_THREADS": "1"}


def start(launcher: str, folder: Path, *, wait: bool) -> subprocess.Popen[str]:
    script, engine = folder / "rank.py", "deepspeed" if launcher == "hostfile" else "fsdp"
    script.write_text(RANK)
    return subprocess.Popen(
        [*command(launcher, script), engine, str(folder), "wait" if wait else "go"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("launcher", "name"), [("torchrun", "torchrun"), ("hostfile", "deepspeed")])
def test_ranks_find_their_place(tmp_path: Path, launcher: str, name: str) -> None:
    process = start(launcher, tmp_path, wait=False)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert_placed(tmp_path, name)


def assert_placed(folder: Path, name: str) -> None:
    worlds = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, world in enumerate(worlds):
        assert (world["rank"], world["local_rank"], world["world_size"]) == (rank, rank, 2)
        assert (world["local_world_size"], world["num_nodes"], world["node_rank"]) == (2, 1, 0)
        assert (world["launcher"], world["backend"]) == (name, "gloo")
        assert world["sum"] == 3
    assert len({(world["master_addr"], world["master_port"]) for world in worlds}) == 1


def test_ranks_stop_when_deepspeed_itself_is_ended(tmp_path: Path) -> None:
    """DeepSpeed's single-node runner can tell nobody, and its ranks would train on as orphans."""
    process = start("deepspeed", tmp_path, wait=True)
    reports = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    try:
        wait_until(lambda: all(report.exists() for report in reports), 300, "the ranks to join")
        assert_placed(tmp_path, "deepspeed")
        ranks = [psutil.Process(json.loads(report.read_text())["pid"]) for report in reports]
        process.kill()
        wait_until(lambda: not any(is_running(rank) for rank in ranks), 120, "the ranks to end")
    finally:
        process.kill()
        process.wait()
    for rank in (0, 1):
        assert (tmp_path / f"reason{rank}").read_text() == f"launcher {process.pid} gone"


# A stand-in for torchrun on the first of two machines, where the second has not come.
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True).wait()
"""


def test_a_rank_does_not_wait_for_the_others_without_its_launcher(tmp_path: Path) -> None:
    """kill -9 of the launcher while its rank sits in the rendezvous: it would stay for the timeout, half an hour."""
    (tmp_path / "torchrun").write_text(LAUNCHER)
    port = free_port()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    meeting = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = [*overrides(tmp_path / "run", infra__distributed_type="fsdp", infra__offload_optimizer="none")]
    launcher = subprocess.Popen(
        [sys.executable, str(tmp_path / "torchrun"), TRAIN, "--config", QUICKSTART, *settings],
        env=environment() | {"TORCHELASTIC_RUN_ID": "none"} | place | meeting,
        start_new_session=True,
    )
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: listens(port), 300, "the rank to wait for the other")
        ranks = psutil.Process(launcher.pid).children()
        os.killpg(launcher.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(rank) for rank in ranks), 120, "the rank to end")
    finally:
        for process in (launcher, *ranks):
            process.kill()
        launcher.wait()
    assert not (tmp_path / "run").exists()


def listens(port: int) -> bool:
    with socket.socket() as visitor:
        return visitor.connect_ex(("127.0.0.1", port)) == 0


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition: object, seconds: float, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
