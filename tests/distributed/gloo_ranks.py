"""Start real ranks on this machine: one process each, gloo between them, none left behind.

`run_ranks("engine_cases.py:parity", 2, {...})` runs the function in every rank, inside an initialised process group,
and returns its results in rank order. The file is looked for beside this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ds_encdec.launch.world import free_port

HERE = Path(__file__).parent
GRACE_SECONDS = 10.0
"""What the other ranks get to end by themselves once one has failed."""


class RankFailure(AssertionError):
    """A rank failed or none ended in time; the message holds the end of every rank's output."""


def run_ranks(
    target: str,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `target` ("file.py:function") with `arguments` in `world_size` processes; their results by rank."""
    with TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        torch.save(arguments or {}, folder / "arguments.pt")
        common = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(env or {}),
        }
        processes = []
        for rank in range(world_size):
            with open(folder / f"rank{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HERE / "rank_main.py"), target, str(folder)],
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=scratch,
                    )
                )
        try:
            problem = _wait(processes, timeout_seconds)
        finally:
            _end(processes)
        if problem:
            logs = [f"--- rank {rank}\n{_tail(folder / f'rank{rank}.log')}" for rank in range(world_size)]
            raise RankFailure("\n".join([problem, *logs]))
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_seconds: float) -> str | None:
    """Wait for all; what went wrong, or None. After a first failure the others get GRACE_SECONDS."""
    deadline = time.monotonic() + timeout_seconds
    problem = None
    while any(process.poll() is None for process in processes):
        failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
        if failed and problem is None:
            problem = f"rank {failed[0][0]} ended with exit code {failed[0][1]}"
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            return problem or f"ranks still running after {timeout_seconds} s"
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    return problem or (f"exit codes {codes}" if any(codes) else None)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: abort it, so that it shows where it stood, then kill it."""
    hanging = [process for process in processes if process.poll() is None]
    for process in hanging:
        process.send_signal(signal.SIGABRT)
    if hanging:
        time.sleep(1.0)
    for process in processes:
        process.kill()
        process.wait()


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:]
