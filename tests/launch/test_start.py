"""Endings between a run's first meeting of its ranks and its first step: what is told, and with which exit code."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import QUICKSTART, overrides, wait_until

from ds_encdec.base.types import CheckpointError, DsEncDecError, LostRankError, Preempted
from ds_encdec.config.schema import load_config
from ds_encdec.engine import select
from ds_encdec.launch import peers
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.peers import Peer, Peers, ending_recorded
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import discover
from ds_encdec.training import build

SINGLE = discover({})


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[StopRequest], object]:
    monkeypatch.setattr(select, "init_process_group", lambda *_, first, **__: first() or "fsdp")
    settings = overrides(tmp_path, infra__distributed_type="fsdp", infra__offload_optimizer="none")
    config = load_config(QUICKSTART, settings)
    return lambda stop: build.run_training(config, stop)


def test_a_rank_whose_peer_stopped_in_the_meeting_is_stopped_too(
    start: Callable[[StopRequest], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    monkeypatch.setattr(HostCollectives, "sum", raiser(broken))
    with StopRequest(SINGLE) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Preempted, match="SIGINT while the ranks met: there was nothing"):
            start(stop)
    assert not (tmp_path / "run.json").exists()


def test_a_rank_that_ends_itself_is_in_run_json(
    start: Callable[[StopRequest], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Peers", raiser(DsEncDecError("far enough")))
    with StopRequest(SINGLE) as stop:
        with pytest.raises(DsEncDecError, match="far enough"):
            start(stop)
        stop._before_end("no step for 60 s")
    ended = RunFolder(str(tmp_path)).read_status()
    assert (ended["state"], ended["exit_code"], ended["reason"]) == ("failed", 8, "rank 0: no step for 60 s")


class TwoRanks(HostCollectives):
    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def gather(self, record: Any) -> list[Any]:
        return [record, Peer(1, self.pid, record.host, record.machine)] if isinstance(record, Peer) else [record]


@pytest.mark.parametrize("earlier", [None, "completed"])
def test_a_rank_that_is_killed_before_the_run_runs_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: str | None
) -> None:
    folder = RunFolder(str(tmp_path))
    folder.claim(resume=False)
    if earlier is not None:
        folder.write_status(earlier, exit_code=0)
        folder.release()
        folder.claim(resume=True)
    ended: list[int] = []
    monkeypatch.setattr(peers, "end_process", ended.append)
    rank = subprocess.Popen(["sleep", "600"])
    with Peers(folder, TwoRanks(rank.pid), leave_seconds=0.1, poll_seconds=0.02):
        rank.kill()
        wait_until(lambda: ended, 20)
    rank.wait()
    assert set(ended) == {9}
    assert folder.read_status()["reason"].startswith(f"rank 1 (process {rank.pid} on ")


@pytest.mark.parametrize(
    ("earlier", "error", "state"),
    [
        ("completed", CheckpointError("refused"), "completed"),
        ("completed", LostRankError("rank 1 is gone"), "failed"),
        ("running", CheckpointError("refused"), "failed"),
    ],
)
def test_what_a_resume_that_does_not_begin_leaves(
    tmp_path: Path, earlier: str, error: DsEncDecError, state: str
) -> None:
    folder = RunFolder(str(tmp_path))
    folder.write_status(earlier, exit_code=0)
    folder.claim(resume=True)
    with (
        pytest.raises(type(error)),
        Peers(folder, HostCollectives()) as alone,
        ending_recorded(folder, SINGLE, alone, spare=True),
    ):
        raise error
    ended = folder.read_status()
    assert (ended["state"], ended["exit_code"]) == (state, 0 if state == "completed" else error.exit_code)
