"""Checks of a single host, one small function each. They leave nothing behind."""

import importlib
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_encdec.base.findings import Finding
from ds_encdec.base.foreign_places import outside_tested_ranges
from ds_encdec.base.types import DsEncDecError
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.config.model_folder import is_hub_name, model_folder
from ds_encdec.config.schema import FullConfig, Loaded
from ds_encdec.engine.select import resolve_engine
from ds_encdec.launch.agreement import versions
from ds_encdec.launch.disk import free_bytes
from ds_encdec.launch.host import triton_lacks
from ds_encdec.launch.process_group import GLOO_GROUPS, OWN_OPEN_FILES, choose_device
from ds_encdec.launch.run_folder import RunFolder, lock_file
from ds_encdec.launch.world import World
from ds_encdec.memory.job import disk_shortage, make_job, run_sizes
from ds_encdec.monitor.sinks import has_wandb_login
from ds_encdec.registry.engines import ENGINES
from ds_encdec.training.absent import look_here

logger = logging.getLogger(__name__)

BUSY_BYTES = 2**30  # GPU memory in use before the run: more than the contexts of other ranks' probes take
SHARED_MEMORY_BYTES = 2**28  # NCCL's buffers between the GPUs of a host; containers have 64 MiB by default


@dataclass(frozen=True, slots=True)
class Host:
    """A host to check: its ranks in `world`, and a configuration without problems."""

    loaded: Loaded
    world: World

    @property
    def config(self) -> FullConfig:
        """Return the configuration."""
        return self.loaded.config

    @property
    def ranks(self) -> int:
        """Return the number of ranks: the world's, or before the run is started the planned ones."""
        return max(self.world.world_size, self.config.infra.num_gpus)

    @property
    def output(self) -> Path:
        """Return the output folder, or its nearest parent that exists: a run makes the rest."""
        folder = Path(self.config.infra.output_dir).expanduser().absolute()
        return next(path for path in (folder, *folder.parents) if path.is_dir())

    @property
    def uses_gpus(self) -> bool:
        """Return whether ranks of this host compute on GPUs."""
        return self.config.infra.device != "cpu" and torch.cuda.is_available()


Answer = str | tuple[str, str] | None
"""The message of a check that passed; a problem and its fix; or None if the check does not apply."""


def _configuration(host: Host) -> Answer:
    look_here(host.loaded)
    host.loaded.valid()
    return "the local files, folders and packages that it names were found"


def _packages(host: Host) -> Answer:
    package = ENGINES[resolve_engine(host.config)].package
    if package is not None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            if host.uses_gpus:
                import_as_gpu_rank(package)
            importlib.import_module(package)
        except Exception as error:
            return (
                f"{package} cannot be imported: {type(error).__name__}: {error}",
                "set CUDA_HOME, or install it for this torch; infra.distributed_type=fsdp needs torch alone",
            )
    if untested := outside_tested_ranges():
        return f"not tested with {', '.join(untested)}", "install a version of the range, or try the run's first steps"
    return ", ".join(f"{name} {version}" for name, version in versions(ENGINES, nccl=host.uses_gpus).items())


def import_as_gpu_rank(package: str) -> None:
    """Import `package` in a new process as ranks on GPUs do. Raises ImportError with the last line of its errors."""
    environment = os.environ | {"DS_ACCELERATOR": "cuda"}
    done = subprocess.run([sys.executable, "-c", f"import {package}"], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ImportError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def _devices(host: Host) -> Answer:
    if choose_device(host.config.infra.device, host.world).type == "cpu":
        if torch.version.cuda is None and Path("/proc/driver/nvidia").exists():
            return (
                f"this host has an NVIDIA driver, and torch {torch.__version__} was built for CPUs",
                "install torch for CUDA: https://pytorch.org/get-started",
            )
        return f"no GPU: ranks run on {os.cpu_count()} cores"
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_properties(number).name for number in range(count)}
    memory = [torch.cuda.mem_get_info(number) for number in range(count)]
    busy = [number for number, (free, total) in enumerate(memory) if total - free > BUSY_BYTES]
    least = min(total for _, total in memory) / 2**30
    seen = f"{count} × {' and '.join(sorted(names))}, {least:.1f} GiB"
    if busy:
        return f"{seen}; GPU {', '.join(map(str, busy))} is in use", "end what runs there: nvidia-smi names it"
    return seen


def _master(host: Host) -> Answer:
    """Check that this host finds the one where rank 0 runs."""
    address = host.world.master_addr
    if host.world.num_nodes == 1:
        return None
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, None)})
    except OSError as error:
        return f"MASTER_ADDR={address}: {error.strerror or error}", "give an address that all hosts can resolve"
    if host.world.node_rank > 0 and any(one.startswith("127.") or one == "::1" for one in found):
        return (
            f"MASTER_ADDR={address} is {found[0]} here, which is this host itself, and rank 0 is on another",
            "give the address of a network card (hostname -I), or mend /etc/hosts",
        )
    return f"{address} is {', '.join(found)}"


def _interface(host: Host) -> Answer:
    cards = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if value and not value.startswith("^"):
            exact = variable.startswith("GLOO") or value.startswith("=")
            wanted = value.removeprefix("=").split(",")
            if not any(card == name or (not exact and card.startswith(name)) for card in cards for name in wanted):
                return f"{variable}={value}, and this host has {', '.join(cards)}", f"unset {variable}, or name one"
    return ", ".join(cards)


def _output_folder(host: Host) -> Answer:
    config, folder = host.config, host.output
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ds-encdec-doctor-") as file:
            lock_file(file)  # type: ignore[arg-type]
    except OSError as error:
        return f"{folder}: {error.strerror}", "choose an infra.output_dir that this user may write"
    try:
        ranks = host.ranks
        job = make_job(
            config, run_sizes(config), resolve_engine(config), world_size=ranks, ranks_per_node=max(1, ranks)
        )
    except DsEncDecError as error:
        logger.debug("the size of checkpoints is not known: %s", error)
    else:
        checkpoints = RunFolder(config.infra.output_dir).checkpoints
        where = checkpoints if checkpoints.is_dir() else folder
        if (problem := disk_shortage(where, len(committed_steps(where)), config, job)) is not None:
            return problem, ""
    free = free_bytes(folder)
    return f"{folder}: writable, with locks" + (f", {free / 1e9:,.0f} GB free" if free is not None else "")


def _descriptors(host: Host) -> Answer:
    """Check the limit of open files: each Gloo group of a host holds a connection to every other rank."""
    needed = GLOO_GROUPS * host.ranks + OWN_OPEN_FILES
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        return (
            f"a process may open {most:,} files (ulimit -Hn), and {host.ranks:,} ranks need about {needed:,}",
            "raise nofile in /etc/security/limits.conf, or the container's (--ulimit nofile=1048576)",
        )
    return f"up to {'any number of' if most == resource.RLIM_INFINITY else f'{most:,}'} files, {needed:,} needed"


def _memory_limits(host: Host) -> Answer:
    """Check locked memory, which InfiniBand needs, and /dev/shm, where NCCL keeps buffers between a host's GPUs."""
    if not host.uses_gpus:
        return None
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        return (
            f"a process may lock {locked / 2**20:,.1f} MiB (ulimit -l), and InfiniBand's buffers are locked",
            "set memlock to unlimited in /etc/security/limits.conf (containers: --ulimit memlock=-1)",
        )
    if (free := free_bytes(Path("/dev/shm"))) is not None and free < SHARED_MEMORY_BYTES:
        return f"/dev/shm has {free / 2**20:,.0f} MiB free", "containers: --shm-size=8g, or --ipc=host"
    return "enough locked and shared memory"


def _compiler(host: Host) -> Answer:
    """Check the compiler, with which DeepSpeed builds its access to NVMe at the first start on a machine."""
    if host.config.infra.offload_optimizer != "nvme":
        return None
    names = [os.environ.get("CXX", "c++"), "ninja", *(["nvcc"] if host.uses_gpus else [])]
    cuda = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    path = os.pathsep.join([os.environ.get("PATH", ""), cuda, sysconfig.get_path("scripts")])
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h")
    if missing:
        return (
            f"DeepSpeed's async_io is compiled here, and {', '.join(missing)} cannot be found",
            "install build-essential, ninja, python3-dev, libaio-dev and, for a GPU, CUDA's toolkit, or set "
            "infra.offload_optimizer=cpu",
        )
    return ", ".join(names)


def _triton(host: Host) -> Answer:
    """Check that Triton can compile C against Python's headers on GPUs: without, the loss and the layers are slower."""
    return (triton_lacks() or "C compiles against Python.h") if host.uses_gpus else None


def _trackers(host: Host) -> Answer:
    if "wandb" not in host.config.training.report_to or "WANDB_MODE" in os.environ:
        return None
    if not has_wandb_login():
        return (
            "training.report_to has wandb without a login: the run would be kept offline",
            "wandb login, or WANDB_API_KEY, or WANDB_MODE=offline",
        )
    return "logged in to W&B"


def _hub(host: Host) -> Answer:
    model = host.config.model
    name = model.model_name_or_path if model.architecture is None else model.tokenizer_name_or_path
    if name is None or not is_hub_name(name) or Path(name).expanduser().is_dir():
        return None
    model_folder(name, ("*.json",), field="model.model_name_or_path")  # raises an error with the fix
    return f"{name} can be read"


CHECKS: dict[str, Callable[[Host], Answer]] = {
    "configuration": _configuration,
    "packages": _packages,
    "devices": _devices,
    "master address": _master,
    "network cards": _interface,
    "output folder": _output_folder,
    "open files": _descriptors,
    "memory limits": _memory_limits,
    "compiler": _compiler,
    "Triton's compiler": _triton,
    "W&B": _trackers,
    "model": _hub,
}
"""All checks of one host by name, in the order in which they run."""


def look(host: Host) -> list[Finding]:
    """Run every check; an error in a check becomes its finding."""
    findings, name = [], socket.gethostname()
    for check, function in CHECKS.items():
        try:
            answer = function(host)
        except Exception as error:
            logger.debug("%s:", check, exc_info=True)
            ours = isinstance(error, DsEncDecError)
            answer = (str(error) if ours else f"{type(error).__name__}: {error}", "")
        if isinstance(answer, tuple):
            findings.append(Finding(check, False, *answer, host=name))
        elif answer is not None:
            findings.append(Finding(check, True, answer, host=name))
    return findings
