"""From a World to ranks that can talk: device, environment, process group, and the end of it.

The order matters and is why this is one module: DeepSpeed reads DS_ACCELERATOR when it is first
imported, OpenMP its thread count when it first runs, and the JIT its folder when it first builds.
"""

import gc
import importlib
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ds_encdec.engines import ENGINES, EngineName, load
from ds_encdec.launch.disk import build_folder, clear_stale_locks
from ds_encdec.launch.host_collectives import allow_connections
from ds_encdec.launch.peers import machine
from ds_encdec.launch.world import World
from ds_encdec.terminal import take_over
from ds_encdec.types import ConfigError

logger = logging.getLogger(__name__)


def choose_device(requested: Literal["cuda", "cpu", "auto"], world: World) -> torch.device:
    """The device of this rank for `infra.device`.

    Where a launcher shows each rank one device of its own, that is it; `init_process_group` checks that no two have the
    same. Raises ConfigError when the configuration needs accelerators that this machine does not have, or fewer than
    the ranks on it.
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
    if 1 < available < world.local_world_size:
        raise ConfigError(
            f"{world.local_world_size} ranks were started on a machine with {available} CUDA devices. "
            f"Start at most {available} (deepspeed --num_gpus {available}, or slots={available} in the hostfile)."
        )
    return torch.device("cuda", 0 if available == 1 else world.local_rank)


def init_process_group(
    world: World,
    device: torch.device,
    timeout: timedelta,
    engine: EngineName,
    *,
    otherwise: EngineName | None = None,
    meeting: str = "run",
) -> EngineName:
    """Prepare this process's environment and join the default process group (nccl on cuda, gloo on cpu).

    Returns `engine`, or on all ranks `otherwise` where some rank cannot import the package of `engine`; without
    `otherwise` all raise ConfigError. `timeout` bounds the meeting of the ranks and every collective. An engine's
    package must not have been imported before. `meeting` tells apart those who meet at one address: a run's ranks, and
    the probes beside them.
    """
    _prepare_environment(world, device)
    allow_connections(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        # One rank meets nobody, and needs no port that another program may have taken by now.
        base = dist.HashStore() if world.world_size == 1 else _meet(world, timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={world.master_port}: another program on {socket.gethostname()} listens there already, maybe "
            "another run. Give all ranks a free one: --master_port N (deepspeed), --master-port N (torchrun), or "
            "MASTER_PORT where you set it yourself."
        ) from error
    store = dist.PrefixStore(meeting, base)
    store.set_timeout(timeout)
    _share_the_node(world, device, store)
    if package := ENGINES[engine].package:
        problems = _everyones(_import(package, world), dist.PrefixStore("import", store), world)
        if problem := next(filter(None, problems), None):
            problem = f"{package} is installed, but cannot be imported ({problem})."
            if otherwise is None:
                raise ConfigError(
                    f"{problem} Mend that (often CUDA_HOME is not set, or it was built for another torch), or set "
                    "infra.distributed_type=fsdp, which trains the same with torch alone."
                )
            logger.log(logging.WARNING if world.is_main else logging.DEBUG, problem)
            engine = otherwise
    load(ENGINES[engine].join)(world, device, timeout, dist.PrefixStore("group", store))
    return engine


def _meet(world: World, timeout: timedelta) -> dist.Store:
    store, *_ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
    return store


def _import(package: str, world: World) -> str | None:
    """Import an engine's package; returns why that failed, or None. Raises nothing: all ranks must hear of it."""
    if world.local_rank == 0:
        clear_stale_locks(build_folder(os.environ))
    # DeepSpeed 0.19.8 still calls collectives by names that torch 2.13 renames; nothing a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    try:
        # Not earlier: what _prepare_environment sets is read at import.
        importlib.import_module(package)
    except Exception as error:  # no CUDA_HOME, another torch's binary interface, a library that is not there
        return f"rank {world.rank}: {type(error).__name__}: {error}"
    return None


def _everyones(mine: Any, store: dist.Store, world: World) -> list[Any]:
    """Every rank's value (of JSON's types), in the order of ranks. There is no group yet."""
    store.set(str(world.rank), json.dumps(mine))
    found = store.multi_get([str(rank) for rank in range(world.world_size)])  # which waits for them
    if store.add("read", 1) == world.world_size:
        store.set("read by all", "")
    if world.rank == 0:  # the store may end with this process
        store.wait(["read by all"])
    return list(map(json.loads, found))


def join_torch(world: World, device: torch.device, timeout: timedelta, store: dist.Store) -> None:
    """Make the default process group for FSDP2. Offloaded shards' gradients have their norm reduced on the CPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, world_size=world.world_size, rank=world.rank)


def join_deepspeed(world: World, device: torch.device, timeout: timedelta, store: dist.Store) -> None:
    """Make the default process group, and DeepSpeed's view of it."""
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    # DeepSpeed itself makes it like this (comm/torch.py): one rank has nobody to connect to.
    bound = device if device.type == "cuda" and world.world_size > 1 else None
    dist.init_process_group(
        backend, timeout=timeout, store=store, world_size=world.world_size, rank=world.rank, device_id=bound
    )
    if device.type == "cpu":
        # An optional all-reduce over shared memory that is compiled on first use: minutes, to save microseconds.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # What a schedule's class says when it is made, before anybody could have started it.
    take_over("DeepSpeed", harmless=["Attempting to get learning rate from scheduler before it has started"])
    # The environment is complete; discovery would ask for mpi4py.
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)


def shutdown() -> None:
    """Leave the process group at the end of a run that went well; a rank that is gone by now changes nothing of that.

    First close the engine and drop every reference to it: on gloo, groups destroyed while a model still
    held on to them aborted 5 of 8 processes at exit. A rank that failed must not call this (the
    barrier would wait for ranks that are gone) but leave by its exit code.
    """
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        logger.warning("Another rank has left before the others could, killed perhaps; all was done by then: %s", error)
    gc.collect()  # engines are cyclic: drop their groups now, not at interpreter exit
    if (deepspeed := sys.modules.get("deepspeed")) is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()  # which forgets its groups, so that this process may train again
    else:
        dist.destroy_process_group()


def _share_the_node(world: World, device: torch.device, store: dist.Store) -> None:
    """Divide cores among the ranks that have the same ones; raise ConfigError, on all ranks, if two have one GPU."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    # Containers and taskset allow fewer cores than there are.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    mine = {"rank": world.rank, "machine": machine(), "host": socket.gethostname(), "cores": cores, "uuid": uuid}
    places = _everyones(mine, dist.PrefixStore("node", store), world)
    # The ranks of this machine are counted, since not every launcher says how many there are.
    neighbours = [place["cores"] for place in places if place["machine"] == mine["machine"]]
    if (threads := openmp_threads(os.environ, cores, neighbours)) is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # OpenMP may have read its variable already
    on_gpu: dict[Any, list[dict[str, Any]]] = {}
    for place in places:
        on_gpu.setdefault((place["machine"], place["uuid"] or place["rank"]), []).append(place)
    for crowded in on_gpu.values():
        if len(crowded) > 1:
            raise ConfigError(
                f"Ranks {', '.join(str(place['rank']) for place in crowded)} were started on the same GPU "
                f"({crowded[0]['host']}, {crowded[0]['uuid']}). Start one rank for each GPU, or have the launcher "
                "give each rank its own (Slurm: --gpus-per-task=1)."
            )


def openmp_threads(environ: Mapping[str, str], own: Collection[int], on_node: Sequence[Collection[int]]) -> int | None:
    """This rank's share of the cores it may run on; None where the user has set OMP_NUM_THREADS.

    `own`, and `on_node` of every rank of the host, this one included: numbers of cores. Launchers may have given each
    rank cores of its own. torchrun sets the variable to 1 where it is unset (torch/distributed/run.py), and a CPU
    optimizer on one core takes longer than the rest of the step. So its 1 is no one's wish; any other number is.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given is not None and (given != "1" or "TORCHELASTIC_RUN_ID" not in environ):
        return None
    return max(1, len(own) // max(1, sum(not set(own).isdisjoint(others) for others in on_node)))


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
            # Gloo cannot connect if the host's own name does not resolve, or only to a foreign interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
