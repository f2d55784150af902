"""The process that `run_ranks` forks its ranks from: `python rank_server.py ENGINE` imports once what takes seconds.

It reads requests as lines of JSON and answers each with one: what went wrong, or null. It ends with its input or its
parent, and its ranks with it.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover, free_port
from ds_encdec.registry.engines import EngineName

GRACE_SECONDS = 10.0  # for the other ranks to end by themselves once one has failed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(engine: EngineName) -> None:
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.register_at_fork(after_in_child=answers.close)  # held open, it would hide that the server has ended
    os.dup2(2, 1)  # what libraries print is no answer
    from ds_encdec.engine import fsdp2  # noqa: F401

    if engine == "deepspeed":
        from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: F401
        from ds_encdec.training import build  # noqa: F401
    for line in sys.stdin:
        request = json.loads(line)
        with suppress(Exception):  # the ranks import it, too, and say what is wrong
            importlib.import_module(module_of(request["target"]))
        gc.freeze()  # engines collect garbage when they are closed: not through all that imports have made
        answers.write(json.dumps(answer(engine, **request)) + "\n")
        answers.flush()


def answer(engine: EngineName, target: str, world_size: int, folder: str, timeout_seconds: float) -> str | None:
    port = free_port()
    processes = [
        ForkProcess(target=be_rank, args=(rank, world_size, port, target, Path(folder), engine))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _wait(processes, timeout_seconds)
    finally:
        _end(processes)


def module_of(target: str) -> str:
    return target.partition(":")[0].removesuffix(".py")


def _wait(processes: list[ForkProcess], timeout_seconds: float) -> str | None:
    deadline = time.monotonic() + timeout_seconds
    problem = None
    while any(process.exitcode is None for process in processes):
        failed = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
        if failed and problem is None:
            problem = f"rank {failed[0][0]} ended with exit code {failed[0][1]}"
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            return problem or f"ranks still running after {timeout_seconds} s"
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    return problem or (f"exit codes {codes}" if any(codes) else None)


def _end(processes: list[ForkProcess]) -> None:
    """End what still runs: abort it, so that it shows where it stood, then kill it."""
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)
    if hanging:
        time.sleep(1.0)
    for process in processes:
        process.kill()
        process.join()


def be_rank(rank: int, world_size: int, port: int, target: str, folder: Path, engine: EngineName) -> None:
    _end_with_parent()
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    faulthandler.enable()  # ranks that hang are aborted: their stacks end up in the log
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    world = discover(os.environ)
    init_process_group(world, choose_device("cpu", world), timedelta(seconds=90), engine)
    function = getattr(importlib.import_module(module_of(target)), target.partition(":")[2])
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    torch.save(function(**arguments), folder / f"result{rank}.pt")
    shutdown()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
