"""Check hosts before a run (`ds-encdec doctor`). One process checks its host. Ranks that a launcher has started (`srun
ds-encdec doctor`) check theirs, then connect: they compare versions, look for one shared folder and measure an
all_reduce. With a host file it starts a rank on each host by ssh, as DeepSpeed's launcher would."""

import importlib
import json
import logging
import os
import resource
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_encdec.base.findings import Finding
from ds_encdec.base.foreign_places import outside_tested_ranges
from ds_encdec.base.types import DsEncDecError
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.config.hostfile import read_hosts, read_variables
from ds_encdec.config.schema import Loaded, read_config
from ds_encdec.config.stored_model import is_hub_name, model_folder
from ds_encdec.engine.select import resolve_engine
from ds_encdec.launch.agreement import differences, versions
from ds_encdec.launch.disk import free_bytes
from ds_encdec.launch.host import triton_lacks
from ds_encdec.launch.host_collectives import HostCollectives, attempt
from ds_encdec.launch.preemption import awaited
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.run_folder import RunFolder, lock_file
from ds_encdec.launch.world import World, discover
from ds_encdec.memory.job import disk_shortage, make_job, run_sizes
from ds_encdec.registry.engines import ENGINES
from ds_encdec.training import absent

logger = logging.getLogger(__name__)

BUSY_BYTES = 2**30  # GPU memory in use before the run: more than the contexts of other ranks' probes take
SHARED_MEMORY_BYTES = 2**28  # NCCL's buffers between the GPUs of a host; containers have 64 MiB by default
ConfigFiles = tuple[Path | None, Sequence[str], Path | None]  # as `read_config` takes them
PROBE = ".ds-encdec-doctor-"  # begins the names of files that it writes for a moment
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
FIXES = {
    "engine": "set CUDA_HOME, or install it for this torch; infra.distributed_type=fsdp needs torch alone",
    "ssh": "DeepSpeed's launcher needs ssh to each host, also to this one: start sshd and install a key; if the host "
    "file names this host alone, add --no_ssh_check --master_addr 127.0.0.1",
    "start": "install this environment at the same path on each host",
}
# The message of a check that passed; a problem and its fix; or None if the check does not apply.
Answer = str | tuple[str, str] | None


class Host:
    """A host to check, with the checks: its ranks in `world`, and a configuration without problems."""

    def __init__(self, loaded: Loaded, world: World) -> None:
        self.loaded, self.config, self.world = loaded, loaded.config, world
        self.uses_gpus = self.config.infra.device != "cpu" and torch.cuda.is_available()
        folder = Path(self.config.infra.output_dir).expanduser().absolute()
        self.output = next(path for path in (folder, *folder.parents) if path.is_dir())  # a run makes the rest

    def _configuration(self) -> Answer:
        absent.look_here(self.loaded)
        self.loaded.valid()
        return "the local files, folders and packages that it names were found"

    def _packages(self) -> Answer:
        if (package := ENGINES[resolve_engine(self.config)].package) is not None:
            os.environ.setdefault("DS_ACCELERATOR", "cuda" if self.uses_gpus else "cpu")  # as its ranks set it
            try:
                importlib.import_module(package)
            except Exception as error:
                return f"{package} cannot be imported: {type(error).__name__}: {error}", FIXES["engine"]
        if untested := outside_tested_ranges():
            fix = "install a version of the range, or try the run's first steps"
            return f"not tested with {', '.join(untested)}", fix
        return ", ".join(f"{name} {version}" for name, version in versions(ENGINES, nccl=self.uses_gpus).items())

    def _devices(self) -> Answer:
        if choose_device(self.config.infra.device, self.world).type == "cpu":
            if torch.version.cuda is None and Path("/proc/driver/nvidia").exists():
                problem = f"this host has an NVIDIA driver, and torch {torch.__version__} was built for CPUs"
                return problem, "install torch for CUDA: https://pytorch.org/get-started"
            return f"no GPU: ranks run on {os.cpu_count()} cores"
        devices = range(torch.cuda.device_count())
        names = {torch.cuda.get_device_properties(number).name for number in devices}
        memory = [torch.cuda.mem_get_info(number) for number in devices]
        seen = f"{len(devices)} × {' and '.join(sorted(names))}, {min(total for _, total in memory) / 2**30:.1f} GiB"
        if busy := [str(number) for number, (free, total) in enumerate(memory) if total - free > BUSY_BYTES]:
            return f"{seen}; GPU {', '.join(busy)} is in use", "end the programs that use it: nvidia-smi names them"
        return seen

    def _master(self) -> Answer:
        address = self.world.master_addr
        if self.world.num_nodes == 1:
            return None
        try:
            found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, None)})
        except OSError as error:
            return f"MASTER_ADDR={address}: {error.strerror or error}", "give an address that all hosts can resolve"
        if self.world.node_rank > 0 and any(one.startswith("127.") or one == "::1" for one in found):
            problem = f"MASTER_ADDR={address} is {found[0]} here: this host itself, and rank 0 is on another one"
            return problem, "give the address of a network card (hostname -I), or mend /etc/hosts"
        return f"{address} is {', '.join(found)}"

    def _interface(self) -> Answer:
        cards = [name for _, name in socket.if_nameindex()]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            value = os.environ.get(variable, "")
            wanted = tuple(value.removeprefix("=").split(","))
            exact = variable.startswith("GLOO") or value.startswith("=")
            found = any(card in wanted if exact else card.startswith(wanted) for card in cards)
            if value and not value.startswith("^") and not found:
                return f"{variable}={value}, and this host has {', '.join(cards)}", f"unset {variable}, or name one"
        return ", ".join(cards)

    def _output_folder(self) -> Answer:
        config, folder, ranks = self.config, self.output, max(self.world.world_size, self.config.infra.num_gpus)
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE) as file:
                lock_file(file)  # type: ignore[arg-type]
        except OSError as error:
            return f"{folder}: {error.strerror}", "choose an infra.output_dir that this user may write"
        try:
            job = make_job(config, run_sizes(config), resolve_engine(config), world_size=ranks, ranks_per_node=ranks)
        except DsEncDecError as error:
            logger.debug("the size of checkpoints is not known: %s", error)
        else:
            checkpoints = RunFolder(config.infra.output_dir).checkpoints
            where = checkpoints if checkpoints.is_dir() else folder
            if (problem := disk_shortage(where, len(committed_steps(where)), config, job)) is not None:
                return problem, ""
        free = free_bytes(folder)
        return f"{folder}: writable, with locks" + (f", {free / 1e9:,.0f} GB free" if free is not None else "")

    def _open_files(self) -> Answer:
        ranks = max(self.world.world_size, self.config.infra.num_gpus)
        # Three groups connect every rank with every other (the host's, its background, and DeepSpeed's on CPUs).
        needed = 3 * ranks + 512
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and most < needed:
            problem = f"a process may open {most:,} files (ulimit -Hn), and {ranks:,} ranks need about {needed:,}"
            return problem, "raise nofile in /etc/security/limits.conf, or the container's (--ulimit nofile=1048576)"
        return f"up to {'any number of' if most == resource.RLIM_INFINITY else f'{most:,}'} files, {needed:,} needed"

    def _memory_limits(self) -> Answer:
        if not self.uses_gpus:
            return None
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
            problem = f"a process may lock {locked / 2**20:,.1f} MiB (ulimit -l), and InfiniBand's buffers are locked"
            return problem, "set memlock to unlimited in /etc/security/limits.conf (containers: --ulimit memlock=-1)"
        if (free := free_bytes(Path("/dev/shm"))) is not None and free < SHARED_MEMORY_BYTES:
            return f"/dev/shm has {free / 2**20:,.0f} MiB free", "containers: --shm-size=8g, or --ipc=host"
        return "enough locked and shared memory"

    def _hub(self) -> Answer:
        model = self.config.model
        name = model.model_name_or_path if model.architecture is None else model.tokenizer_name_or_path
        if name is None or not is_hub_name(name) or Path(name).expanduser().is_dir():
            return None
        model_folder(name, ("*.json",), field="model.model_name_or_path")  # raises an error with the fix
        return f"{name} can be read"


CHECKS: dict[str, Callable[[Host], Answer]] = {  # of one host, in the order in which they run
    "configuration": Host._configuration,
    "packages": Host._packages,
    "devices": Host._devices,
    "master address": Host._master,
    "network cards": Host._interface,
    "output folder": Host._output_folder,
    "open files": Host._open_files,
    "memory limits": Host._memory_limits,
    # Without headers of Python, the loss and the layers are slower.
    "Triton's compiler": lambda host: (triton_lacks() or "C compiles against Python.h") if host.uses_gpus else None,
    "model": Host._hub,
}


def look_here(files: ConfigFiles) -> tuple[list[Finding], bool]:
    """Return the findings about this host and, among several ranks, about all; and whether this rank prints them. Every
    rank calls it: several form a process group. Raises ConfigError for a wrong configuration or environment."""
    world, loaded = discover(os.environ), read_config(*files)
    loaded.valid()
    host, own, name = Host(loaded, world), list[Finding](), socket.gethostname()
    for check, function in (CHECKS if world.local_rank == 0 else {}).items():
        try:
            answer = function(host)
        except Exception as error:
            logger.debug("%s:", check, exc_info=True)
            answer = (str(error) if isinstance(error, DsEncDecError) else f"{type(error).__name__}: {error}", "")
        if answer is not None:
            message, fix = (answer, "") if isinstance(answer, str) else answer
            own.append(Finding(check, isinstance(answer, str), message, fix, name))
    findings = own if world.world_size == 1 else _together(host, own)
    return findings, world.is_main or any(finding.check == "meeting" for finding in findings)


def look_at_hosts(hostfile: Path, files: ConfigFiles) -> tuple[list[Finding], bool]:
    """Return the findings of a rank on each host of `hostfile`, and True: print them. Raises ConfigError."""
    loaded = read_config(*files)
    loaded.check_hosts(hostfile)
    loaded.valid()
    hosts, findings, reachable = list(read_hosts(hostfile, [])), list[Finding](), dict[str, str]()
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = pool.map(lambda host: _by_ssh(host, "hostname -I", 30), hosts)
        for host, answer in zip(hosts, answers, strict=True):
            if answer.returncode == 0:
                findings.append(Finding("ssh", True, answer.stdout.strip(), host=host))
                reachable[host] = answer.stdout
            else:
                why = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
                known = f"write your own hosts into {hostfile} instead of {host}, or make it known (DNS, /etc/hosts)"
                findings.append(Finding("ssh", False, why, known if "Could not resolve" in why else FIXES["ssh"], host))
        if not reachable:
            return findings + look_here(files)[0], True
        first, ranks = next(iter(reachable)), range(len(reachable))
        address = next(iter(reachable[first].split()), first)
        commands = [_command(rank, len(ranks), address, files) for rank in ranks]
        for host, report in zip(reachable, pool.map(_by_ssh, reachable, commands, [300.0] * len(ranks)), strict=True):
            try:
                findings += [Finding(**finding) for finding in json.loads(report.stdout)["findings"]]
            except ValueError:
                if report.returncode not in (0, 10) or report.stdout.strip():  # else another rank has printed them
                    why = f"exit code {report.returncode}: {(report.stderr.strip().splitlines() or ['no output'])[-1]}"
                    findings.append(Finding("start", False, why, FIXES["start"], host))
    return findings, True


def _by_ssh(host: str, command: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run([*SSH, host, command], capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(SSH, 127, "", "ssh is not installed here")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(SSH, 1, "", f"no answer within {seconds:.0f} s")


def _command(rank: int, ranks: int, address: str, files: ConfigFiles) -> str:
    path, overrides, deepspeed_config = files
    variables: dict[str, object] = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    variables |= {
        **read_variables([]),  # those that DeepSpeed's launcher would hand on; the port is its default, too
        **{"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1},
        **{"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT", 29500)},
    }
    words = [*(f"{name}={value}" for name, value in variables.items()), sys.executable, "-m", "ds_encdec.cli", "doctor"]
    words += ["--json", *(["--config", str(path)] if path else [])]
    words += ["--deepspeed_config", str(deepspeed_config)] if deepspeed_config else []
    return f"cd {shlex.quote(os.getcwd())} && env {shlex.join([*words, *overrides])}"


def _together(host: Host, own: list[Finding]) -> list[Finding]:
    """Return the findings of all hosts and of their connection, on every rank, or `own` and why they do not connect. A
    collective, like the functions below: every rank calls it."""
    timeout = timedelta(seconds=180.0)  # one rank per host checks it before, and may repeat requests to the hub
    try:
        # A rank without the configured GPU joins on its CPU, and the comparison reports it.
        device = attempt(lambda: choose_device(host.config.infra.device, host.world))[0] or torch.device("cpu")
        settings = host.config.model_dump(mode="json")
        init_process_group(host.world, device, timeout, "fsdp", meeting="doctor", settings=settings)
        everyone = HostCollectives(timeout)
        findings = [finding for found in everyone.gather(own) for finding in found]
        hosts = dict(enumerate(everyone.gather(socket.gethostname())))
        found = everyone.gather(versions(ENGINES, nccl=host.uses_gpus))
        lines, fix = differences(dict(enumerate(found)), hosts), "install the same on all hosts"
        findings += [
            Finding("equal versions", not lines, "; ".join(lines) or f"{len(found)} ranks agree", fix if lines else ""),
            _one_folder(host, hosts, everyone),
            _speed(device),
        ]
    except Exception as error:
        return [*own, Finding("meeting", False, f"{type(error).__name__}: {error}", host=socket.gethostname())]
    shutdown()
    return findings


def _one_folder(host: Host, hosts: dict[int, str], everyone: HostCollectives) -> Finding:
    try:
        with ExitStack() as opened:
            file = everyone.on_rank_zero(
                lambda: opened.enter_context(tempfile.NamedTemporaryFile(dir=host.output, prefix=PROBE)).name
            )
            folder, name = os.path.split(file)
            # Network file systems show other hosts' files a little later, and refresh their view at a listing.
            sees = awaited(10.0, lambda: name in (attempt(lambda: os.listdir(folder))[0] or ()))
            blind = sorted({hosts[rank] for rank, can in enumerate(everyone.gather(sees)) if not can})
    except DsEncDecError as error:
        return Finding("shared folder", False, f"{hosts[0]} cannot write there: {error}", "see `output folder`")
    if not blind:
        return Finding("shared folder", True, f"every rank sees what rank 0 writes to {folder}")
    message = f"{folder}: {', '.join(blind)} do not see what {hosts[0]} writes there"
    return Finding("shared folder", False, message, "mount one folder on all hosts, and set infra.output_dir to it")


def _speed(device: torch.device) -> Finding:
    ranks, num_bytes, seconds = dist.get_world_size(), 2**26 if device.type == "cuda" else 2**24, list[float]()
    numbers = torch.zeros(num_bytes // 4, device=device)
    for _ in range(6):  # the first one is not counted
        began = time.monotonic()
        dist.all_reduce(numbers)
        numbers[0].item()  # waits for the result
        seconds.append(time.monotonic() - began)
    rate = 2 * (ranks - 1) / ranks * num_bytes / statistics.median(seconds[1:])  # each rank's: bus bandwidth
    message = f"{num_bytes // 2**20} MiB over {ranks} ranks ({dist.get_backend()}): {rate / 1e9:.2f} GB/s each"
    return Finding("all_reduce", True, message)
