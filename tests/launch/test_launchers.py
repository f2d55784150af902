"""Real launchers: around a rank that does nothing but join, one that waits, a run without deepspeed, and phases."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tiny_run import (
    BIN,
    QUICKSTART,
    environment,
    is_running,
    launcher,
    metrics,
    overrides,
    run,
    wait_until,
)

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


TINY_PHASES = {
    "infra__distributed_type": "fsdp",  # torchrun: starts sooner than deepspeed
    "infra__num_gpus": 1,  # several ranks under it: test_watchdog.py
    "training__max_grad_norm": 1.0,
    "training__logging_steps": 1,
    "phases__sanity_check__num_train_steps": 4,
    "phases__sanity_check__max_loss_after_warmup": 9.0,
    "phases__sanity_check__min_loss_decrease": 0.0,
    "phases__validation__num_train_steps": 24,  # so many that a signal finds it training
    "phases__validation__logging_steps": 1,
    "phases__validation__save_steps": 1000,
    "phases__validation__max_loss_after_warmup": 9.0,
    "phases__validation__min_loss_decrease": 0.0,
}


def test_phases_stopped_and_gone_on_with(tmp_path: Path) -> None:
    first, second = (tmp_path / "run" / "phases" / phase for phase in ("sanity_check", "validation"))
    command = [str(BIN / "ds-encdec"), "phases", "--config", QUICKSTART, "--to", "validation"]
    command += overrides(tmp_path / "run", **TINY_PHASES)

    # Stopped in the second phase: saved, and no process left.
    started = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = second / "metrics.jsonl"
    wait_until(lambda: started.poll() is not None or (log.exists() and log.stat().st_size))
    below = psutil.Process(started.pid).children(recursive=True)
    os.kill(started.pid, signal.SIGTERM)
    text, _ = started.communicate(timeout=240)
    assert started.returncode == 75, text
    assert "phase sanity_check passed its gate" in text
    assert "error:" not in text
    assert not [process for process in below if is_running(process.pid)]
    assert json.loads((second / "run.json").read_text())["state"] == "preempted"
    assert not (second / "result.json").exists()

    # Once more: the first phase is left alone, the second continues.
    again = run(command, tmp_path)
    assert again.returncode == 0, again.stdout
    assert "phase sanity_check has passed its gate already" in again.stdout
    assert "resumed from" in again.stdout
    results = [json.loads((folder / "result.json").read_text()) for folder in (first, second)]
    assert [result["passed"] for result in results] == [True, True]
    assert [result["steps"] for result in results] == [4, 24]
    assert len({result["pipeline_initial_loss"] for result in results}) == 1

    # Weights were handed on: the second phase begins where the first one ended, not at the first one's beginning.
    ended, began = metrics(first), metrics(second)
    initial = results[0]["pipeline_initial_loss"]
    last = [line["train/loss"] for line in ended if "train/loss" in line][-1]
    assert abs(began[0]["train/loss"] - last) < abs(began[0]["train/loss"] - initial)
