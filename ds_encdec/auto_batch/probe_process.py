"""The rank's side of a probe: start the process, ask it how it went, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from ds_encdec.auto_batch.probe import ProbeTask
from ds_encdec.auto_batch.search import Outcome
from ds_encdec.launch.memory_errors import is_of_device, says_out_of_memory
from ds_encdec.launch.preemption import stop_signals_left_to_this_process

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
PROBE = (sys.executable, "-m", "ds_encdec.auto_batch.probe")
_LAST_BYTES = 4000
"""Of what a probe has printed."""
_NO_STACK = "libgomp: Thread creation failed"
"""OpenMP ends the process where no memory is left for the stack of a thread."""


class ProbeState(IntEnum):
    """Where a probe stands. The ranks tell each other these numbers."""

    RUNNING = 0
    FITS = 1
    OUT_OF_MEMORY = 2
    FAILED = 3


class ProbeProcess:
    """One probe. Use as a context manager: the process does not outlive it, nor this one, however that ends.

    `outcome` is there once `poll` says that it has ended; of one that failed it has the `message`.
    """

    def __init__(self, task: ProbeTask, command: Sequence[str] = PROBE) -> None:
        self.outcome = Outcome(fits=False)
        self._on_cpu = task.device == "cpu"
        # In a file, since nobody reads it while the process runs: a full pipe would hold it up.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        with stop_signals_left_to_this_process():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                text=True,
                env=_environment(),
                start_new_session=True,  # and so a process group, with which compilers and the like are ended
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and `poll` says how
            self._process.stdin.write(task.dump() + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:  # its number is not another one's yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._printed):
            assert stream is not None
            with suppress(BrokenPipeError):  # what it has not read of its task
                stream.close()

    def poll(self) -> ProbeState:
        """How far it is. Not to be asked again once it has ended."""
        code = self._process.poll()
        if code is None:
            return ProbeState.RUNNING
        assert self._process.stdout is not None
        report = self._process.stdout.read()
        if code == 0:
            self.outcome = Outcome(**json.loads(report))
            return ProbeState.FITS if self.outcome.fits else ProbeState.OUT_OF_MEMORY
        if code == -signal.SIGKILL:
            message = "the kernel killed it, which it does when the machine is out of memory"
            self.outcome = Outcome(fits=False, message=message, smaller_may_fit=self._on_cpu)
            return ProbeState.OUT_OF_MEMORY
        printed = self.last_words()
        if telling := [line for line in printed.splitlines() if says_out_of_memory(line) or _NO_STACK in line]:
            of_device = not self._on_cpu and is_of_device(RuntimeError(telling[-1]), free_device_bytes=0)
            self.outcome = Outcome(fits=False, message=telling[-1], of_device=of_device)
            return ProbeState.OUT_OF_MEMORY
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.outcome = Outcome(fits=False, message=f"It {how}; its last words:\n{printed}")
        return ProbeState.FAILED

    def last_words(self) -> str:
        """The end of what it has printed so far."""
        length = os.fstat(self._printed.fileno()).st_size
        start = max(0, length - _LAST_BYTES)
        return os.pread(self._printed.fileno(), _LAST_BYTES, start).decode(errors="replace")


def _environment() -> dict[str, str]:
    """This process's, which knows its rank, for a child that finds the package wherever it is started."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]))
    # The run's own store, wherever it is, is where probes meet: torch is told that somebody else keeps it.
    environment["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    return environment
