"""The rank's side of a probe: start the process, ask it how it went, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from ds_encdec.memory.probe import ProbeReport, ProbeTask

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_LAST_CHARACTERS = 4000
"""Of what a failed probe has printed."""


class ProbeState(IntEnum):
    """Where a probe stands. The ranks tell each other these numbers."""

    RUNNING = 0
    FITS = 1
    OUT_OF_MEMORY = 2
    FAILED = 3


class ProbeProcess:
    """One probe. Use as a context manager: the process does not outlive it, nor this one, however that ends.

    `peak_bytes` and `message` are there once `poll` says that it has ended.
    """

    def __init__(self, task: ProbeTask) -> None:
        self.peak_bytes = 0
        self.message = ""
        # In a file, since nobody reads it while the process runs: a full pipe would hold it up.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_encdec.memory.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env=_environment(),
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and `poll` says how
            self._process.stdin.write(task.dump() + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
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
            found = ProbeReport(**json.loads(report))
            self.peak_bytes, self.message = found.peak_bytes, found.message
            return ProbeState.FITS if found.fits else ProbeState.OUT_OF_MEMORY
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")
        if code == -signal.SIGKILL:
            self.message = "the kernel killed it, which it does when the machine is out of memory"
            return ProbeState.OUT_OF_MEMORY
        if "std::bad_alloc" in printed:  # thrown where nothing could catch it
            self.message = "std::bad_alloc"
            return ProbeState.OUT_OF_MEMORY
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.message = f"it {how}; its last words:\n{printed[-_LAST_CHARACTERS:]}"
        return ProbeState.FAILED


def _environment() -> dict[str, str]:
    """This process's, which knows its rank, for a child that finds the package wherever it is started."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]))
    # Under torchrun ranks meet at the agent's store, on the run's own port: the probes have one of their own.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return environment
