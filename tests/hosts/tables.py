"""The launchers and deaths that the tests of this folder try on two hosts, and what docs/launch.md says of them.

python tests/hosts/tables.py     writes both tables into docs/launch.md
"""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rig import REPOSITORY, Rig

PAGE = REPOSITORY / "docs" / "launch.md"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py"
DEEPSPEED = "deepspeed --hostfile hostfiles/2node_8gpu train.py"
# A way to start ranks on two machines → its name in run.json, and the command as docs/launch.md types it.
LAUNCHES = {
    "deepspeed": ("deepspeed", DEEPSPEED),
    "torchrun": ("torchrun", TORCHRUN),
    "srun": (
        "slurm",
        "MASTER_ADDR=$(hostname -i) MASTER_PORT=3442 srun --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 python -u "
        "train.py",
    ),
    "Open MPI": (
        "openmpi",
        "mpirun -n 16 --host node0:8,node1:8 --bind-to none -x PATH -x PYTHONPATH python -u train.py",
    ),
    "MPICH": ("mpich", "mpirun -n 16 -ppn 8 -hosts node0,node1 -genv MASTER_ADDR node0 python -u train.py"),
}

SMALL = {
    "--nproc-per-node 8": "--nproc-per-node 1",
    "--ntasks-per-node=8 --gpus-per-task=1": "--ntasks-per-node=1",
    "-n 16": "-n 2",
    "-ppn 8": "-ppn 1",
    "node0:8,node1:8": "node0,node1",
    "mpirun -n 2 -ppn": "mpirun.mpich -n 2 -ppn",
    "mpirun -n 2 --host": "mpirun.openmpi -n 2 --host",
    " python ": f" {sys.executable} ",
    "node0": "{first}",
    "node1": "{second}",
}


def small(typed: str, hostfile: Path, arguments: Sequence[str]) -> str:
    """The command as typed, for one rank on each of a host file's two hosts, with arguments of train.py."""
    for large, one in SMALL.items():
        typed = typed.replace(large, one)
    first, second = (line.split()[0] for line in hostfile.read_text().splitlines())
    typed = typed.format(first=first, second=second).replace("hostfiles/2node_8gpu", str(hostfile))
    return typed.replace(" train.py", f" {REPOSITORY}/ds_encdec/train.py {shlex.join(arguments)}")


Deed = Callable[[Rig, str, str, Path], object]  # happens to the run in a folder, on its first or its second host


@dataclass(frozen=True)
class Death:
    """One way in which a run on two hosts ends, and how it does. `launcher`: its command as typed. `deed`: in the
    table's words. `codes`: those of the launchers, host by host. `code`: of run.json. `noticed`: by whom. `seconds`:
    within which nothing of the run is left on any host."""

    launcher: str
    deed: str
    happens: Deed
    codes: tuple[int, ...]
    code: int
    noticed: str
    seconds: float = 60

    @property
    def state(self) -> str:
        return "preempted" if self.code == 75 else "failed"


def killed(kind: str, *, number: signal.Signals = signal.SIGKILL, on_first: bool = False, stop: bool = False) -> Deed:
    """A signal to a process of the run, mostly on its second host; `stop`: then somebody asks the run to end."""

    def happens(rig: Rig, first: str, second: str, folder: Path) -> None:
        rig.kill(first if on_first else second, kind, number)
        if stop:
            rig.run(second, "ds-encdec", "stop", str(folder))

    return happens


ELASTIC = TORCHRUN.replace("--nnodes 2", "--nnodes 1:2 --max-restarts 3 --rdzv-conf last_call_timeout=5")
GOES_ON = "nobody, and the run goes on: `ds-encdec stop RUN` on any host ends it"
_interrupted = killed("deepspeed", number=signal.SIGINT, on_first=True)
_killed_and_stopped = killed("deepspeed", on_first=True, stop=True)
DEATHS = {
    "rank": Death(DEEPSPEED, "`kill -9` of a rank", killed("rank"), (247,), 9, "the other ranks"),
    "launch.py": Death(
        DEEPSPEED, "`kill -9` of a host's `launch.py`", killed("launch.py"), (255,), 75, "the ranks of that host"
    ),
    "deepspeed": Death(DEEPSPEED, "`kill -9` of `deepspeed`", _killed_and_stopped, (-9,), 75, GOES_ON),
    "Ctrl-C": Death(DEEPSPEED, "Ctrl-C on `deepspeed`", _interrupted, (1,), 75, "`deepspeed`, which signals all hosts"),
    "cut link": Death(
        DEEPSPEED,
        "the network between hosts is cut",
        lambda rig, first, second, folder: rig.cut(second),
        (255,),
        8,
        "the watchdog, after `infra.hang_timeout_minutes`; `deepspeed`, if ssh's `ServerAliveInterval` is set",
        120,
    ),
    "host": Death(
        DEEPSPEED,
        "a host goes down",
        lambda rig, first, second, folder: rig.switch_off(second),
        (255,),
        9,
        "the other ranks",
    ),
    "agent": Death(TORCHRUN, "`kill -9` of an agent", killed("agent"), (1, -9), 75, "the ranks of that host"),
}


BEGIN, END = "<!-- deaths: written by tests/hosts/tables.py -->\n", "<!-- end of deaths -->\n"


def deaths_table() -> str:
    rows = [
        "| launcher | what happens | who notices | all has ended within | `run.json` | launcher's code | lost |",
        "|" + "---|" * 7,
    ]
    for death in DEATHS.values():
        launcher = shlex.split(death.launcher)[0]
        codes = ", ".join(f"killed by {-code}" if code < 0 else str(code) for code in death.codes)
        lost = "nothing" if death.code == 75 else "steps since the last save"
        cells = (launcher, death.deed, death.noticed, f"{death.seconds:g} s", f"{death.state}, {death.code}")
        rows.append(f"| {' | '.join(cells)} | {codes} | {lost} |")
    elastic = "torchrun --nnodes 1:2 --max-restarts 3 | a host goes down | the other's agent, which starts ranks again"
    rows.append(f"| {elastic} | | running, on one host | | steps since the last save |")
    return "\n".join([*rows, ""])


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + deaths_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
