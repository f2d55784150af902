"""From a World to ranks that can talk: device, environment, process group, and the end of it.

The order matters and is why this is one module: DeepSpeed reads DS_ACCELERATOR when it is first
imported, OpenMP its thread count when it first runs, and the JIT its folder when it first builds.
"""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ds_encdec.launch.jit_cache import build_folder, clear_stale_locks
from ds_encdec.launch.world import World
from ds_encdec.types import ConfigError, EngineName


def choose_device(requested: Literal["cuda", "cpu", "auto"], world: World) -> torch.device:
    """The device of this rank for `infra.device`.

    Raises ConfigError when the configuration needs accelerators that this machine does not have, or
    fewer than the ranks on it.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(
            "infra.device=cuda, but this machine has no CUDA device that torch can use. This configuration needs "
            "NVIDIA GPUs (the defaults: 8 of 80 GB). To try ds_encdec here, without any: "
            "--config ds_configs/quickstart.yaml; to run this one on the CPU: infra.device=cpu."
        )
    if world.local_world_size > available:
        raise ConfigError(
            f"{world.local_world_size} ranks were started on a machine with {available} CUDA devices. "
            f"Start at most {available} (deepspeed --num_gpus {available}, or slots={available} in the hostfile)."
        )
    return torch.device("cuda", world.local_rank)


def init_process_group(world: World, device: torch.device, timeout: timedelta, engine: EngineName) -> None:
    """Prepare this process's environment and join the default process group (nccl on cuda, gloo on cpu).

    `timeout` bounds the meeting of the ranks and every collective. Only for `deepspeed` is that imported; this must
    come before it is anywhere else in the process.
    """
    _prepare_environment(world, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if engine == "deepspeed":
        _init_deepspeed(world, device, timeout)
    else:
        # With shards offloaded to the CPU their gradients' norm is reduced there.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, world_size=world.world_size, rank=world.rank)


def _init_deepspeed(world: World, device: torch.device, timeout: timedelta) -> None:
    if world.local_rank == 0:
        clear_stale_locks(build_folder(os.environ))
    # DeepSpeed 0.19.8 still calls collectives by names that torch 2.13 renames; nothing a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # Imported here: what _prepare_environment sets is read at import.
    import deepspeed

    if device.type == "cpu":
        # An optional all-reduce over shared memory that is compiled on first use: minutes, to save microseconds.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,  # the environment is complete; discovery would ask for mpi4py
        timeout=timeout,
        verbose=False,
    )


def shutdown() -> None:
    """Leave the process group at the end of a run that went well.

    First close the engine and drop every reference to it: on gloo, groups destroyed while a model still
    held on to them aborted 5 of 8 processes at exit. A rank that failed must not call this (the
    barrier would wait for ranks that are gone) but leave by its exit code.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    gc.collect()  # engines are cyclic: drop their groups now, not at interpreter exit
    dist.destroy_process_group()


def openmp_threads(environ: Mapping[str, str], world: World, usable_cores: int) -> int | None:
    """This rank's share of the machine's cores; None where the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 where it is unset (torch/distributed/run.py), and a CPU optimizer on one core takes longer
    than the rest of the step. So its 1 is no one's wish; any other number is.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given is None or (given == "1" and "TORCHELASTIC_RUN_ID" in environ):
        return max(1, usable_cores // world.local_world_size)
    return None


def _prepare_environment(world: World, device: torch.device) -> None:
    """Export the World to libraries that read it from the environment, and the settings they need."""
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        LOCAL_SIZE=str(world.local_world_size),
        MASTER_ADDR=world.master_addr,
        MASTER_PORT=str(world.master_port),
        TORCH_EXTENSIONS_DIR=str(build_folder(os.environ)),
    )
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        if world.num_nodes == 1 and "lo" in (name for _, name in socket.if_nameindex()):
            # Where the host's own name does not resolve, or only to a foreign interface, gloo cannot connect.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threads = openmp_threads(os.environ, world, _usable_cores())
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # OpenMP may have read its variable already


def _usable_cores() -> int:
    """Cores that this process may run on (containers and taskset allow fewer than there are)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
