"""Real launchers around a rank that does nothing but join: the world it finds, and its end without its launcher."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_run import QUICKSTART, TRAIN, environment, free_port, is_running, launcher, overrides, run, wait_until

pytestmark = pytest.mark.launch

RANK = """
import dataclasses, json, os, sys, time
from datetime import timedelta
from pathlib import Path
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover

folder, world = Path(sys.argv[-1]), discover(os.environ)
init_process_group(world, choose_device("cpu", world), timedelta(seconds=60), "deepspeed")
import torch, torch.distributed as dist
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
report = {**dataclasses.asdict(world), "sum": int(total), "backend": dist.get_backend(), "pid": os.getpid()}
with StopRequest(world, poll_seconds=0.1) as stop:
    (folder / f"rank{world.rank}.tmp").write_text(json.dumps(report))
    (folder / f"rank{world.rank}.tmp").rename(folder / f"rank{world.rank}.json")
    while not stop.requested:
        time.sleep(0.05)
    (folder / f"reason{world.rank}").write_text(str(stop.reason))
shutdown()
"""


def test_ranks_of_a_host_file_find_their_place_and_stop_when_deepspeed_itself_is_ended(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [*launcher("hostfile", script=str(tmp_path / "rank.py")), str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment())
    reports = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    try:
        wait_until(lambda: all(report.exists() for report in reports))
        worlds = [json.loads(report.read_text()) for report in reports]
        for rank, world in enumerate(worlds):
            assert (world["rank"], world["local_rank"], world["world_size"]) == (rank, rank, 2)
            assert (world["local_world_size"], world["num_nodes"], world["node_rank"]) == (2, 1, 0)
            assert (world["launcher"], world["backend"], world["sum"]) == ("deepspeed", "gloo", 3)
        assert len({(world["master_addr"], world["master_port"]) for world in worlds}) == 1
        process.kill()
        wait_until(lambda: not any(is_running(world["pid"]) for world in worlds), 120)
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
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "torchrun"), TRAIN, "--config", QUICKSTART, *settings],
        env=environment() | {"TORCHELASTIC_RUN_ID": "none"} | place | meeting,
        start_new_session=True,
    )
    rank: psutil.Process | None = None
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        (rank,) = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(rank.pid), 120)
    finally:
        for started in (process, *([rank] if rank else [])):
            started.kill()
        process.wait()
    assert not (tmp_path / "run").exists()


BLOCKED = """
import json, os, sys
sys.modules["deepspeed"] = None  # what an import finds where it is not installed
from ds_encdec import train
from ds_encdec.training import build
from ds_encdec.engine import fsdp2
for words in json.loads(sys.argv[1]):
    if not (process := os.fork()):  # with all that is imported by now
        os._exit(train.main(words))
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_run_without_deepspeed(tmp_path: Path) -> None:
    runs = [overrides(tmp_path / "refused"), overrides(tmp_path / "run", infra__distributed_type="auto")]
    said = run(
        [sys.executable, "-c", BLOCKED, json.dumps([["--config", QUICKSTART, *words] for words in runs])], tmp_path
    )
    refused, finished, rest = re.split(r"ended with (?=\d)", said.stdout)
    assert "deepspeed is not installed" in refused
    assert finished.startswith("2\n")
    assert "deepspeed is not installed. Training with FSDP2" in finished
    assert rest == "0\n", said.stdout
