"""Every launcher's ranks find each other on two hosts, as typed, and train what one host does, to the last digit."""

from __future__ import annotations

import shlex
import sys

import pytest
from forked_runs import ForkedRuns
from rig import REPOSITORY, Rig
from tables import LAUNCHES
from tiny_run import losses
from two_hosts import DEEPSPEED, FSDP, arguments, run, start, told


@pytest.fixture(scope="module")
def slurm(rig: Rig) -> None:
    rig.start_slurm("node0", "node1")


@pytest.mark.parametrize("name", LAUNCHES)
def test_losses_are_those_of_one_host(name: str, rig: Rig, forked: ForkedRuns, slurm: None) -> None:
    launch = LAUNCHES[name]
    engine = DEEPSPEED if name == "deepspeed" else FSDP
    alone = rig.folder / f"alone.{engine['infra.distributed_type']}"
    if not alone.exists():
        assert run(rig, forked, {"node0": 2}, arguments(alone, engine)).codes == [0, 0]
    folder = rig.folder / name.replace(" ", "-")
    typed = launch.typed.format(
        first="node0",
        second="node1",
        hostfile=rig.hostfile("node0", "node1"),
        python=sys.executable,
        train=shlex.join([str(REPOSITORY / "ds_encdec/train.py"), *arguments(folder, engine)]),
    )
    started = start(rig, typed, "node0", "node1", log=folder.with_suffix(".log"), each=launch.on_each)
    codes = {process.wait(timeout=300) for process in started}
    printed = [log.read_text() for log in folder.parent.glob(f"{folder.name}.log.*")]
    assert codes == {0}, "\n".join(printed)
    status = told(folder)
    assert (status["state"], status["world_size"], status["launcher"]) == ("completed", 2, launch.row)
    assert losses(folder) == losses(alone)
