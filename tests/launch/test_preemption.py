"""Signals and vanished launchers, with real processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ds_encdec.launch import preemption
from ds_encdec.launch.preemption import SAME_CTRL_C_SECONDS, STOP_SIGNALS, StopRequest, launchers_above
from ds_encdec.launch.world import discover

SINGLE = discover({})


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_asks_for_a_stop(number: signal.Signals) -> None:
    outside = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest(SINGLE) as stop:
            assert not stop.requested
            assert stop.reason is None
            os.kill(os.getpid(), number)
            assert stop.requested
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


def test_first_reason_is_kept() -> None:
    with StopRequest(SINGLE) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGUSR1"


# A program from its first line on: it waits for other ranks as in a rendezvous, in native code that no signal
# interrupts, or it is over, with its process still there.
PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ds_encdec.launch.preemption import STOP_SIGNALS, StopRequest
from ds_encdec.launch.world import discover
from ds_encdec.base.terminal import log_to_terminal
log_to_terminal(None, rank=int(os.environ.get("RANK", "0")), ranks=2)
folder, kind = Path(sys.argv[1]), sys.argv[2]
(folder / "started").touch()
while kind == "late" and not (folder / "launcher gone").exists():
    time.sleep(0.02)
with StopRequest(discover(os.environ), whole_process=True) as stop:
    (folder / "ready").touch()
    if kind != "over":
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    stop.ranks_have_met()
for number in STOP_SIGNALS:
    os.kill(os.getpid(), number)
"""


def start_program(
    folder: Path, kind: str, *, under: tuple[str, ...] = (), rank: int | None = None
) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, *under, str(folder / "program.py"), str(folder), kind]
    number = str(rank or 0)
    place = {"TORCHELASTIC_RUN_ID": "none", "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environ = os.environ | place | address if under or rank is not None else os.environ
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_ranks_have_met_ends_the_program(tmp_path: Path, number: signal.Signals) -> None:
    program = start_program(tmp_path, "waits")
    wait_for(tmp_path / "ready")
    program.send_signal(number)
    assert program.wait(timeout=300) == 75


@pytest.mark.parametrize(("rank", "said"), [(0, "WARNING rank 0: Stopped before the ranks had met (SIGTERM)"), (1, "")])
def test_ranks_that_a_launcher_stops_log_no_error(tmp_path: Path, rank: int, said: str) -> None:
    """The launcher stops them because another has failed, and that one has said why."""
    program = start_program(tmp_path, "waits", rank=rank)
    wait_for(tmp_path / "ready")
    program.terminate()
    _, stderr = program.communicate(timeout=300)
    assert (program.returncode, said in stderr.decode(), "ERROR" in stderr.decode()) == (75, True, False)
    assert bool(stderr) is bool(said)


def test_signals_after_a_good_end_change_nothing(tmp_path: Path) -> None:
    assert start_program(tmp_path, "over").wait(timeout=300) == 0


@pytest.mark.parametrize("kind", ["waits", "late"])
def test_a_program_without_its_launcher_ends(tmp_path: Path, kind: str) -> None:
    """Also one whose launcher was gone before it could look for it."""
    (tmp_path / "torchrun").write_text(LAUNCHER)
    launcher = start_program(tmp_path, kind, under=(str(tmp_path / "torchrun"),))
    assert launcher.stdout is not None
    program = int(launcher.stdout.readline())
    wait_for(tmp_path / ("started" if kind == "late" else "ready"))
    launcher.kill()
    launcher.wait()
    if kind == "late" and psutil.Process(program).ppid() != 1:
        os.kill(program, signal.SIGKILL)
        pytest.skip("here another process than the first adopts orphans: who is one is not known")
    (tmp_path / "launcher gone").touch()
    wait_until_gone(program)


# A rank: it writes what it sees, and hangs where a real one would sit in a collective.
RANK = """
import dataclasses, sys, time
from pathlib import Path
from ds_encdec.launch import preemption
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import discover
folder, grace = Path(sys.argv[1]), float(sys.argv[2])
world = dataclasses.replace(discover({}), launcher="torchrun")
with StopRequest(world, grace_seconds=grace, poll_seconds=0.05) as stop:
    (folder / "ready").touch()
    while not stop.requested:
        time.sleep(0.02)
    (folder / "reason").write_text(stop.reason)
    time.sleep(60 if grace < 10 else 0)
(folder / "saved").touch()
"""

LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(rank.pid, flush=True)
sys.exit(rank.wait())
"""


def wait_for(path: Path, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


def launch(folder: Path, grace_seconds: float) -> tuple[subprocess.Popen[bytes], int]:
    """Start a launcher with one rank below it; returns the launcher and the rank's process id."""
    (folder / "rank.py").write_text(RANK)
    (folder / "torchrun").write_text(LAUNCHER)
    command = [sys.executable, str(folder / "torchrun"), str(folder / "rank.py"), str(folder), str(grace_seconds)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    wait_for(folder / "ready")
    return launcher, rank


def wait_until_gone(pid: int, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_rank_saves_itself_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher, rank = launch(tmp_path, grace_seconds=30)
    launcher.kill()
    launcher.wait()
    wait_for(tmp_path / "saved")
    assert (tmp_path / "reason").read_text() == f"launcher {launcher.pid} gone"
    wait_until_gone(rank)


@pytest.mark.parametrize("asked", [False, True])
def test_hanging_rank_ends_after_the_grace_period(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], asked: bool
) -> None:
    """The end of the launcher is an error only where nobody had asked the run to stop."""
    launcher, rank = launch(tmp_path, grace_seconds=0.2)
    if asked:
        os.kill(rank, signal.SIGINT)
        wait_for(tmp_path / "reason")
    launcher.kill()
    launcher.wait()
    wait_until_gone(rank, seconds=20)  # without the watch it would sleep for a minute
    assert ("saving and stopping" in capfd.readouterr().err) != asked
    assert not (tmp_path / "saved").exists()


# Ranks that got SIGTERM: one waits in native code, as in a collective, one is slow but takes its steps, one has seen
# the request and saves, one saves because of another's, one was saving before it was asked.
LOOP = """
import ctypes, sys, time
from pathlib import Path
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import discover
folder, kind = Path(sys.argv[1]), sys.argv[2]
class Hanging(type(folder)):
    def exists(self, **_):
        time.sleep(100)
with StopRequest(discover({}), poll_seconds=0.05, stuck_seconds=2) as stop:
    stop_file = Hanging("stop") if kind == "stuck" else None  # a network's file system, whose server is gone, too
    for step in range(3):
        assert not stop.requested
        time.sleep(2.0 if kind == "slow" else 0.01)
    stop.folder_is_known(stop_file, (folder / "told").write_text)
    (folder / "ready").touch()
    if kind == "stuck":
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
    if kind == "busy":
        with stop.heartbeat.busy():
            time.sleep(3)
    time.sleep(0.5)
    if kind == "agreed":  # the other rank was asked first, and the answer of the exchange is what this one knows
        stop.acknowledge()
    else:
        assert stop.requested
    time.sleep(3 if kind in ("saving", "agreed") else 0)
(folder / "saved").touch()
"""


@pytest.mark.parametrize(("kind", "exit_code"), [("stuck", 8), ("slow", 0), ("saving", 0), ("agreed", 0), ("busy", 0)])
def test_sigterm_ends_a_rank_that_takes_no_steps(tmp_path: Path, kind: str, exit_code: int) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    rank = subprocess.Popen([sys.executable, str(tmp_path / "loop.py"), str(tmp_path), kind])
    try:
        wait_for(tmp_path / "ready")
        rank.terminate()
        assert rank.wait(timeout=20) == exit_code
    finally:
        rank.kill()
        rank.wait()
    assert (tmp_path / "saved").exists() == (exit_code == 0)
    assert (tmp_path / "told").exists() == (exit_code == 8)


def test_second_ctrl_c_ends_a_rank_that_waits_for_others(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    rank = subprocess.Popen([sys.executable, str(tmp_path / "loop.py"), str(tmp_path), "stuck"])
    try:
        wait_for(tmp_path / "ready")
        rank.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=SAME_CTRL_C_SECONDS + 1)
        rank.send_signal(signal.SIGINT)
        assert rank.wait(timeout=20) == 8
    finally:
        rank.kill()
        rank.wait()


def test_only_launchers_are_watched() -> None:
    """pytest's own ancestors (a shell, make, a CI agent) may go without stopping the run."""
    assert launchers_above(os.getpid()) == []
    assert StopRequest(dataclasses.replace(SINGLE, launcher="deepspeed")).requested is False


def test_a_long_save_does_not_make_a_rank_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs after it is found as soon as before it."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = StopRequest(SINGLE, stuck_seconds=2)
    assert not stop.requested
    now += 5
    with stop.heartbeat.busy():
        now += 600
    assert not stop.requested
    assert stop.patience_seconds == 10
