"""The watchdog: when a run hangs, every rank writes down what it was doing, and the run ends.

A thread of each rank looks at the main thread's heartbeats (preemption.py). Where they stop for
`infra.hang_timeout_minutes`, the rank writes the Python stacks of all its threads into a folder that all ranks see;
the others find that file, whether they stand still themselves or not, and write theirs. The launcher kills all ranks
as soon as one has ended, so each waits until all have written, for some seconds at most, and all end with exit code 8.

A rank that is stopped (SIGSTOP) cannot write anything, and the others say so. One whose main thread hangs in native
code that holds the interpreter's lock runs no other thread either: a timer of `faulthandler`, which needs no lock,
writes its stacks to stderr and ends it. The same timer ends a rank whose file system does not take its stacks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from typing import NoReturn

from ds_encdec.launch.atomic_files import atomic_file, unused_path
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import StopRequest, end_process
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.types import HangError

logger = logging.getLogger(__name__)

STDERR = 2
"""Its file descriptor: the stream of that name may have been replaced by one that has none."""


class Watchdog:
    """Ends this rank, and every other, when one takes no step for too long. Use as a context manager around the loop.

    The watch begins with the first heartbeat, which the loop gives with its first batch in hand: what comes before
    (downloads, compilation, the first documents) has no limit but that of the collectives the others wait in,
    `infra.distributed_timeout_minutes`. It does not sleep while the run is `busy`, but nothing counts as silence then.
    """

    def __init__(
        self,
        stop: StopRequest,
        timeout_minutes: float | None,
        run: RunFolder,
        collectives: HostCollectives,
        grace_seconds: float = 15.0,
        poll_seconds: float = 1.0,
    ) -> None:
        """Collective. `timeout_minutes`: None for no watch. `grace_seconds`: how long to wait for others' stacks."""
        self._heartbeat = stop.heartbeat
        self._timeout_seconds = None if timeout_minutes is None else timeout_minutes * 60
        self._run = run
        self._rank, self._world_size = collectives.rank, collectives.world_size
        # One folder per start: what an earlier start of the run left behind is no news, and is kept.
        self.stacks = collectives.on_rank_zero(lambda: unused_path(run.stacks / time.strftime("%Y%m%d-%H%M%S")))
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._timeout_seconds is not None:
            watch = threading.Thread(target=self._watch, args=(self._timeout_seconds,), name="watchdog", daemon=True)
            watch.start()
            self._thread = watch
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread is not None:
            # A rank gets here by the errors of peers that have ended, while its own watchdog is still waiting for
            # others: then the watchdog has the last word, and its exit code.
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, timeout_seconds: float) -> None:
        while not self._left.wait(self._poll_seconds):
            silent_seconds = self._heartbeat.silent_seconds if self._heartbeat.beats else 0.0
            remaining_seconds = max(0.0, timeout_seconds - silent_seconds)
            # Started anew at every turn, so that it runs out only where this thread no longer turns.
            faulthandler.dump_traceback_later(remaining_seconds + 2 * self._grace_seconds, exit=True, file=STDERR)
            if silent_seconds > timeout_seconds or self._written():
                self._end(f"no step for more than {timeout_seconds:g} s")

    def _end(self, why: str) -> NoReturn:
        """Write, wait for the others, and end. `why` is true of some rank, and the same on all."""
        try:
            self._write_stacks()
            missing = self._await_others()
            silent = f" (rank {', '.join(map(str, missing))} wrote none: stopped, or gone)" if missing else ""
            reason = f"{why}; stacks in {self.stacks}{silent}"
            self._run.write_status("failed", reason=reason, exit_code=HangError.exit_code)
            logger.error("rank %d: %s: ending.", self._rank, reason)
        except OSError:
            logger.exception("rank %d: %s, and its stacks cannot be written: ending.", self._rank, why)
        finally:
            end_process(HangError.exit_code)

    def _write_stacks(self) -> None:
        self.stacks.mkdir(parents=True, exist_ok=True)
        names = "".join(f"  0x{thread.ident or 0:016x} {thread.name}\n" for thread in threading.enumerate())
        with atomic_file(self.stacks / _name(self._rank)) as file:  # what the others see is complete
            file.write(
                f"rank {self._rank} of {self._world_size}, process {os.getpid()} on {socket.gethostname()}, "
                f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
                f"heartbeat {self._heartbeat.beats} was {self._heartbeat.silent_seconds:.1f} s ago "
                f"(0: busy with a save)\nthreads:\n{names}\n".encode()
            )
            file.flush()
            faulthandler.dump_traceback(file)  # reads no source file: the file system may be what hangs

    def _await_others(self) -> list[int]:
        """The ranks that have written nothing when all have, or the grace period is over."""
        deadline = time.monotonic() + self._grace_seconds
        while True:
            written = self._written()
            missing = [rank for rank in range(self._world_size) if _name(rank) not in written]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)

    def _written(self) -> set[str]:
        """The names of the files that ranks have written in this start of the run."""
        try:
            return {name for name in os.listdir(self.stacks) if name.startswith("rank-")}
        except FileNotFoundError:
            return set()


def _name(rank: int) -> str:
    return f"rank-{rank}.txt"
