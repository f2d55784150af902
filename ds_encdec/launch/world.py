"""Finds this process's place among the ranks of a run, from the environment alone. A launcher is one row of
`LAUNCHERS`; to add one, add a row."""

import json
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ds_encdec.base.types import ConfigError

SINGLE_PROCESS = "python"  # launcher name of a process without a launcher: `python ds_encdec/train.py`
DEFAULT_PORT = "29500"  # the port of the rendezvous if none is set; torchrun and DeepSpeed take it, too


@dataclass(frozen=True, slots=True)
class World:
    """A process's place in the run: `rank` counts over all nodes, `local_rank` on this node. Ranks meet at
    `master_addr` and `master_port`. `launcher`: the name of the matching row of `LAUNCHERS`, or `SINGLE_PROCESS`.
    `counts_nodes`: it has given their number, which is 1 otherwise."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = SINGLE_PROCESS
    counts_nodes: bool = field(default=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True on the one rank that reports for the run."""
        return self.rank == 0


# Fields of a World without which the place is unknown → the environment variable that most launchers set for it.
_REQUIRED = {name: name.upper() for name in ("rank", "local_rank", "world_size", "master_addr", "master_port")}


@dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables in which one launcher gives a process its place. `marker`: a variable that this
    launcher sets and the rows above it do not. `own`: field of a World → variable, if `_REQUIRED` has another; fields
    in neither may be absent, and one node is assumed. `readers`: of fields that no variable holds directly; they return
    "" for a missing one. `programs`: scripts and modules whose python processes are this launcher. `task_programs`:
    those that start tasks of any program; a single task is no rank. `advice`: how to set a missing one."""

    name: str
    marker: str
    own: Mapping[str, str]
    programs: tuple[str, ...] = ()
    task_programs: tuple[str, ...] = ()
    readers: Mapping[str, Callable[[Mapping[str, str]], str]] = field(default_factory=dict)
    advice: str = ""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process with this environment as a rank."""
        return self.marker in environ and not (
            self.task_programs and environ.get(self.own["world_size"], "") in ("", "1")  # alone
        )


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation: `rack1-03` of `rack[1,4]-[03-05,7],login`."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0]) if found else ""


def _port_of(job: str) -> str:
    # All ranks of a job choose the same, and hardly another job on the same host.
    return str(20000 + zlib.crc32(job.encode()) % 10000) if job else DEFAULT_PORT


def _slurm_tasks_here(environ: Mapping[str, str]) -> str:
    # SLURM_STEP_TASKS_PER_NODE is `2(x3),1`.
    entries = [part.partition("(x") for part in environ["SLURM_STEP_TASKS_PER_NODE"].split(",")]
    return [count for count, _, times in entries for _ in range(int(times.rstrip(")") or 1))][
        int(environ["SLURM_NODEID"])
    ]


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Return MASTER_ADDR, or else the host of rank 0. `MASTER_ADDR=$(hostname -i) srun` names the host where that was
    typed, perhaps a login node, or a list, or a loopback address: these are ignored."""
    address = environ.get("MASTER_ADDR", "").strip()
    typed_there = address in (environ.get("SLURM_LAUNCH_NODE_IPADDR"), "localhost", "::1") or address.startswith("127.")
    if address and not typed_there and len(address.split()) == 1:
        return address
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    return "127.0.0.1" if environ.get("SLURM_STEP_NUM_NODES") == "1" else first_host(nodes)


def _mpi_address(environ: Mapping[str, str]) -> str:
    return environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_JOB_NODELIST", ""))


def _openmpi_address(environ: Mapping[str, str]) -> str:
    # Open MPI 4 and 5 give the host of `mpirun` differently.
    values = environ.get("OMPI_MCA_orte_hnp_uri", "") + " " + environ.get("PMIX_NAMESPACE", "")
    found = re.search(r"tcp://([^,:]+)", values) or re.search(r" prterun-(.+)-\d+@", values)
    daemon = environ.get("PMIX_SERVER_URI2", "").partition(";")[0]  # the first one is mpirun itself
    if found is None or (environ.get("OMPI_COMM_WORLD_RANK") == "0" and not daemon.endswith(".0")):
        return _mpi_address(environ)
    return environ.get("MASTER_ADDR") or found[1]


def _of_tasks(rank: str, local_rank: str, world_size: str, local_world_size: str) -> dict[str, str]:
    return {"rank": rank, "local_rank": local_rank, "world_size": world_size, "local_world_size": local_world_size}


# The rows in the order in which they are tried: the most specific marker first.
LAUNCHERS = (
    # torch/distributed/elastic/agent/server/local_elastic_agent.py sets these for every worker. `accelerate launch`
    # calls it, except for CPUs, and Kubeflow's PyTorchJob sets its place in PET_*.
    Launcher(
        "torchrun",
        marker="TORCHELASTIC_RUN_ID",
        own={"local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"},
        programs=("torchrun", "torch.distributed.run", "accelerate", "accelerate-launch"),
    ),
    # deepspeed/launcher/launch.py; CROSS_* and LOCAL_SIZE are names of Horovod, which it borrows.
    Launcher(
        "deepspeed",
        marker="CROSS_RANK",
        own={"local_world_size": "LOCAL_SIZE", "node_rank": "CROSS_RANK", "num_nodes": "CROSS_SIZE"},
        programs=("deepspeed", "deepspeed.launcher.launch"),
    ),
    # Also of `deepspeed --launcher openmpi`. The three below are in this order because mpirun, called in a Slurm job,
    # starts its daemons by srun, so its ranks also have srun's variables, which describe the daemons.
    Launcher(
        "openmpi",
        marker="OMPI_COMM_WORLD_SIZE",
        own=_of_tasks(
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
        ),
        task_programs=("mpirun", "mpiexec", "orterun", "mpirun.openmpi", "mpiexec.openmpi"),
        readers={
            "master_addr": _openmpi_address,
            "master_port": lambda environ: environ.get("MASTER_PORT") or _port_of(environ.get("PMIX_NAMESPACE", "")),
        },
        advice="with rank 0's host: mpirun -x MASTER_ADDR=HOST",
    ),
    # Hydra, which starts the ranks of MPICH, Intel MPI and MVAPICH; also `deepspeed --launcher mpich` and `impi`.
    Launcher(
        "mpich",
        marker="MPI_LOCALRANKID",
        own=_of_tasks("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
        task_programs=("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich"),
        readers={"master_addr": _mpi_address, "master_port": lambda environ: environ.get("MASTER_PORT", DEFAULT_PORT)},
        advice="with rank 0's host: mpirun -genv MASTER_ADDR HOST",
    ),
    # srun, also of `deepspeed --launcher slurm`. The shell of a batch job has no SLURM_STEP_*.
    Launcher(
        "slurm",
        marker="SLURM_STEP_NUM_TASKS",
        own={
            **_of_tasks("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
        },
        task_programs=("srun",),
        readers={
            "local_world_size": _slurm_tasks_here,
            "master_addr": _slurm_address,
            "master_port": lambda environ: (
                environ.get("MASTER_PORT") or _port_of(f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}")
            ),
        },
    ),
    # PyTorch's `env://` convention, set by hand or by a launcher that has no row of its own. Kubeflow's PyTorchJob
    # sets no local rank if each of its pods is one rank.
    Launcher(
        "environment",
        marker="RANK",
        own={"local_world_size": "LOCAL_WORLD_SIZE"},
        readers={
            "local_rank": lambda environ: environ.get("LOCAL_RANK", "0"),
            "local_world_size": lambda environ: environ.get("LOCAL_WORLD_SIZE") or "1" * ("LOCAL_RANK" not in environ),
        },
    ),
)
LAUNCHER_PROGRAMS = frozenset(program for launcher in LAUNCHERS for program in launcher.programs)
TASK_PROGRAMS = frozenset(program for launcher in LAUNCHERS for program in launcher.task_programs)

# Programs without a row that start several tasks of a job, each of which would take itself for the whole run. The
# variable that shows it → the program, and how its value gives the number of tasks.
TASK_STARTERS: dict[str, tuple[str, Callable[[str], int]]] = {
    "PMI_SIZE": ("an unknown MPI", int),
    "MV2_COMM_WORLD_SIZE": ("MVAPICH", int),
    "FLUX_JOB_SIZE": ("Flux", int),
    "PMIX_RANK": ("prterun or another PMIx launcher", lambda rank: int(rank) + 1),  # at least
    "PET_NNODES": ("Kubeflow or another that sets torchrun's variables", int),
    "SM_HOSTS": ("SageMaker", lambda hosts: len(json.loads(hosts))),
}


def free_port() -> int:
    """Return a TCP port on the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def discover(environ: Mapping[str, str], choose_port: Callable[[], int] = free_port) -> World:
    """Find this process's place in the run; a pure function but for `choose_port`, which is called only for a single
    process. Raises ConfigError, with the variables, if they are incomplete, not numbers, or contradictory, and if this
    is one of several tasks that no launcher explains."""
    if launcher := next((row for row in LAUNCHERS if row.has_started(environ)), None):
        return _read(launcher, environ)
    if stray := [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in environ]:
        raise ConfigError(
            f"{' and '.join(stray)} set without RANK: this looks like part of a launcher's environment. "
            f"Unset {', '.join(stray)} to run one process, or start with deepspeed or torchrun."
        )
    for variable, (starter, count) in TASK_STARTERS.items():
        with suppress(ValueError, TypeError):  # absent, or not what that starter writes
            if (tasks := count(environ.get(variable, ""))) > 1:
                raise ConfigError(
                    f"{variable}={environ[variable]}: {starter} has started {tasks} tasks, but RANK is not set, so "
                    "every task would train alone. Start one task per machine, with torchrun --nnodes N "
                    "--nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:PORT ds_encdec/train.py …, or set "
                    "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each. To train with this process "
                    f"alone, unset {variable}."
                )
    return World(master_port=choose_port())


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    variables = {**_REQUIRED, **launcher.own}
    fields: dict[str, Any] = {}
    for name, variable in variables.items():
        try:
            if value := launcher.readers[name](environ) if name in launcher.readers else environ.get(variable):
                fields[name] = value if name == "master_addr" else int(value)
        except (ValueError, LookupError):
            raise ConfigError(
                f"{variable}={environ.get(variable, '(unset)')}: {launcher.name} sets no such value. Start all ranks "
                "with one launcher"
            ) from None
    if launcher.task_programs and fields.get("local_world_size") == fields.get("world_size"):
        fields.setdefault("master_addr", "127.0.0.1")
    if missing := [variables[field] for field in _REQUIRED if field not in fields]:
        raise ConfigError(
            f"Started by {launcher.name} ({launcher.marker} is set), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Set all of "
            f"{', '.join(variables[field] for field in _REQUIRED)}"
            f"{launcher.advice and f' ({launcher.advice})'}, or unset {launcher.marker} to run one process."
        )
    ranks, here = fields["world_size"], fields.get("local_world_size", fields["world_size"])
    nodes = {"num_nodes": -(-ranks // max(here, 1)), "node_rank": fields["rank"] // max(here, 1)}
    counts_nodes = not fields.keys().isdisjoint(("num_nodes", "local_world_size"))
    world = World(**{"local_world_size": here, **nodes, **fields}, launcher=launcher.name, counts_nodes=counts_nodes)
    is_whole = world.local_world_size == world.world_size and world.local_rank == world.rank
    for holds, contradicting in (
        (0 <= world.rank < world.world_size, ("rank", "world_size")),
        (0 <= world.local_rank < world.local_world_size, ("local_rank", "local_world_size")),
        (1 <= world.local_world_size <= world.world_size, ("local_world_size", "world_size")),
        (0 <= world.node_rank < world.num_nodes, ("node_rank", "num_nodes")),
        (0 < world.master_port < 65536, ("master_port",)),
        (
            is_whole or world.num_nodes > 1 or not counts_nodes,
            ("rank", "local_rank", "local_world_size", "world_size", "num_nodes"),
        ),
    ):
        if not holds:
            names = (variables[field] for field in contradicting if field in variables)
            listed = ", ".join(f"{name}={environ.get(name, '(unset)')}" for name in names)
            raise ConfigError(
                f"Contradictory {launcher.name} environment: {listed}. Start all ranks with one launcher."
            )
    return world
