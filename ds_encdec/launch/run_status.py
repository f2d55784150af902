"""How a run ends, in its `run.json` and as the error that its process leaves with."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.peers import Peers
from ds_encdec.launch.run_folder import RunFolder, RunFolderGoneError
from ds_encdec.launch.world import World
from ds_encdec.types import DsEncDecError, LostRankError, OutOfMemoryError, Preempted

logger = logging.getLogger(__name__)


@contextmanager
def ending_recorded(folder: RunFolder, world: World, peers: Peers, *, spare: bool) -> Iterator[Callable[[], None]]:
    """Keep `run.json` true: running once the function it yields is called, then completed, preempted or failed.

    What goes wrong before that is recorded too, unless `spare`: a resume that is refused leaves the good end of the
    earlier start alone, but no failure, which a supervisor would act on once more. Any rank may be the one that
    fails; the folder keeps the first reason. Every error leaves as a DsEncDecError, and none is replaced by one of the
    recording.
    """
    began = False

    def begin() -> None:
        nonlocal began
        began = True
        if world.is_main:
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            record(
                folder,
                "running",
                started_at=started,
                world_size=world.world_size,
                launcher=world.launcher,
                **environment_facts(),
            )

    try:
        yield begin
    except BaseException as error:
        named = named_error(error, world.rank, peers)
        refused = spare and not began and not isinstance(named, LostRankError)
        spared = refused and folder.earlier.get("state") in ("completed", "preempted")
        if not spared and not isinstance(named, RunFolderGoneError):
            state = "preempted" if isinstance(named, Preempted) else "failed"
            record(folder, state, reason=str(named), exit_code=named.exit_code)
        if named is error:
            raise
        raise named from error
    if world.is_main:
        record(folder, "completed", exit_code=0)


def record(folder: RunFolder, state: str, **facts: Any) -> None:
    """Write `run.json`, or log why that cannot be: it is no reason for a run to end otherwise than it does."""
    try:
        folder.write_status(state, **facts)
    except Exception as error:
        logger.error(
            "%s could not be written, so it does not say that the run is %s: %s", folder.run_json, state, error
        )


def environment_facts() -> dict[str, Any]:
    """The facts of what the run ran on: this host, its device, and the versions of what decides its numbers."""
    versions = {}
    for name in ("ds_encdec", "torch", "transformers", "deepspeed"):
        with suppress(PackageNotFoundError):  # deepspeed is not needed, and a checkout may not be installed
            versions[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"host": socket.gethostname(), "device": device, "python": platform.python_version(), **versions}


def named_error(error: BaseException, rank: int, peers: Peers | None = None) -> DsEncDecError:
    """The error as one of ours, with an exit code. Where there are `peers`, one of theirs that is gone is named."""
    if isinstance(error, DsEncDecError) and type(error) is not DsEncDecError:
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"{out_of_memory(error, rank)} A GPU needs less with training.activation_checkpointing=full, "
            "a higher infra.sharding_stage or infra.offload_optimizer=cpu, and in a new run with a smaller "
            "training.per_device_train_batch_size; the host with infra.pin_memory=false, training.async_save=false "
            "or infra.offload_optimizer=none."
        )
    if peers is not None and (lost := peers.explain(error)) is not None:
        return lost
    if isinstance(error, DsEncDecError):
        return error
    return DsEncDecError(f"rank {rank}: {type(error).__name__}: {error}")
