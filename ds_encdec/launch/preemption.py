"""Notices that a run should stop: by a signal, a launcher that is gone, or a stop file.

Signals reach the ranks at different moments, or not at all, so the loop exchanges `StopRequest.requested` once per step
and acts on the common answer. A killed launcher sends no signal, so every rank watches its launchers. A rank whose peer
has died may sit in a collective for ever: without a step for a while it ends at its SIGTERM, unless it is saving."""

import faulthandler
import itertools
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self, TypeVar

import psutil

from ds_encdec.base.types import HangError, Preempted
from ds_encdec.launch.world import LAUNCHER_PROGRAMS, SINGLE_PROCESS, World

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# The reason of a run that its stop file ended. `scripts/supervise.sh` does not start such a run again.
BY_FILE = "ds-encdec stop"
# Set in a standby that is a rank: the number of the process that the launcher knows (standby.py).
SHELL = "DS_ENCDEC_SHELL"
# Within this time two SIGINTs are one Ctrl-C: from the terminal, and from a launcher that passes it on.
SAME_CTRL_C_SECONDS = 2.0


class Heartbeat:
    """Records when this rank last showed that it lives: the main thread beats once per step and per evaluation batch.
    `beats`: their number. `has_stepped`: a step of this process is over. `longest_pause_seconds`: the longest time
    between two beats, without saves."""

    def __init__(self) -> None:
        self.beats = 0
        self.has_stepped = False
        self.longest_pause_seconds = 0.0
        self._last = time.monotonic()
        self._busy_depth = 0

    def beat(self) -> None:
        """Show now that this rank lives."""
        self._end_pause()
        self.beats += 1

    def step_over(self) -> None:
        """Record a step: from the first on, a watchdog takes silence for a hang."""
        self.has_stepped, self._last = True, time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the rank from counting as stuck during a save, or a wait for one, however long."""
        self._end_pause()
        self._busy_depth += 1
        try:
            yield
        finally:
            self._last = time.monotonic()  # before the depth falls: a save does not count as a pause
            self._busy_depth -= 1

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last beat, or else the start; 0 while the rank is busy."""
        return 0.0 if self._busy_depth else time.monotonic() - self._last

    def _end_pause(self) -> None:
        now = time.monotonic()
        if self.beats:  # the start of the run, before the first, does not count
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - self._last)
        self._last = now


@dataclass(eq=False)
class StopRequest:
    """Notices that this run should end; a context manager around the run, in the main thread. The loop reads
    `requested` once per step, which is also its heartbeat. `has_seen`: this rank knows of the request, its own or
    another rank's, and may take its time to save. `grace_seconds`: how long the process may live on, to save, after its
    launcher is gone. `stuck_seconds`: how long after its last heartbeat SIGTERM finds a rank stuck (at least twice its
    longest pause so far), unless it is `busy` or has seen the request. Either way the process ends with HangError's
    exit code, since nothing else would end it."""

    world: World
    grace_seconds: float = 300.0
    poll_seconds: float = 2.0
    stuck_seconds: float = 60.0
    whole_process: bool = False
    reason: str | None = field(default=None, init=False)
    heartbeat: Heartbeat = field(default_factory=Heartbeat, init=False)

    def __post_init__(self) -> None:
        self._met = not self.whole_process
        self._stop_file: Path | None = None
        self._before_end: Callable[[str], None] = lambda why: None
        self._launchers = [] if self.world.launcher == SINGLE_PROCESS else launchers_above(process_of_launcher())
        self._signalled_at = self._look_at = 0.0
        self._interrupted = self.has_seen = False
        self._arrivals, self._noted = socket.socketpair()
        self._arrivals.setblocking(False)
        self._noted.setblocking(False)  # as set_wakeup_fd demands
        self._left = threading.Event()

    @property
    def noticed(self) -> bool:
        """True from the first signal, stop file or launcher's end on; on this rank alone, so exchange it."""
        if self._stop_file is not None and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + self.poll_seconds
            if os.path.isfile(self._stop_file):
                self.reason = self.reason or BY_FILE
        return self.reason is not None

    @property
    def requested(self) -> bool:
        """`noticed`, for the loop: reading it is this rank's heartbeat."""
        self.heartbeat.beat()
        self.has_seen = self.noticed
        return self.has_seen

    def ranks_have_met(self) -> None:
        """Record that the ranks have met: from now on none leaves alone, and the run saves and stops as one."""
        self.heartbeat = Heartbeat()  # waiting for the others was no silence
        self._met = True

    def folder_is_known(self, stop_file: Path | None, before_end: Callable[[str], None]) -> None:
        """Watch for `stop_file` too, on the rank that has one; call `before_end` with the reason before an end."""
        self._stop_file, self._before_end = stop_file, before_end

    def __enter__(self) -> Self:
        # First, so that every signal with a handler is recorded.
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._noted.fileno(), warn_on_full_buffer=False)
        self._previous_handlers = {
            number: signal.signal(number, self._on_signal)
            for number in STOP_SIGNALS
            # nohup: the run is meant to outlive its terminal
            if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN)
        }
        self._previous_handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        signal.siginterrupt(signal.SIGUSR2, False)  # native code goes on as if nothing had come
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left.set()
        with suppress(BlockingIOError):
            self._noted.send(b"\0")  # the watch need not wait for its next turn
        over = self.whole_process and (error is None or isinstance(error, Preempted))
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_IGN if over else handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is not None and number == signal.SIGINT and now - self._signalled_at > SAME_CTRL_C_SECONDS:
            self._interrupted = True
            raise KeyboardInterrupt  # the second Ctrl-C: now, without a checkpoint
        self._signalled_at = now
        self.reason = self.reason or signal.Signals(number).name

    def _watch(self) -> None:
        first_at, terminated = math.inf, False
        while not self._left.is_set():
            numbers = b""
            # Python calls a handler only once the main thread is back from native code; the number comes here before.
            with suppress(BlockingIOError):
                numbers = self._arrivals.recv(4096)
            if signal.SIGUSR2 in numbers:
                # Here, under the interpreter's lock: a handler read frames of a running thread, and met SIGSEGV.
                faulthandler.dump_traceback(file=2)
            arrived = [number for number in STOP_SIGNALS if number in numbers]
            again = signal.SIGINT in arrived and time.monotonic() - first_at > SAME_CTRL_C_SECONDS
            if again and not self._left.wait(self.poll_seconds) and not self._interrupted:
                self._end("The rank does not respond to a second Ctrl-C")
            if arrived:
                first_at = min(first_at, time.monotonic())
            gone = next((f"launcher {gone.pid} gone" for gone in self._launchers if not is_alive(gone)), None)
            if not self._met and (gone or arrived):
                # Another rank's launcher stops all once that rank has failed and reported why.
                level = logging.WARNING if self.world.is_main else logging.DEBUG
                logger.log(
                    level, f"Stopped before the ranks had met ({gone or arrived[0].name}): there was nothing to save."
                )
                end_process(Preempted.exit_code)
            if gone:
                self.reason = self.reason or gone
                # Whoever stops a job by a signal mostly ends its launcher, too.
                level = logging.INFO if first_at < math.inf else logging.ERROR
                logger.log(level, "%s: saving and stopping.", gone.capitalize())
                if not self._left.wait(self.grace_seconds):
                    self._end(f"Still running {self.grace_seconds:.0f} s after its launcher ended")
                return
            terminated = terminated or signal.SIGTERM in arrived
            silent_seconds = self.heartbeat.silent_seconds
            patience_seconds = max(self.stuck_seconds, 2 * self.heartbeat.longest_pause_seconds)
            if terminated and not self.has_seen and silent_seconds > patience_seconds:
                self._end(f"SIGTERM, and no step for {silent_seconds:.0f} s: it is stuck, or another rank is gone")
            select.select([self._arrivals], [], [], self.poll_seconds)

    def _end(self, why: str) -> None:
        logger.error("%s: ending.", why)
        # In a thread with ten seconds, since a file system may hang.
        reporter = threading.Thread(target=self._before_end, args=(why,), name="before-end", daemon=True)
        reporter.start()
        reporter.join(10.0)
        end_process(HangError.exit_code)


def awaited(seconds: float, look: Callable[[], T]) -> T:
    """Return the result of `look` as soon as it is true, or when `seconds` are over."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def end_process(exit_code: int) -> NoReturn:
    """End this process, whose main thread may never return, and its children, which may hang as well."""
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # gone meanwhile
                child.kill()
    os._exit(exit_code)


def process_of_launcher() -> int:
    """Return the number of the process that this rank's launcher has started: this one, or its shell (standby.py)."""
    return int(os.environ.get(SHELL, os.getpid()))


def launchers_above(pid: int) -> list[psutil.Process]:
    """Return the launchers that `pid` descends from, nearest first: DeepSpeed has two on a node, and a scheduler ends
    the far one. Shells and ssh above may end without harm."""

    def launches(ancestor: psutil.Process) -> bool:
        with suppress(psutil.Error):
            names = [Path(word).name for word in ancestor.cmdline()[:4]]  # the program comes after python's -u and -m
            return bool(names) and names[0].startswith("python") and not LAUNCHER_PROGRAMS.isdisjoint(names[1:])
        return False

    return list(itertools.takewhile(launches, psutil.Process(pid).parents()))


@contextmanager
def stop_signals_left_to_this_process() -> Iterator[None]:
    """Let processes that start inside ignore stop signals, which launchers send to every process of a job. They inherit
    this process's mask; its own signals are delivered at the end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_alive(process: psutil.Process) -> bool:
    """Return whether this very process (not a later one with its id) still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    except OSError:  # this process cannot look now (out of file descriptors, say), which is no sign of the other's end
        return True
