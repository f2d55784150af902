"""The launchers and deaths that the tests of this folder try on two hosts, and what docs/launch.md says of them.

python tests/hosts/tables.py     writes both tables into docs/launch.md
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rig import Rig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launch.md"


@dataclass(frozen=True)
class Launch:
    """A row of `ds_encdec.launch.world.LAUNCHERS` and the command as typed for two hosts, on the first or on each."""

    row: str
    typed: str
    on_each: bool = False


LAUNCHES = {
    "deepspeed": Launch("deepspeed", "deepspeed --hostfile {hostfile} {train}"),
    "torchrun": Launch(
        "torchrun",
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {first}:29500 {train}",
        on_each=True,
    ),
    "srun": Launch(
        "slurm", "MASTER_ADDR=$(hostname -i) MASTER_PORT=3442 srun --nodes 2 --ntasks-per-node 1 {python} -u {train}"
    ),
    "Open MPI": Launch(
        "openmpi",
        "mpirun.openmpi -n 2 --host {first},{second} --bind-to none "
        "-x PYTHONPATH -x DS_ACCELERATOR -x OMP_NUM_THREADS {python} -u {train}",
    ),
    "MPICH": Launch("mpich", "mpirun.mpich -n 2 -hosts {first},{second} -genv MASTER_ADDR {first} {python} -u {train}"),
}


@dataclass(frozen=True)
class Death:
    """One way in which a run on two hosts ends, and how it does.

    `launcher`: as typed. `deed`: as the table says it; `happens` does it on the first or the second host of the run,
    whose folder it also gets. `codes`: those of the launchers. `state` and `code`: of run.json. `seconds`: within which
    nothing of the run is left on any host. `tells`: the table's words on who notices.
    """

    launcher: str
    deed: str
    happens: Callable[[Rig, str, str, Path], object]
    codes: tuple[int, ...]
    state: str
    code: int
    seconds: float
    tells: str

    @property
    def is_saved(self) -> bool:
        return self.code == 75


def stop_from_the_other_host(rig: Rig, first: str, second: str, folder: Path) -> None:
    rig.kill(first, "deepspeed")
    rig.run(second, "ds-encdec", "stop", str(folder))


PDSH = LAUNCHES["deepspeed"].typed
ELASTIC = (
    "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint {first}:29500 "
    "--rdzv-conf last_call_timeout=5 {train}"
)
FIXED = LAUNCHES["torchrun"].typed
DEATHS = {
    "rank": Death(
        PDSH,
        "kill -9 of a rank",
        lambda rig, first, second, folder: rig.kill(second, "rank"),
        (247,),
        "failed",
        9,
        60,
        "the other ranks, by the broken connection",
    ),
    "launch.py": Death(
        PDSH,
        "kill -9 of DeepSpeed's launcher on one host",
        lambda rig, first, second, folder: rig.kill(second, "launch.py"),
        (255,),
        "preempted",
        75,
        60,
        "its ranks, which ask the run to stop",
    ),
    "pdsh": Death(
        PDSH,
        "kill -9 of pdsh",
        lambda rig, first, second, folder: rig.kill(first, "pdsh"),
        (0,),
        "preempted",
        75,
        60,
        "",
    ),
    "deepspeed": Death(
        PDSH,
        "kill -9 of the `deepspeed` command",
        stop_from_the_other_host,
        (-9,),
        "preempted",
        75,
        60,
        "nobody: the run goes on until `ds-encdec stop RUN` on any host",
    ),
    "Ctrl-C": Death(
        PDSH,
        "Ctrl-C on the `deepspeed` command",
        lambda rig, first, second, folder: rig.kill(first, "deepspeed", signal.SIGINT),
        (1,),
        "preempted",
        75,
        60,
        "",
    ),
    "cut link": Death(
        PDSH,
        "the network between the hosts is cut",
        lambda rig, first, second, folder: rig.cut(second),
        (255,),
        "failed",
        8,
        120,
        "the watchdog, after `infra.hang_timeout_minutes`",
    ),
    "host": Death(
        PDSH,
        "a host goes down",
        lambda rig, first, second, folder: rig.switch_off(second),
        (255,),
        "failed",
        9,
        60,
        "",
    ),
    "agent": Death(
        FIXED,
        "kill -9 of an agent",
        lambda rig, first, second, folder: rig.kill(second, "agent"),
        (1, -9),
        "preempted",
        75,
        60,
        "its ranks, which ask the run to stop",
    ),
}
