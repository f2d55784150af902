"""Which process am I, among how many? Answered from the environment alone, for every launcher.

`discover` is a pure function of its arguments: it reads no file, opens no socket unless it must
choose a port, and changes nothing. A launcher is one row of `LAUNCHERS`; adding one means adding a row.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    launcher: str

    @property
    def is_main(self) -> bool:
        """True on the one rank that speaks for the run."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables in which one launcher tells a process its place.

    `marker` is a variable that this launcher sets and the rows above it do not. The optional ones may
    be absent from the environment, or None where the launcher has no such variable: one node is assumed.
    """

    name: str
    marker: str
    rank: str = "RANK"
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str | None = None
    node_rank: str | None = None
    num_nodes: str | None = None
    master_addr: str = "MASTER_ADDR"
    master_port: str = "MASTER_PORT"

    @property
    def required(self) -> tuple[str, ...]:
        """Variables without which the place is unknown."""
        return (self.rank, self.local_rank, self.world_size, self.master_addr, self.master_port)


LAUNCHERS = (
    # torch/distributed/elastic/agent/server/local_elastic_agent.py sets these for every worker.
    Launcher(
        "torchrun",
        marker="TORCHELASTIC_RUN_ID",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
    ),
    # deepspeed/launcher/launch.py; CROSS_* and LOCAL_SIZE are Horovod's words, which it borrows.
    Launcher(
        "deepspeed",
        marker="CROSS_RANK",
        local_world_size="LOCAL_SIZE",
        node_rank="CROSS_RANK",
        num_nodes="CROSS_SIZE",
    ),
    # PyTorch's `env://` convention, set by hand or by a launcher that has no row of its own.
    Launcher("environment", marker="RANK", local_world_size="LOCAL_WORLD_SIZE"),
)
"""Tried in this order: the most particular marker first."""


@dataclass(frozen=True, slots=True)
class TaskStarter:
    """What starts several tasks of a job and tells them so in `variable`, but not in words that are read here.

    Each task would take itself for a run of its own. `count` reads the number of tasks from the variable's value.
    """

    name: str
    variable: str
    count: Callable[[str], int] = int


TASK_STARTERS = (
    TaskStarter("srun", "SLURM_STEP_NUM_TASKS"),
    TaskStarter("Open MPI", "OMPI_COMM_WORLD_SIZE"),
    TaskStarter("MPICH, or another MPI", "PMI_SIZE"),
    TaskStarter("SageMaker", "SM_HOSTS", count=lambda hosts: len(json.loads(hosts))),
)


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def discover(environ: Mapping[str, str], choose_port: Callable[[], int] = free_port) -> World:
    """Find this process's place in the run.

    `environ` is `os.environ` or any mapping like it; `choose_port` is asked only for a single process
    that names no MASTER_PORT. Raises ConfigError, naming the variables, when they are incomplete, not
    numbers, or contradict each other, and where this is one of several tasks that no launcher explains.
    """
    for launcher in LAUNCHERS:
        if launcher.marker in environ:
            return _checked(_read(launcher, environ), launcher, environ)
    stray = [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in environ]
    if stray:
        raise ConfigError(
            f"{' and '.join(stray)} set without RANK: this looks like part of a launcher's environment. "
            f"Unset {', '.join(stray)} to run one process, or start with deepspeed or torchrun."
        )
    _refuse_unexplained_tasks(environ)
    return World(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=choose_port(),
        launcher=SINGLE_PROCESS,
    )


def _refuse_unexplained_tasks(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where this is one task of several: each would train alone, on the whole data."""
    for starter in TASK_STARTERS:
        value = environ.get(starter.variable, "")
        try:
            tasks = starter.count(value)
        except (ValueError, TypeError):  # absent, or not what that starter writes
            continue
        if tasks > 1:
            raise ConfigError(
                f"{starter.variable}={value} says that {starter.name} has started {tasks} tasks, but RANK, by which "
                "each would know its place, is not set: every task would train alone. Start one task per machine, and "
                "there torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
                "ds_encdec/train.py …, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each. "
                f"To train with this process alone: unset {starter.variable}."
            )


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    """Read the launcher's variables, without judging them."""
    missing = [name for name in launcher.required if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"Started by {launcher.name} ({launcher.marker} is set), but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Set all of {', '.join(launcher.required)}, "
            f"or unset {launcher.marker} to run one process."
        )
    world_size = _integer(environ, launcher.world_size)

    def optional(name: str | None, default: int) -> int:
        return _integer(environ, name) if name is not None and environ.get(name) else default

    return World(
        rank=_integer(environ, launcher.rank),
        local_rank=_integer(environ, launcher.local_rank),
        world_size=world_size,
        local_world_size=optional(launcher.local_world_size, world_size),
        node_rank=optional(launcher.node_rank, 0),
        num_nodes=optional(launcher.num_nodes, 1),
        master_addr=environ[launcher.master_addr],
        master_port=_integer(environ, launcher.master_port),
        launcher=launcher.name,
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a whole number") from None


def _checked(world: World, launcher: Launcher, environ: Mapping[str, str]) -> World:
    """Return `world`, or raise for numbers that cannot be true together."""

    def shown(name: str | None) -> str:
        return f"{name}={environ.get(name, '(unset)')}" if name else "(no variable)"

    def need(holds: bool, *names: str | None) -> None:
        if not holds:
            listed = ", ".join(shown(name) for name in names if name is not None)
            raise ConfigError(f"Contradictory {launcher.name} environment: {listed}. Start all ranks by one launcher.")

    need(0 <= world.rank < world.world_size, launcher.rank, launcher.world_size)
    need(0 <= world.local_rank < world.local_world_size, launcher.local_rank, launcher.local_world_size)
    need(1 <= world.local_world_size <= world.world_size, launcher.local_world_size, launcher.world_size)
    need(0 <= world.node_rank < world.num_nodes, launcher.node_rank, launcher.num_nodes)
    need(world.num_nodes <= world.world_size, launcher.num_nodes, launcher.world_size)
    need(0 < world.master_port < 65536, launcher.master_port)
    if world.num_nodes == 1 and launcher.num_nodes is not None:
        need(
            world.local_world_size == world.world_size and world.local_rank == world.rank,
            launcher.rank,
            launcher.local_rank,
            launcher.local_world_size,
            launcher.world_size,
            launcher.num_nodes,
        )
    return world
