"""Every launcher's ranks find each other on two hosts, as typed, and train what one host does, to the last digit. And
scripts/slurm/preemptible.sbatch: after preemption and time limit a job goes on; cancelled, not."""

import sys
import time

import pytest
from rig import DEEPSPEED, ENDLESS, FSDP, ForkedRuns, Rig, arguments, run, saved, start, told, until
from tables import LAUNCHES, PAGE, small, with_table
from tiny_run import losses

ONE_RANK_EACH = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")


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


def test_a_job_goes_on_until_it_is_cancelled(slurm: Rig) -> None:
    rig, folder, log = slurm, slurm.folder / "job", slurm.folder / "job.log"
    own = [*arguments(folder, **ENDLESS), "training.logging_steps=1"]
    limit = ("--time=2", "--signal=USR1@45")
    script = ("scripts/slurm/preemptible.sbatch", *own)
    submitted = rig.run(
        "node0", "sbatch", "--parsable", *ONE_RANK_EACH, *limit, f"--output={log}", *script, VIRTUAL_ENV=sys.prefix
    )
    job = submitted.stdout.strip()

    def requeues() -> int:
        return log.read_text().count("goes back into the queue")

    until(lambda: saved(folder), 150)
    rig.run("node0", "srun", "-p", "high", "-N2", "--ntasks-per-node=1", "--exclusive", "hostname")
    until(lambda: requeues() == 1, 60)
    assert (told(folder)["state"], told(folder)["exit_code"]) == ("preempted", 75)
    for restart in (1, 2):  # the second after the signal that comes before the time limit
        until(lambda restart=restart: requeues() >= restart, 180)
        time.sleep(5)  # a job that is started in the second in which it was put back fails
        rig.run("node0", "scontrol", "update", f"jobid={job}", "StartTime=now")  # which Slurm puts off by minutes
        until(lambda restart=restart: f"start {restart} of job {job}" in log.read_text(), 60)
        reached = saved(folder)[-1]
        until(lambda reached=reached: saved(folder)[-1] > reached + 20, 150)
    before = requeues()
    rig.run("node0", "scancel", job)
    until(lambda: told(folder)["state"] != "running", 60)
    assert (told(folder)["state"], told(folder)["exit_code"]) == ("preempted", 75)
    until(lambda: "JobState=CANCELLED" in rig.run("node0", "scontrol", "show", "job", job).stdout, 60)
    assert requeues() == before


def test_the_page_is_what_the_hosts_do() -> None:
    page = PAGE.read_text()
    assert [typed for _, typed in LAUNCHES.values() if f"`{typed}`" not in page] == []
    assert with_table(page) == page, "run python tests/hosts/tables.py"
