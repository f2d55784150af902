"""A rank that torchrun starts again is run by the process that stood by for it."""

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from tiny_run import environment, is_running, launcher, metrics, overrides, wait_until

from ds_encdec.launch.standby import keep_standby

pytestmark = pytest.mark.launch


def test_a_standby_becomes_the_rank_that_torchrun_starts_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = launcher("torchrun")
    command[1:1] = ["--max-restarts", "2"]
    settings = overrides(
        run,
        infra__distributed_type="fsdp",
        infra__offload_optimizer="none",
        training__num_train_steps=1_000_000,
        training__save_steps=5,
        training__logging_steps=1,
        training__eval_samples=0,
        training__report_to="none",
    )
    log = (tmp_path / "log").open("w")
    torchrun = subprocess.Popen(
        [*command, "--config", "quickstart", *settings, "--resume", "auto"],
        env=environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def sockets() -> list[str]:
        of_all = Path("/proc/net/unix").read_text().split()
        return [name for name in of_all if name.startswith(f"@ds_encdec-standby-{torchrun.pid}-")]

    def newest_step() -> int:
        return metrics(run)[-1]["step"] if (run / "metrics.jsonl").exists() and metrics(run) else 0

    try:
        wait_until(lambda: len(sockets()) == 2 and list(run.glob("checkpoints/step-????????")))
        ranks = {child.pid: child for child in psutil.Process(torchrun.pid).children()}
        standbys = {child.pid for child in psutil.process_iter() if _stands_by(child)}
        assert len(standbys) == 2
        before = newest_step()
        next(child for pid, child in ranks.items() if pid != _main_rank(run)).kill()
        wait_until(lambda: _main_rank(run) in standbys and newest_step() > before)
        steps = [line["step"] for line in metrics(run)]
        assert steps == list(range(1, steps[-1] + 1))

        # Those that torchrun knows are others now; what it sends them reaches the ranks.
        assert _main_rank(run) not in {child.pid for child in psutil.Process(torchrun.pid).children()}
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(timeout=120)
        status = json.loads((run / "run.json").read_text())
        assert (status["state"], status["exit_code"]) == ("preempted", 75)
        wait_until(lambda: not any(map(is_running, standbys)) and not sockets())
    finally:
        torchrun.kill()
        print((tmp_path / "log").read_text()[-3000:])


def test_a_standby_takes_its_rank_from_a_child_of_its_torchrun_alone(tmp_path: Path) -> None:
    """This process is the torchrun, and no child of itself."""
    agent, variables = psutil.Process(), environment() | {"LOCAL_RANK": "9"}
    address = f"\0ds_encdec-standby-{agent.pid}-{agent.create_time():.2f}-9"
    command = [*launcher("python"), "--config", "quickstart", "--print-config"]
    order = json.dumps({"torchrun": agent.pid, "address": address, "modules": []})
    standby = subprocess.Popen(launcher("python"), env=variables | {"DS_ENCDEC_STANDS_BY": order})
    try:
        wait_until(lambda: f"@{address[1:]}" in Path("/proc/net/unix").read_text())
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.connect(address)
            rank = {"arguments": command[1:], "folder": str(tmp_path), "environment": variables}
            socket.send_fds(foreign, [json.dumps(rank).encode() + b"\n"], [0, 1, 2])
            run = subprocess.run(
                command, env=variables | {"TORCHELASTIC_MAX_RESTARTS": "1"}, stdout=subprocess.PIPE, text=True
            )
            assert run.returncode == standby.wait(timeout=120) == 0
            assert "num_train_steps" in run.stdout  # printed by the standby
            with pytest.raises(ConnectionResetError):  # closed, with what it sent unread
                foreign.recv(1)
    finally:
        standby.kill()


def test_no_standby_waits_for_a_torchrun_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is the rank, and what has started it is no launcher."""
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    keep_standby(str(tmp_path), lambda: True)
    for thread in threading.enumerate():
        thread.join() if thread.name == "keep-standby" else None
    assert started == []


def _main_rank(run: Path) -> int:
    words = (run / ".lock").read_text().split()  # none while the next start writes
    return int(words[1]) if words else 0


def _stands_by(process: psutil.Process) -> bool:
    try:
        return "DS_ENCDEC_STANDS_BY" in process.environ() and process.ppid() != os.getpid()
    except psutil.Error:
        return False
