"""Signals and vanished launchers, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import is_running, wait_until

from ds_encdec.launch import preemption
from ds_encdec.launch.preemption import SAME_CTRL_C_SECONDS, Heartbeat, StopRequest, launchers_above
from ds_encdec.launch.world import discover

SINGLE = discover({})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signal_asks_for_a_stop_and_the_first_reason_is_kept(number: signal.Signals) -> None:
    outside = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest(SINGLE) as stop:
            assert not stop.requested
            assert stop.reason is None
            os.kill(os.getpid(), number)
            assert stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reason == number.name
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def test_nohup_is_respected() -> None:
    outside = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(SINGLE) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, outside)


def test_second_ctrl_c_does_not_wait_for_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "SAME_CTRL_C_SECONDS", 0.5)
    with StopRequest(SINGLE) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, passed on by a launcher
        assert stop.requested
        time.sleep(0.6)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_only_launchers_are_watched() -> None:
    """pytest's own ancestors (a shell, make, a CI agent) may go without stopping the run."""
    assert launchers_above(os.getpid()) == []


def test_a_long_save_does_not_make_a_rank_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeat = Heartbeat()
    heartbeat.beat()
    now += 5
    with heartbeat.busy():
        now += 600
    heartbeat.beat()
    assert heartbeat.longest_pause_seconds == 5


# What the programs below have in common. `sleep_in_native_code` is what no signal interrupts, as in a collective.
PREAMBLE = """
import ctypes, dataclasses, os, signal, sys, time
from pathlib import Path
from ds_encdec.base.terminal import log_to_terminal
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import discover
folder, kind = Path(sys.argv[1]), sys.argv[2]
def sleep_in_native_code():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""

LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(rank.pid, flush=True)
sys.exit(rank.wait())
"""


class Started:
    """A program that was started with two arguments, a folder and a kind, and perhaps a launcher above it."""

    def __init__(self, folder: Path, program: str, kind: str, *, launched: bool = False, rank: int = 0) -> None:
        (folder / "program.py").write_text(PREAMBLE + program)
        (folder / "torchrun").write_text(LAUNCHER)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        above = [str(folder / "torchrun")] if launched else []
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, *above, str(folder / "program.py"), str(folder), kind],
            env=os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline()) if launched else self.process.pid

    def wait_for(self, name: str) -> None:
        wait_until(lambda: (self.folder / name).exists(), 60)


# A program that waits for other ranks as in a rendezvous.
PROGRAM = """
log_to_terminal(None, rank=int(os.environ.get("RANK", "0")), ranks=2)
with StopRequest(discover(os.environ), whole_process=True) as stop:
    (folder / "ready").touch()
    sleep_in_native_code()
"""


@pytest.mark.parametrize(
    ("number", "rank", "printed"),
    [
        (signal.SIGHUP, 0, "WARNING rank 0: Stopped before the ranks had met (SIGHUP)"),
        (signal.SIGTERM, 1, ""),  # its launcher stops it because another has failed, and has said why
    ],
)
def test_a_signal_before_the_ranks_have_met_ends_the_program(
    tmp_path: Path, number: signal.Signals, rank: int, printed: str
) -> None:
    program = Started(tmp_path, PROGRAM, "waits", rank=rank)
    program.wait_for("ready")
    program.process.send_signal(number)
    _, stderr = program.process.communicate(timeout=300)
    assert program.process.returncode == 75
    assert printed in stderr if printed else stderr == ""


def test_a_rank_does_not_wait_for_the_others_without_its_launcher(tmp_path: Path) -> None:
    program = Started(tmp_path, PROGRAM, "waits", launched=True)
    program.wait_for("ready")
    program.process.kill()
    wait_until(lambda: not is_running(program.pid), 60)


# A rank that writes what it sees, and hangs where a real one would sit in a collective.
RANK = """
world = dataclasses.replace(discover({}), launcher="torchrun")
with StopRequest(world, grace_seconds=0.2, poll_seconds=0.05) as stop:
    (folder / "ready").touch()
    while not stop.requested:
        time.sleep(0.02)
    (folder / "reason").write_text(stop.reason)
    time.sleep(60)
(folder / "saved").touch()
"""


@pytest.mark.parametrize("asked", [False, True])
def test_hanging_rank_ends_after_the_grace_period(tmp_path: Path, asked: bool) -> None:
    rank = Started(tmp_path, RANK, "hangs", launched=True)
    rank.wait_for("ready")
    if asked:
        os.kill(rank.pid, signal.SIGINT)
        rank.wait_for("reason")
    rank.process.kill()
    rank.process.wait()
    wait_until(lambda: not is_running(rank.pid), 20)  # without the watch it would sleep for a minute
    assert (tmp_path / "reason").read_text() == ("SIGINT" if asked else f"launcher {rank.process.pid} gone")
    assert rank.process.stderr is not None
    assert ("saving and stopping" in rank.process.stderr.read()) != asked
    assert not (tmp_path / "saved").exists()


# Ranks that got SIGTERM: one waits in native code, as in a collective, one is slow but takes its steps, one has seen
# the request and saves, one saves because of another's, one was saving before it was asked.
LOOP = """
with StopRequest(discover({}), poll_seconds=0.05, stuck_seconds=2) as stop:
    for step in range(3):
        assert not stop.requested
        time.sleep(2.0 if kind == "slow" else 0.01)
    stop.folder_is_known(None, (folder / "told").write_text)
    (folder / "ready").touch()
    if kind == "stuck":
        sleep_in_native_code()
    if kind == "busy":
        with stop.heartbeat.busy():
            time.sleep(3)
    time.sleep(0.5)
    if kind == "agreed":  # the other rank was asked first, and the answer of the exchange is what this one knows
        stop.has_seen = True
    else:
        assert stop.requested
    time.sleep(3 if kind in ("saving", "agreed") else 0)
(folder / "saved").touch()
"""


@pytest.mark.parametrize(("kind", "exit_code"), [("stuck", 8), ("slow", 0), ("saving", 0), ("agreed", 0), ("busy", 0)])
def test_sigterm_ends_a_rank_that_takes_no_steps(tmp_path: Path, kind: str, exit_code: int) -> None:
    loop = Started(tmp_path, LOOP, kind)
    loop.wait_for("ready")
    loop.process.terminate()
    assert loop.process.wait(20) == exit_code
    assert (tmp_path / "saved").exists() == (exit_code == 0)
    assert (tmp_path / "told").exists() == (exit_code == 8)


def test_second_ctrl_c_ends_a_rank_that_waits_for_others(tmp_path: Path) -> None:
    loop = Started(tmp_path, LOOP, "stuck")
    loop.wait_for("ready")
    loop.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        loop.process.wait(SAME_CTRL_C_SECONDS + 1)
    loop.process.send_signal(signal.SIGINT)
    assert loop.process.wait(20) == 8
