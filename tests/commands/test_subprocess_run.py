"""A subprocess gets the signals that its parent gets, and does not outlive it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from finished_runs import QUICKSTART

from ds_encdec.base.types import ConfigError
from ds_encdec.commands.phases import subprocess_run
from ds_encdec.commands.phases.subprocess_run import SubprocessRun, launcher_command
from ds_encdec.config.schema import load_config

SAVES_AND_STOPS = """
import pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.2)
    sys.exit(75)
signal.signal(int(sys.argv[2]), stop)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def run_and_signal(command: list[str], ready: Path, number: signal.Signals) -> int:
    def wait_and_send() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=wait_and_send)
    sender.start()
    with SubprocessRun() as started:
        code = started.run(command)
        assert started.signal_name == number.name
    sender.join()
    return code


def test_signals_are_handed_on(tmp_path: Path) -> None:
    number = signal.SIGINT
    ready, outside = tmp_path / "ready", signal.getsignal(number)
    assert run_and_signal([sys.executable, "-c", SAVES_AND_STOPS, str(ready), str(int(number))], ready, number) == 75
    assert signal.getsignal(number) == outside


def test_a_signal_goes_to_the_ranks_and_not_to_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, launcher, ready = (tmp_path / name for name in ("train.py", "torchrun", "ready"))
    rank.write_text(SAVES_AND_STOPS)
    monkeypatch.setattr(subprocess_run, "TRAIN_PROGRAM", rank)
    run_rest = "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode and 1)\n"
    launcher.write_text(run_rest)
    command = [sys.executable, str(launcher), str(rank), str(ready), str(int(signal.SIGTERM))]
    # As launchers do it makes 1 of the rank's 75, which is in run.json only.
    assert run_and_signal(command, ready, signal.SIGTERM) == 1
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(rank) in (process.info["cmdline"] or [])]


def test_srun_is_asked_by_a_signal_that_it_passes_on(tmp_path: Path) -> None:
    srun, ready = tmp_path / "srun", tmp_path / "ready"
    srun.write_text(f"#!/bin/bash\ntrap 'exit 3' USR1\ntouch {ready}\nwhile sleep 0.1; do :; done\n")
    srun.chmod(0o755)
    launcher = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"]
    assert run_and_signal([*launcher, str(srun)], ready, signal.SIGTERM) == 3


def test_ranks_that_start_one_after_the_other_are_all_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one starts when the first was seen; then the launcher is killed, as for a lack of memory."""
    rank, launcher, seen, ended = (tmp_path / name for name in ("train.py", "torchrun", "seen", "ended"))
    rank.write_text("import pathlib, sys, time\ntime.sleep(float(sys.argv[1]))\npathlib.Path(sys.argv[2]).touch()\n")
    launcher.write_text(f"""
import os, pathlib, signal, subprocess, sys, time
first = subprocess.Popen([sys.executable, {str(rank)!r}, "0.5", {os.devnull!r}])
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.01)
subprocess.Popen([sys.executable, {str(rank)!r}, "3", {str(ended)!r}])
first.wait()
time.sleep(0.6)
os.kill(os.getpid(), signal.SIGKILL)
""")

    def look(*arguments: Any) -> list[psutil.Process]:
        found = really_look(*arguments)
        if found:
            seen.touch()
        return found

    really_look = subprocess_run._below
    monkeypatch.setattr(subprocess_run, "TRAIN_PROGRAM", rank)
    monkeypatch.setattr(subprocess_run, "_below", look)
    with SubprocessRun() as started:
        assert started.run([sys.executable, str(launcher)]) == -signal.SIGKILL
    assert ended.exists()


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = [sys.executable, "-c", SAVES_AND_STOPS, str(ready), str(int(signal.SIGTERM))]
    parent_code = f"""
from ds_encdec.commands.phases.subprocess_run import SubprocessRun
with SubprocessRun() as subprocess_run:
    subprocess_run.run({child!r})
"""
    with subprocess.Popen([sys.executable, "-c", parent_code]) as parent:
        while not ready.exists():
            time.sleep(0.05)
        (process,) = psutil.Process(parent.pid).children()
        parent.kill()
    process.wait(timeout=10)
    assert not process.is_running()


def test_the_launcher() -> None:
    def words(*overrides: str) -> list[str]:
        return launcher_command(load_config(QUICKSTART, overrides), None)

    *_, script, quiet, level, option, ranks, port, _ = words()
    assert Path(script).name == "deepspeed"
    assert [quiet, level, option, ranks, port] == ["--log_level", "warning", "--num_gpus", "2", "--master_port"]
    assert words("infra.num_gpus=1") == [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert words("infra.distributed_type=fsdp") == torchrun
    srun = "env srun --ntasks-per-node 8"  # starts any program; what it starts may be a launcher itself
    for given, added in (("env A=1 deepspeed", []), (srun, [sys.executable, "-u"]), (f"{srun} torchrun", [])):
        assert launcher_command(load_config(QUICKSTART), given) == [*given.split(), *added]
    with pytest.raises(ConfigError, match="there is no such program"):
        launcher_command(load_config(QUICKSTART), "no-such-launcher -n 2")
