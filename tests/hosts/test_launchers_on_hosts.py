"""Every launcher's ranks find each other on two hosts, as typed, and train what one host does, to the last digit."""

from __future__ import annotations

import pytest
from forked_runs import ForkedRuns
from rig import Rig
from tables import LAUNCHES, small
from tiny_run import losses
from two_hosts import DEEPSPEED, FSDP, arguments, run, start, told


@pytest.mark.parametrize("name", LAUNCHES)
def test_losses_are_those_of_one_host(name: str, slurm: Rig, forked: ForkedRuns) -> None:
    rig = slurm
    row, typed = LAUNCHES[name]
    engine = DEEPSPEED if name == "deepspeed" else FSDP
    alone = rig.folder / f"alone.{engine['infra.distributed_type']}"
    if not alone.exists():
        assert run(rig, forked, {"node0": 2}, arguments(alone, engine)).codes == [0, 0]
    folder = rig.folder / name.replace(" ", "-")
    command = small(typed, rig.hostfile("node0", "node1"), arguments(folder, engine))
    started = start(rig, command, "node0", "node1", log=folder.with_suffix(".log"))
    codes = {process.wait(timeout=300) for process in started}
    printed = [log.read_text() for log in folder.parent.glob(f"{folder.name}.log.*")]
    assert codes == {0}, "\n".join(printed)
    status = told(folder)
    assert (status["state"], status["world_size"], status["launcher"]) == ("completed", 2, row)
    assert status["hosts"] == {"node0": "0", "node1": "1"}
    assert losses(folder) == losses(alone)
