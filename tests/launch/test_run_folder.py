"""The lock on a run's folder, and run.json: how a run began and ended, without secrets."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from ds_encdec.base.types import ConfigError, OutputLockedError
from ds_encdec.launch import run_folder
from ds_encdec.launch.disk import disk_error
from ds_encdec.launch.run_folder import RunFolder, git_state, masked, start_facts
from ds_encdec.launch.world import discover


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(str(tmp_path / "run"))
    folder.claim(resume=False)
    return folder


def again(folder: RunFolder) -> RunFolder:
    return RunFolder(str(folder.root))


def test_a_second_run_is_refused_unless_it_resumes(folder: RunFolder) -> None:
    folder.write_status("running", started_with="x")
    folder.metrics.write_text("{}\n")
    claims = (lambda run: run.claim(resume=False), RunFolder.refuse_taken, lambda run: run.claim(resume=True))
    for claim in claims:
        with pytest.raises(OutputLockedError, match="in use by process"):
            claim(again(folder))
    folder.release()
    for claim in claims[:2]:
        with pytest.raises(OutputLockedError, match="already holds a run"):
            claim(again(folder))
    claims[2](again(folder))


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(folder: RunFolder) -> None:
    folder.metrics.touch()
    folder.write_status("failed", reason="no such column", exit_code=4)
    folder.release()
    second = again(folder)
    second.claim(resume=False)
    second.write_status("running")
    assert second.read_status()["state"] == "running"


def test_ranks_that_fail_together_keep_the_first_reason(folder: RunFolder) -> None:
    folder.write_status("running", world_size=8)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(fail, [(str(folder.root), rank) for rank in range(40)])
    status = folder.read_status()
    assert (status["state"], status["exit_code"], status["world_size"]) == ("failed", 4, 8)
    folder.write_status("failed", reason="a peer is gone", exit_code=1)
    assert folder.read_status() == status
    folder.write_status("running")
    assert folder.read_status()["state"] == "running"


@pytest.mark.parametrize("state", ["completed", "preempted"])
def test_a_good_end_is_kept_until_the_next_start(folder: RunFolder, state: str) -> None:
    folder.write_status(state)
    folder.write_status("failed", reason="a peer is gone", exit_code=9)
    assert folder.read_status()["state"] == state
    folder.release()
    folder = again(folder)
    assert folder.claim(resume=True)["state"] == state
    for reason in ("refused", "a peer is gone"):
        folder.write_status("failed", reason=reason, exit_code=5)
    assert (folder.read_status()["state"], folder.read_status()["reason"]) == ("failed", "refused")
    folder.run_json.unlink()
    folder.write_status("failed", reason="after somebody deleted it", exit_code=5)
    assert folder.read_status()["exit_code"] == 5


def fail(root: str, rank: int) -> None:
    RunFolder(root).write_status("failed", reason=f"rank {rank}", exit_code=4)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_held_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:

    def no_locks(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunFolder(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"infra\.output_dir: .*cannot be locked .*-o flock.*another file system"):
        folder.claim(resume=False)
    folder.write_status("failed", reason="told by a host that cannot lock", exit_code=5)
    assert folder.read_status()["exit_code"] == 5


def test_on_a_full_disk_an_ending_is_written_over_the_old_text(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_status("running", world_size=2)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_atomically", full)
    folder.write_status("failed", reason="x" * 100_000, exit_code=5)
    ended = folder.read_status()
    assert (ended["state"], ended["exit_code"], ended["world_size"], set(ended["reason"])) == ("failed", 5, 2, {"x"})
    assert folder.run_json.stat().st_size < 4096


def raised(kind: type[Exception], earlier: OSError, *, explicitly: bool) -> Exception:
    try:
        try:
            raise earlier
        except OSError as error:
            if explicitly:
                raise kind("later") from error
            raise kind("later")  # noqa: B904  what is asked about
    except Exception as error:
        return error


def test_which_errors_are_the_disks() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert disk_error(full) is full
    assert disk_error(raised(ValueError, full, explicitly=True)) is full
    assert disk_error(raised(RuntimeError, full, explicitly=False)) is full  # torch.save
    assert disk_error(raised(KeyError, full, explicitly=False)) is None  # a bug where an OSError was handled
    assert disk_error(RuntimeError("a bug")) is None
    for network in (
        ConnectionResetError(errno.ECONNRESET, "reset by peer"),
        TimeoutError(errno.ETIMEDOUT, "timed out"),
    ):
        assert disk_error(network) is None
        assert disk_error(raised(RuntimeError, network, explicitly=True)) is None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--token", "hunter2"], "train.py --token '***'"),
        (["train.py", "--hub-token=hunter2"], "train.py '--hub-token=***'"),
        (["train.py", "infra.wandb_api_key=hunter2"], "train.py 'infra.wandb_api_key=***'"),
        (["train.py", "HF_TOKEN=hunter2", "x.Password=hunter2"], "train.py 'HF_TOKEN=***' 'x.Password=***'"),
        (["train.py", 'x={"client_secret": "hunter2", "a": 1}'], """train.py 'x={"client_secret": ***, "a": 1}'"""),
        (["train.py", "x.password=correct horse", "--key", "a b"], "train.py 'x.password=***' --key '***'"),
        (["train.py", "data.data_files=https://me:hunter2@host/f"], "train.py 'data.data_files=https://***@host/f'"),
        (["train.py", "WANDB_API_KEY=a\nhunter2"], "train.py 'WANDB_API_KEY=***'"),
        (["train.py", "--access_key_id=hunter2", "--auth", "hunter2"], "train.py '--access_key_id=***' --auth '***'"),
        (["train.py", "x=s3://me:hun/hunter2@host/f"], "train.py 'x=s3://***@host/f'"),
        (["train.py", "x={token: 'it''hunter2', a: 1}"], """train.py 'x={token: ***, a: 1}'"""),
        (["train.py", "x={Authorization: Bearer hunter2}"], "train.py 'x={Authorization: ***}'"),
        (["train.py", "phases.full.num_tokens=5", "x.loss_chunk_tokens=8"], None),
        (["train.py", "model.tokenizer_name_or_path=gpt2", "model.architecture.num_key_value_heads=2"], None),
        (["train.py", "--config", "a.yaml", "training.seed=3"], None),
        ([], ""),
    ],
)
def test_secrets_are_masked_and_nothing_else(words: list[str], shown: str | None) -> None:
    assert masked(words) == (" ".join(words) if shown is None else shown)
    assert "hunter2" not in masked(words)


def test_the_commit_of_a_checkout_and_none_of_anything_else(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=x", "-c", "user.email=x@y")
        return subprocess.run(
            ["git", "-C", tmp_path, *named, *words], check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "package"
    package.mkdir()
    assert git_state(package) == git_state(tmp_path / "nowhere") == {}
    git("init")
    (package / "code.py").write_text("1")
    assert git_state(package) == {}, "a package that is installed in a repository is not of it"
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert git_state(package) == {"git_commit": commit, "git_dirty": False}
    (package / "code.py").write_text("2")
    assert git_state(package) == {"git_commit": commit, "git_dirty": True}


def test_the_machine_is_described_without_git_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    facts = start_facts(discover({}))
    assert "git_commit" not in facts
    assert facts["host_memory_bytes"] > 2**28
    assert {"command", "host", "device", "cpu", "python", "torch"} <= facts.keys()
