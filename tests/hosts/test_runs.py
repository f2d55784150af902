"""Two hosts train as one does, however their ranks have learnt of each other; hosts that differ do not begin."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rig import DEEPSPEED, FSDP, REPOSITORY, Finished, ForkedRuns, Rig, arguments, run, told, words
from tiny_run import losses

HYBRID = {"infra.sharding_stage": "zero3_hybrid"}
BY_HAND = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class Job:
    """Ranks on node0 and node1, settings of all and of node1, variables of torchrun's that are not set; how it ends.
    `says`: words of every rank's. `like`: the job whose losses it has, to the last digit."""

    ranks: tuple[int, ...] = (1, 1)
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_node1: Mapping[str, Any] = field(default_factory=dict)
    unset: Sequence[str] = ()
    code: int = 0
    says: tuple[str, ...] = ()
    like: str = ""


JOBS = {
    "one host": Job((2,), FSDP),
    "two hosts": Job((1, 1), FSDP, like="one host"),
    "two by two": Job((2, 2), FSDP, like="one host"),
    "hybrid": Job((2, 2), FSDP | HYBRID, like="two by two"),
    "DeepSpeed, two by two": Job((2, 2), DEEPSPEED),
    "hpZ": Job((2, 2), DEEPSPEED | HYBRID, like="DeepSpeed, two by two"),
    "by hand, no local size": Job(unset=(*BY_HAND, "LOCAL_WORLD_SIZE", "LOCAL_RANK"), like="one host"),
    "named 127.0.1.1": Job(like="one host"),
    "named as docker0": Job(like="one host"),
    "other settings": Job(
        on_node1={"training.learning_rate": 1e-4},
        code=2,
        says=("training.learning_rate: 0.003 for rank 0 (node0), 0.0001 for rank 1 (node1)",),
    ),
    "other data": Job(
        settings={"data.dataset_name": "text", "data.data_files": "{folder}/texts/*.txt"},
        on_node1={"data.data_files": "{folder}/texts/[a-m]*.txt"},
        code=4,
        says=("do not read the same data", "rank 0 (node0)", "rank 1 (node1)"),
    ),
    "a mistake on one host": Job(on_node1={"training.learning_rate": "many"}, code=2, says=("rank 1 (node1)", "many")),
    "a folder that is not shared": Job(
        settings={"infra.output_dir": "{folder}/local/out"}, code=5, says=("is not shared",)
    ),
    "one that does not come": Job(
        (1,), settings={"infra.start_timeout_minutes": 0.1}, code=9, says=("rank 1 did not join",)
    ),
}


@dataclass
class Jobs:
    rig: Rig
    forked: ForkedRuns
    finished: dict[str, Finished] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        return self.rig.folder / "runs" / name.replace(" ", "-")

    def ended(self, name: str) -> Finished:
        if name not in self.finished:
            job = JOBS[name]
            own = [word.format(folder=self.rig.folder) for word in words(job.settings)]
            other = [word.format(folder=self.rig.folder) for word in words(job.on_node1)]
            self.finished[name] = run(
                self.rig,
                self.forked,
                dict(zip(self.rig.hosts, job.ranks, strict=False)),
                [*arguments(self.folder(name)), *own],
                on={"node1": other},
                variables={"WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2} if job.ranks == (1,) else None,
                unset=job.unset,
            )
        return self.finished[name]


@pytest.fixture(scope="module")
def jobs(rig: Rig, forked: ForkedRuns) -> Jobs:
    (texts := rig.folder / "texts").mkdir()
    for page in (REPOSITORY / "docs").glob("*.md"):
        shutil.copy(page, texts / f"{page.stem}.txt")
    return Jobs(rig, forked)


@pytest.fixture
def resolve(rig: Rig) -> Iterator[Callable[..., None]]:
    yield rig.resolve
    for host in rig.hosts[:2]:
        rig.resolve(host)


@pytest.mark.parametrize("name", JOBS)
def test_hosts_train_as_one_or_say_why_not(name: str, jobs: Jobs, resolve: Callable[..., None]) -> None:
    job = JOBS[name]
    if name == "named 127.0.1.1":  # as Debian writes it for a machine's own name
        resolve("node0", node0="127.0.1.1")
        resolve("node1", node1="127.0.1.1")
    if name == "named as docker0":  # a bridge of each host's own, which reaches no other, and which its name may mean
        for host in jobs.rig.hosts[:2]:
            for asked in ("link add docker0 type bridge", "addr add 10.0.0.1/24 dev docker0", "link set docker0 up"):
                jobs.rig.run(host, "ip", *asked.split())
            resolve(host, **{host: "10.0.0.1"})
    ended = jobs.ended(name)
    assert set(ended.codes) == {job.code}, ended.output
    assert not ended.left
    missing = [text for text in job.says if text not in " ".join(ended.output.split())]
    assert not missing, ended.output
    if job.code == 0:
        status = told(jobs.folder(name))
        assert (status["state"], status["world_size"]) == ("completed", sum(job.ranks))
        assert [*status["hosts"]] == jobs.rig.hosts[: len(job.ranks)]
        if job.like:
            jobs.ended(job.like)
            assert losses(jobs.folder(name)) == losses(jobs.folder(job.like))


DOCTOR = ("ds-encdec", "doctor", "quickstart", "--json")


def wrong_findings(report: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(report)["findings"]:
        if not finding["passed"]:
            found.setdefault(finding["check"], []).append(finding)
    return found


def test_the_doctor_finds_by_ssh_what_is_wrong_with_other_hosts(rig: Rig) -> None:
    deaf = rig.hosts[-1]
    rig.run(deaf, "pkill", "-x", "sshd")
    hostfile = rig.hostfile("node0", "node1", deaf)
    settings = ("data.num_lanes=3", f"infra.output_dir={rig.folder / 'local'}")
    asked = (*DOCTOR, "--hostfile", str(hostfile), *settings)
    done = rig.run("node0", *asked, check=False)
    assert done.returncode == 10, done.stderr
    found = wrong_findings(done.stdout)
    assert found.keys() == {"ssh", "shared folder"}
    assert [finding["host"] for finding in found["ssh"]] == [deaf]
    assert "node1 do not see what node0 writes" in found["shared folder"][0]["message"]
