"""How a run ends, in its `run.json` and as the error that its process leaves with."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import World
from ds_encdec.types import DsEncDecError, OutOfMemoryError, Preempted


@contextmanager
def ending_recorded(folder: RunFolder, world: World, *, spare: bool) -> Iterator[Callable[[], None]]:
    """Keep `run.json` true: running once the function it yields is called, then completed, preempted or failed.

    What goes wrong before that is recorded too, unless `spare`: a resume that is refused leaves the earlier
    run's status alone. Any rank may be the one that fails; the folder keeps the first reason. Every error leaves
    as a DsEncDecError.
    """
    began = False

    def begin() -> None:
        nonlocal began
        began = True
        if world.is_main:
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            folder.write_status(
                "running",
                started_at=started,
                world_size=world.world_size,
                launcher=world.launcher,
                **environment_facts(),
            )

    try:
        yield begin
    except BaseException as error:
        named = named_error(error, world.rank)
        if began or not spare:
            state = "preempted" if isinstance(named, Preempted) else "failed"
            folder.write_status(state, reason=str(named), exit_code=named.exit_code)
        if named is error:
            raise
        raise named from error
    if world.is_main:
        folder.write_status("completed", exit_code=0)


def environment_facts() -> dict[str, Any]:
    """What the run ran on: this host, its device, and the versions of what decides its numbers."""
    versions = {}
    for name in ("ds_encdec", "torch", "transformers", "deepspeed"):
        with suppress(PackageNotFoundError):  # deepspeed is not needed, and a checkout may not be installed
            versions[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"host": socket.gethostname(), "device": device, "python": platform.python_version(), **versions}


def named_error(error: BaseException, rank: int) -> DsEncDecError:
    """The error as one of ours, with an exit code."""
    if isinstance(error, DsEncDecError):
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"{out_of_memory(error, rank)} A GPU needs less with training.activation_checkpointing=full, "
            "a higher infra.sharding_stage or infra.offload_optimizer=cpu, and in a new run with a smaller "
            "training.per_device_train_batch_size; the host with infra.pin_memory=false, training.async_save=false "
            "or infra.offload_optimizer=none."
        )
    return DsEncDecError(f"rank {rank}: {type(error).__name__}: {error}")
