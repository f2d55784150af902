"""Asked to stop: signals, and a launcher that is gone.

Schedulers send SIGTERM or SIGUSR1, a person SIGINT. They reach the ranks at different moments, and
some ranks not at all, so the loop exchanges `StopRequest.requested` between ranks once per step and
acts on the common answer. A launcher killed outright tells nobody: with `deepspeed` on one node, even
SIGTERM ends the launcher and leaves the ranks running, so every rank watches for its launchers itself.

A rank whose peer has died may sit in a collective for ever. DeepSpeed's launcher then sends SIGTERM to one rank after
the other and gives each 30 seconds; a rank that has not taken a step for a while ends at its SIGTERM instead, unless
it is saving.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import psutil

from ds_encdec.launch.signs_of_life import SignsOfLife
from ds_encdec.launch.world import SINGLE_PROCESS, World
from ds_encdec.types import HangError

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

LAUNCHER_PROGRAMS = ("deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run")
"""Scripts and modules whose python processes are launchers."""


SAME_CTRL_C_SECONDS = 2.0
"""One Ctrl-C reaches a rank from the terminal, and again from a launcher that passes it on."""


class StopRequest:
    """Notices that this run should end. Use as a context manager around the loop, in the main thread.

    The loop asks `requested` once per step: that is also its sign of `life`. `grace_seconds`: how long the process may
    live on, to save itself, after its launcher is gone. `stuck_seconds`: how long after its last sign of life SIGTERM
    finds a rank stuck (never less than twice its longest pause so far, which may be an evaluation); a rank that is
    `busy`, or has seen the request and is on its way out, has all the time it needs. Either way the process is ended
    with HangError's exit code, since nothing else would end it.
    """

    def __init__(
        self,
        world: World,
        grace_seconds: float = 300.0,
        poll_seconds: float = 2.0,
        stuck_seconds: float = 60.0,
    ) -> None:
        self._launchers = [] if world.launcher == SINGLE_PROCESS else launchers_above(os.getpid())
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._stuck_seconds = stuck_seconds
        self._reason: str | None = None
        self._signalled_at = 0.0
        self._terminated = False
        self._arrivals, self._noted = socket.socketpair()
        self._arrivals.setblocking(False)
        self._noted.setblocking(False)  # as set_wakeup_fd demands
        self._previous_wakeup_fd = -1
        self._seen = False
        self.life = SignsOfLife()
        self._left = threading.Event()
        self._previous_handlers: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """True from the first signal, or from the launcher's end, on. Of this rank: exchange it."""
        self.life.give()
        self._seen = self._reason is not None
        return self._seen

    def busy(self) -> AbstractContextManager[None]:
        """Wraps a save, or waiting for one: however long it takes, the rank is not stuck."""
        return self.life.busy()

    def acknowledge(self) -> None:
        """The ranks have agreed to stop, whoever was asked first: this one may take its time to save."""
        self._seen = True

    @property
    def reason(self) -> str | None:
        """What asked this rank to stop, for the log and `run.json`."""
        return self._reason

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the run is meant to outlive its terminal
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._noted.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        signal.set_wakeup_fd(self._previous_wakeup_fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._reason is not None and number == signal.SIGINT and now - self._signalled_at > SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt  # the second Ctrl-C: now, without a checkpoint
        self._signalled_at = now
        self._reason = self._reason or signal.Signals(number).name
        self._terminated = self._terminated or number == signal.SIGTERM

    def _watch(self) -> None:
        """Look after launchers and signs of life, in a thread: the main one may sit in a collective for ever."""
        while not self._left.wait(self._poll_seconds):
            gone = [launcher for launcher in self._launchers if not is_alive(launcher)]
            if gone:
                self._reason = self._reason or f"launcher {gone[0].pid} gone"
                logger.error("The launcher (process %d) is gone: saving and stopping.", gone[0].pid)
                if not self._left.wait(self._grace_seconds):
                    self._end(f"Still running {self._grace_seconds:.0f} s after the launcher went")
                return
            self._terminated = self._terminated or signal.SIGTERM in self._arrived()
            if self._seen or not self._terminated:
                continue
            silent_seconds = self.life.silent_seconds
            if silent_seconds > self._patience_seconds():
                self._end(f"Asked to stop, and no step for {silent_seconds:.0f} s: another rank is probably gone")

    def _arrived(self) -> bytes:
        """The numbers of the signals that have come since the last call.

        Python calls a handler only once the main thread is back from native code. One that waits in a collective does
        not come back; the interpreter's own handler has written the number down nevertheless.
        """
        try:
            return self._arrivals.recv(4096)
        except BlockingIOError:
            return b""

    def _patience_seconds(self) -> float:
        return max(self._stuck_seconds, 2 * self.life.longest_pause_seconds)

    def _end(self, why: str) -> None:
        logger.error("%s: ending.", why)
        end_hanging_process()


def end_hanging_process(exit_code: int = HangError.exit_code) -> NoReturn:
    """End this process, whose main thread may never return, with `exit_code`; and its children.

    A data worker ends at its next write after its parent's death, which one that hangs itself never makes.
    """
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    for child in children:
        with suppress(psutil.Error):  # gone meanwhile
            child.kill()
    os._exit(exit_code)


def launchers_above(pid: int) -> list[psutil.Process]:
    """The launcher processes that `pid` descends from, nearest first.

    DeepSpeed has two on a node (`deepspeed` and `deepspeed.launcher.launch`), and it is the far one that a
    terminal or a scheduler ends. Shells and ssh above them may go without harm, so the walk
    stops at the first ancestor that is no launcher.
    """
    found: list[psutil.Process] = []
    for ancestor in psutil.Process(pid).parents():
        try:
            interpreter, *arguments = ancestor.cmdline() or [""]
        except psutil.Error:
            break
        program = {Path(argument).name for argument in arguments[:3]}  # after python's own -u and -m
        if not Path(interpreter).name.startswith("python") or program.isdisjoint(LAUNCHER_PROGRAMS):
            break
        found.append(ancestor)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process (not a later one with its id) still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
