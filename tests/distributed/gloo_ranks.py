"""Start real ranks on this machine: one process each, gloo between them, none left behind.

`run_ranks("engine_cases.py:parity", 2, {...})` runs the function in every rank, inside an initialised process group,
and returns its results in rank order. The file is looked for beside this one.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ds_encdec.types import EngineName

SERVER = Path(__file__).with_name("rank_server.py")


class RankFailure(AssertionError):
    """A rank failed or none ended in time; the message holds the end of every rank's output."""


def run_ranks(
    target: str,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    engine: EngineName = "deepspeed",
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `target` ("file.py:function") with `arguments` in `world_size` processes; their results by rank.

    Only ranks for the engine `deepspeed` have imported that.
    """
    with TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        torch.save(arguments or {}, folder / "arguments.pt")
        request = {
            "target": target,
            "world_size": world_size,
            "folder": scratch,
            "timeout_seconds": timeout_seconds,
        }
        problem = _ask(_server(engine), request)
        if problem:
            logs = [f"--- rank {rank}\n{_tail(folder / f'rank{rank}.log')}" for rank in range(world_size)]
            raise RankFailure("\n".join([problem, *logs]))
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


@functools.cache
def _server(engine: EngineName) -> subprocess.Popen[str]:
    """The process that forks the ranks for `engine`; it lives as long as this one."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER), engine],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _ask(server: subprocess.Popen[str], request: dict[str, Any]) -> str | None:
    """What went wrong, or None."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    return json.loads(answer) if answer else "the server of the ranks has ended"


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # the server ends with its input
    server.wait(timeout=60)


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""
