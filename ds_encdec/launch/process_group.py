"""Joins this process to the ranks of a run: device, environment and process group, until it leaves them. The order
matters, which is why this is one module: DeepSpeed reads DS_ACCELERATOR when it is first imported, OpenMP its thread
count when it first runs, and the JIT its folder when it first builds."""

import gc
import importlib
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from ds_encdec.base.terminal import take_over
from ds_encdec.base.types import ConfigError
from ds_encdec.launch.agreement import merge_rank_facts, shared_settings, versions
from ds_encdec.launch.disk import build_folder
from ds_encdec.launch.host import gloo_interface, machine, no_gpu, own_address_towards
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.launch.rendezvous import Rendezvous
from ds_encdec.launch.run_folder import code_hash
from ds_encdec.launch.world import World
from ds_encdec.registry.engines import ENGINES, ByEngine, EngineName

logger = logging.getLogger(__name__)

# The environment variables that a rank changes.
_CHANGED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCH_EXTENSIONS_DIR", "DS_ACCELERATOR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"),
)


def choose_device(
    requested: Literal["cuda", "cpu", "auto"], world: World, *, named: str = "infra.device=cuda"
) -> torch.device:
    """Return this rank's device for the `requested` kind; `named` is its field or option in messages. Raises
    ConfigError if this machine lacks a needed accelerator, or has fewer than ranks. A launcher may show each rank only
    one; `init_process_group` checks that no two are the same."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise no_gpu("no CUDA device that torch can use", named)
    if 1 < available <= world.local_rank:
        raise ConfigError(
            f"LOCAL_RANK={world.local_rank}: more ranks were started on a machine with {available} CUDA devices. Start "
            f"at most {available} (deepspeed --num_gpus {available}, or slots={available} in the hostfile)."
        )
    # Torch's first choice on Hopper: cuDNN builds a plan, slowly, for each new length of a document.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", 0 if available == 1 else world.local_rank)


def init_process_group(
    world: World,
    device: torch.device,
    timeout: timedelta,
    engine: EngineName,
    *,
    meeting: str = "run",
    start_timeout: timedelta | None = None,
    settings: Mapping[str, Any] | None = None,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Prepare this process's environment and join the default process group (nccl on cuda, gloo on cpu); a collective.
    The package of `engine` must not be imported yet. `timeout` bounds every collective, `start_timeout` (None: the
    same) each wait for the others here. `meeting`: the name of the rendezvous, a run's or its probes'. `settings`: must
    be equal on all ranks. `first` is called in the new group, within `start_timeout`. All ranks raise the error of any;
    ConfigError if they differ, or one cannot import the package; LostRankError if some do not come."""
    # Connections beyond the limit of open files fail, with errors that call them closed by the peer.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    met = Rendezvous(world, start_timeout or timeout, meeting)
    _meet(met, world, device, engine, settings)
    if package := ENGINES[engine].package:
        # DeepSpeed 0.19.8 still calls collectives by names that torch 2.13 renames; no user can fix that.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        problem: str | None = None
        try:
            importlib.import_module(package)  # not earlier: it reads the environment of the ranks
        except Exception as error:  # no CUDA_HOME, another torch's binary interface, a missing library
            problem = f"{type(error).__name__}: {error}"

        def refuse_problems(problems: dict[int, str | None]) -> None:
            if first := next((f"rank {rank}: {problem}" for rank, problem in problems.items() if problem), None):
                raise ConfigError(
                    f"{package} is installed, but cannot be imported ({first}). Fix it (often CUDA_HOME is not set, or "
                    "it was built for another torch), or set infra.distributed_type=fsdp, which trains the same with "
                    "torch alone."
                )

        met.round("import", problem, refuse_problems, late=f"import {package}")

    def connect() -> None:
        _JOIN[engine](world, device, timeout, dist.PrefixStore("group", met.store))
        first()

    met.store.set_timeout(timeout)
    met.connect(connect)


def _meet(
    met: Rendezvous, world: World, device: torch.device, engine: EngineName, settings: Mapping[str, Any] | None
) -> None:
    mine, error = attempt(lambda: _own_place(world, device, engine, shared_settings(settings or {})))
    mine = mine or {}
    answer = met.round("meet", mine, lambda places: merge_rank_facts(places, met.hosts), error=error)
    for line in answer["warnings"] if world.is_main else ():
        logger.warning("the ranks differ: %s", line)
    # The ranks of this machine are counted, since not every launcher gives their number.
    if (threads := openmp_threads(os.environ, len(mine["cores"]), answer["sharing"][world.rank])) is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # OpenMP may have read its variable already
    elsewhere = next((address for place, address in answer["reached"] if place != mine["machine"]), None)
    alone, master = len(answer["reached"]) == 1, world.master_addr
    if world.world_size > 1 and (name := gloo_interface(mine["address"], elsewhere, alone=alone, master=master)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _own_place(world: World, device: torch.device, engine: EngineName, shared: Mapping[str, str]) -> dict[str, Any]:
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
    uuid, noted = None, versions([engine], nccl=device.type == "cuda")
    release_series = {name: ".".join(version.split(".")[:2]) for name, version in noted.items()}
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        _take(device)
        properties = torch.cuda.get_device_properties(device)
        uuid = str(properties.uuid)
        noted |= {"GPU": properties.name, "GPU memory": f"{round(properties.total_memory / 2**30)} GiB"}
    return {
        "machine": machine(),
        "address": own_address_towards(world.master_addr),
        # Containers and taskset allow fewer cores than there are.
        "cores": sorted(os.sched_getaffinity(0)),
        "uuid": uuid,
        "equal": {
            "WORLD_SIZE": world.world_size,
            "engine": engine,
            "device": device.type,
            "code of ds_encdec": code_hash(),
            **release_series,
            **shared,
        },
        "noted": noted,
    }


def _take(device: torch.device) -> None:
    torch.cuda.set_device(device)
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
            raise
        raise ConfigError(
            f"a tensor cannot be created on {device} ({error}). Some virtual machines have no expandable segments of "
            "memory: set PYTORCH_ALLOC_CONF=expandable_segments:False"
        ) from error


def _join_torch(world: World, device: torch.device, timeout: timedelta, store: dist.Store) -> None:
    # Gloo, too: FSDP2 reduces the norm of offloaded shards' gradients on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, world_size=world.world_size, rank=world.rank)


def _join_deepspeed(world: World, device: torch.device, timeout: timedelta, store: dist.Store) -> None:
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    # As DeepSpeed itself does (comm/torch.py): one rank has no other to connect to.
    bound = device if device.type == "cuda" and world.world_size > 1 else None
    dist.init_process_group(
        backend, timeout=timeout, store=store, world_size=world.world_size, rank=world.rank, device_id=bound
    )
    if device.type == "cpu":
        # An optional all-reduce over shared memory that is compiled on first use: minutes, to save microseconds.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # A schedule's class logs this when it is made, before it could be started.
    take_over("DeepSpeed", harmless=["Attempting to get learning rate from scheduler before it has started"])
    # The environment is complete; discovery would need mpi4py.
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)


# The function that makes an engine's default process group; DeepSpeed's also makes its view of it.
_JOIN: ByEngine[Callable[[World, torch.device, timedelta, dist.Store], None]] = ByEngine(
    deepspeed=_join_deepspeed, fsdp=_join_torch
)


def shutdown() -> None:
    """Leave the process group at the end of a run that went well. First close the engine and drop every reference to
    it: on gloo, groups destroyed while a model still held on to them aborted 5 of 8 processes at exit. A rank that
    failed must not call this: the barrier would wait for others."""
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        logger.warning("Another rank ended early, perhaps killed, but all work was done by then: %s", error)
    gc.collect()  # engines are cyclic: drop their groups now, not at interpreter exit
    if (deepspeed := sys.modules.get("deepspeed")) is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()  # which forgets its groups, so that this process may train again
    else:
        dist.destroy_process_group()


def openmp_threads(environ: Mapping[str, str], cores: int, sharing: int) -> int | None:
    """Return this rank's share of the cores it may run on; None if the user has set OMP_NUM_THREADS. `sharing`: ranks
    of the host that may run on some of them, itself included. torchrun sets an unset variable to 1, which does not
    count: a CPU optimizer on one core takes longer than the rest of the step."""
    given = environ.get("OMP_NUM_THREADS")
    is_users = given is not None and (given != "1" or "TORCHELASTIC_RUN_ID" not in environ)
    return None if is_users else max(1, cores // max(1, sharing))


def settings_restorer() -> Callable[[], None]:
    """Return a function that restores this process's present settings, as far as a rank changes them when it joins the
    others, so that the process may train again."""
    environ = {name: os.environ[name] for name in _CHANGED if name in os.environ}
    threads, cudnn_attention = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()

    def restore() -> None:
        for name in _CHANGED:
            os.environ.pop(name, None)
        os.environ.update(environ)
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)

    return restore
