"""Start real ranks on this machine: one process each, gloo between them, none left behind."""

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ds_encdec.registry.engines import EngineName

SERVER = Path(__file__).with_name("rank_server.py")

_servers: dict[EngineName, subprocess.Popen[str]] = {}


class RankFailure(AssertionError):
    """A rank or the server failed, or none ended in time; with the end of every rank's output."""


def run_ranks(
    target: str,
    world_size: int,
    arguments: dict[str, Any] | None = None,
    engine: EngineName = "deepspeed",
    timeout_seconds: float = 1800.0,
) -> list[Any]:
    """Call `target` ("file.py:function", beside this file) with `arguments` in `world_size` processes inside a process
    group; their results by rank. Only ranks for the engine `deepspeed` have imported that."""
    with TemporaryDirectory(prefix="ranks-") as scratch:
        folder = Path(scratch)
        torch.save(arguments or {}, folder / "arguments.pt")
        request = {"target": target, "world_size": world_size, "folder": scratch, "timeout_seconds": timeout_seconds}
        if problem := _ask(_server(engine), request):
            logs = [f"--- rank {rank}\n{_tail(folder / f'rank{rank}.log')}" for rank in range(world_size)]
            raise RankFailure("\n".join([problem, *logs]))
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


def _server(engine: EngineName) -> subprocess.Popen[str]:
    """The process that forks the ranks for `engine`; it lives as long as this one. One that has died is replaced."""
    if engine in _servers and _servers[engine].poll() is None:
        return _servers[engine]
    _servers[engine] = server = subprocess.Popen(
        [sys.executable, str(SERVER), engine],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _ask(server: subprocess.Popen[str], request: dict[str, Any]) -> str | None:
    """What went wrong, or None. Whatever keeps the answer away, an interrupt say, ends the server."""
    assert server.stdin is not None
    assert server.stdout is not None
    answer = ""
    try:
        with suppress(BrokenPipeError):
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
    finally:
        if not answer:  # otherwise the next request would get this one's
            _end(server)
    return json.loads(answer) if answer else "the server of the ranks has ended"


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()  # closes the pipes, also broken ones, and waits


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""
