"""Asked to stop: signals, and a launcher that is gone.

Schedulers send SIGTERM or SIGUSR1, a person SIGINT. They reach the ranks at different moments, and
some ranks not at all, so the loop exchanges `StopRequest.requested` between ranks once per step and
acts on the common answer. A launcher killed outright tells nobody: with `deepspeed` on one node, even
SIGTERM ends the launcher and leaves the ranks running, so every rank watches for its launchers itself.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from ds_encdec.launch.world import SINGLE_PROCESS, World
from ds_encdec.types import HangError

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

LAUNCHER_PROGRAMS = ("deepspeed", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run")
"""Scripts and modules whose python processes are launchers."""


class StopRequest:
    """Notices that this run should end. Use as a context manager around the loop, in the main thread.

    `grace_seconds`: how long the process may live on, to save itself, after its launcher is gone;
    then it is ended with HangError's exit code, since nothing else would end it.
    """

    def __init__(self, world: World, grace_seconds: float = 300.0, poll_seconds: float = 2.0) -> None:
        self._launchers = [] if world.launcher == SINGLE_PROCESS else launchers_above(os.getpid())
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._reason: str | None = None
        self._left = threading.Event()
        self._previous_handlers: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """True from the first signal, or from the launcher's end, on. Of this rank: exchange it."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """What asked this rank to stop, for the log and `run.json`."""
        return self._reason

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        if self._launchers:
            threading.Thread(target=self._watch_launchers, name="launcher-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt  # the second Ctrl-C: now, without a checkpoint
        self._reason = self._reason or signal.Signals(number).name

    def _watch_launchers(self) -> None:
        while not self._left.wait(self._poll_seconds):
            gone = [launcher for launcher in self._launchers if not is_alive(launcher)]
            if gone:
                self._reason = self._reason or f"launcher {gone[0].pid} gone"
                logger.error("The launcher (process %d) is gone: saving and stopping.", gone[0].pid)
                if not self._left.wait(self._grace_seconds):
                    logger.error("Still running %.0f s after the launcher went: ending.", self._grace_seconds)
                    os._exit(HangError.exit_code)  # the main thread may sit in a collective for ever
                return


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
