"""Which process am I, among how many? Answered from the environment alone, for every launcher.

`discover` is a pure function of its arguments: it reads no file, opens no socket unless it must
choose a port, and changes nothing. A launcher is one row of `LAUNCHERS`; adding one means adding a row.
"""

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ds_encdec.types import ConfigError

SINGLE_PROCESS = "python"
"""Launcher name of a process that nobody launched: `python ds_encdec/train.py`."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all processes of the run.

    `rank` of `world_size` counts over all nodes, `local_rank` of `local_world_size` on this node, and
    `node_rank` of `num_nodes` the nodes. `master_addr` and `master_port` are where ranks meet.
    `launcher` is the name of the row of `LAUNCHERS` that matched, or `SINGLE_PROCESS`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = SINGLE_PROCESS

    @property
    def is_main(self) -> bool:
        """True on the one rank that speaks for the run."""
        return self.rank == 0


_REQUIRED = {name: name.upper() for name in ("rank", "local_rank", "world_size", "master_addr", "master_port")}
"""Field of a World without which the place is unknown → the environment variable that most launchers set it in."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables in which one launcher tells a process its place.

    `marker` is a variable that this launcher sets and the rows above it do not. `own`: field of a World → variable,
    where it is not that of `_REQUIRED`; what is not required may be absent from the environment, and one node is
    assumed. `programs`: the scripts and modules whose python processes are this launcher.
    """

    name: str
    marker: str
    own: Mapping[str, str]
    programs: tuple[str, ...] = ()


LAUNCHERS = (
    # torch/distributed/elastic/agent/server/local_elastic_agent.py sets these for every worker.
    Launcher(
        "torchrun",
        marker="TORCHELASTIC_RUN_ID",
        own={"local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"},
        programs=("torchrun", "torch.distributed.run"),
    ),
    # deepspeed/launcher/launch.py; CROSS_* and LOCAL_SIZE are Horovod's words, which it borrows.
    Launcher(
        "deepspeed",
        marker="CROSS_RANK",
        own={"local_world_size": "LOCAL_SIZE", "node_rank": "CROSS_RANK", "num_nodes": "CROSS_SIZE"},
        programs=("deepspeed", "deepspeed.launcher.launch"),
    ),
    # PyTorch's `env://` convention, set by hand or by a launcher that has no row of its own.
    Launcher("environment", marker="RANK", own={"local_world_size": "LOCAL_WORLD_SIZE"}),
)
"""Tried in this order: the most particular marker first."""
LAUNCHER_PROGRAMS = frozenset(program for launcher in LAUNCHERS for program in launcher.programs)

TASK_STARTERS: dict[str, tuple[str, Callable[[str], int]]] = {
    "SLURM_STEP_NUM_TASKS": ("srun", int),
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", int),
    "PMI_SIZE": ("MPICH, or another MPI", int),
    "SM_HOSTS": ("SageMaker", lambda hosts: len(json.loads(hosts))),
}
"""Programs that start several tasks of a job, each of which would take itself for a run of its own.

The variable that tells it → the program, and how the number of tasks is read from its value.
"""


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def discover(environ: Mapping[str, str], choose_port: Callable[[], int] = free_port) -> World:
    """Find this process's place in the run.

    `environ` is `os.environ` or any mapping like it; `choose_port` is asked only for a single process
    that names no MASTER_PORT. Raises ConfigError, naming the variables, when they are incomplete, not
    numbers, or contradict each other, and where this is one of several tasks that no launcher explains.
    """
    if launcher := next((row for row in LAUNCHERS if row.marker in environ), None):
        return _read(launcher, environ)
    if stray := [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in environ]:
        raise ConfigError(
            f"{' and '.join(stray)} set without RANK: this looks like part of a launcher's environment. "
            f"Unset {', '.join(stray)} to run one process, or start with deepspeed or torchrun."
        )
    _refuse_unexplained_tasks(environ)
    return World(master_port=choose_port())


def _refuse_unexplained_tasks(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where this is one task of several: each would train alone, on the whole data."""
    for variable, (starter, count) in TASK_STARTERS.items():
        tasks, value = 1, environ.get(variable, "")
        with suppress(ValueError, TypeError):  # absent, or not what that starter writes
            tasks = count(value)
        if tasks > 1:
            raise ConfigError(
                f"{variable}={value} says that {starter} has started {tasks} tasks, but RANK, by which "
                "each would know its place, is not set: every task would train alone. Start one task per machine, and "
                "there torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
                "ds_encdec/train.py …, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each. "
                f"To train with this process alone: unset {variable}."
            )


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    """The place that `launcher` tells. Raises ConfigError for variables that are missing or not numbers."""
    variables = {**_REQUIRED, **launcher.own}
    required = [variables[field] for field in _REQUIRED]
    if missing := [name for name in required if not environ.get(name)]:
        raise ConfigError(
            f"Started by {launcher.name} ({launcher.marker} is set), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Set all of {', '.join(required)}, "
            f"or unset {launcher.marker} to run one process."
        )
    told: dict[str, Any] = {field: environ[name] for field, name in variables.items() if environ.get(name)}
    for field in told.keys() - {"master_addr"}:
        try:
            told[field] = int(told[field])
        except ValueError:
            raise ConfigError(f"{variables[field]}={told[field]!r} is not a whole number") from None
    world = World(**{"local_world_size": told["world_size"], **told}, launcher=launcher.name)
    if wrong := _contradicting(world, is_node=world.num_nodes == 1 and "num_nodes" in variables):
        names = [variables[field] for field in wrong if field in variables]
        listed = ", ".join(f"{name}={environ.get(name, '(unset)')}" for name in names)
        raise ConfigError(f"Contradictory {world.launcher} environment: {listed}. Start all ranks by one launcher.")
    return world


def _contradicting(world: World, *, is_node: bool) -> tuple[str, ...]:
    """The first fields whose numbers cannot be true together; `is_node`: the launcher says that there is one node."""
    is_whole = world.local_world_size == world.world_size and world.local_rank == world.rank
    rows = (
        (0 <= world.rank < world.world_size, ("rank", "world_size")),
        (0 <= world.local_rank < world.local_world_size, ("local_rank", "local_world_size")),
        (1 <= world.local_world_size <= world.world_size, ("local_world_size", "world_size")),
        (0 <= world.node_rank < world.num_nodes, ("node_rank", "num_nodes")),
        (world.num_nodes <= world.world_size, ("num_nodes", "world_size")),
        (0 < world.master_port < 65536, ("master_port",)),
        (is_whole or not is_node, ("rank", "local_rank", "local_world_size", "world_size", "num_nodes")),
    )
    return next((fields for holds, fields in rows if not holds), ())
