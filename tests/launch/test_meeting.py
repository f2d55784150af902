"""The meeting of ranks: threads here, each of which is one, around a real store; and two real processes."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_run import QUICKSTART, TRAIN, environment, free_port, overrides

from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError, LostRankError, Preempted
from ds_encdec.checkpoint.manifest import DamagedCheckpointError
from ds_encdec.config.schema import load_config
from ds_encdec.engine import select
from ds_encdec.launch import rendezvous as meeting
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.peers import Peers, ending_recorded
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.process_group import _meet
from ds_encdec.launch.rendezvous import Rendezvous
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.startup_errors import startup_errors_shared
from ds_encdec.launch.world import World, discover
from ds_encdec.training import build


def held(ranks: dict[int, Callable[[World], Any]], *, world_size: int = 2) -> dict[int, Any]:
    first = World(world_size=world_size, local_world_size=world_size, master_port=free_port())
    outcomes: dict[int, Any] = {}

    def be(rank: int) -> None:
        try:
            outcomes[rank] = ranks[rank](dataclasses.replace(first, rank=rank, local_rank=rank))
        except DsEncDecError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_joined", Counter())
    monkeypatch.setattr("socket.gethostname", lambda: "node0")
    for name in ("COMPANY_SECONDS", "REPORT_SECONDS"):
        monkeypatch.setattr(meeting, name, 60.0)  # which end as soon as all have come, or read


def met(world: World, seconds: float = 20) -> Rendezvous:
    return Rendezvous(world, timedelta(seconds=seconds))


def come(world: World, seconds: float = 20) -> Any:
    return met(world, seconds).round("meet", None)


def come_briefly(world: World) -> Any:
    return come(world, 0.6)


@pytest.mark.parametrize(
    ("master", "nodes", "listens"),
    [
        ("127.0.0.1", 1, "127.0.0.1"),
        ("localhost", 1, "127.0.0.1"),
        ("127.0.0.1", None, "::"),  # a pod's own name for itself, and the other pods have another
        ("localhost", 2, "::"),
        ("192.0.2.1", 1, "::"),  # no address of this host: something in between hands connections on
    ],
)
def test_the_store_listens_where_the_ranks_look_for_it_and_nowhere_else(
    master: str, nodes: int | None, listens: str
) -> None:
    world = World(world_size=2, master_addr=master, num_nodes=nodes or 1, counts_nodes=nodes is not None)
    store = meeting._tcp_store(world, port := free_port(), 20, keeps=True)
    here = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    store.set("key", "value")
    assert store.port == port
    assert here == [listens]
    if master != "192.0.2.1":
        assert meeting._tcp_store(world, port, 20, keeps=False).get("key") == b"value"


def test_an_address_of_this_host_among_several_is_the_only_one_that_is_listened_at() -> None:
    found = (one.address for cards in psutil.net_if_addrs().values() for one in cards if one.family == socket.AF_INET)
    if (own := next((address for address in found if not address.startswith("127.")), None)) is None:
        pytest.skip("this machine has no address but the loopback")
    world = World(world_size=2, local_world_size=1, master_addr=own, num_nodes=2, counts_nodes=True)
    store = meeting._tcp_store(world, free_port(), 20, keeps=True)
    assert [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN] == [own]
    assert store.port


def test_who_does_not_come_is_named_by_those_who_have() -> None:
    ended = held({0: come_briefly, 2: come_briefly}, world_size=3)
    assert {type(error) for error in ended.values()} == {LostRankError}
    assert str(ended[0]) == str(ended[2])
    assert str(ended[0]).startswith("rank 1 did not join within 0.01 minutes")
    assert "unlike ranks 0, 2 " in str(ended[0])
    alone = held({1: come_briefly})[1]
    assert str(alone).startswith("Rank 0 did not join within 0.01 minutes")
    assert (alone.exit_code, alone.common) == (9, False)


@pytest.mark.parametrize(
    ("error", "ranks", "kind", "message"),
    [
        (ConfigError("no file"), [1, 2], ConfigError, "ranks 1-2 (node0): no file"),
        # A class that the others need not have arrives as its base.
        (DamagedCheckpointError("no file"), [1], CheckpointError, "rank 1 (node0): no file"),
        # An unforeseen error has its traceback where it happened.
        (ImportError("no transformers"), [2], DsEncDecError, "rank 2 (node0): ImportError: no transformers"),
    ],
    ids=["config", "checkpoint", "unforeseen"],
)
def test_the_error_of_one_is_everybodys(error: Exception, ranks: list[int], kind: type, message: str) -> None:
    def fail(world: World) -> None:
        with startup_errors_shared(world):
            raise error

    ended = held({rank: fail if rank in ranks else come for rank in range(3)}, world_size=3)
    for rank, raised in ended.items():
        if kind is DsEncDecError and rank in ranks:
            assert (str(raised), raised.common, raised.__cause__) == (message.partition(": ")[2], False, error)
        else:
            assert (type(raised), str(raised), raised.common) == (kind, message, True)


def test_an_address_or_a_place_that_another_has() -> None:
    def twice(world: World) -> Any:
        met(world)
        meeting._joined.clear()  # as another process's, which has been to none
        return met(world)

    ended = held({0: come_briefly, 1: twice})
    assert "Two processes claim to be rank 1" in str(ended[1])
    assert ended[1].common is False
    nowhere = dataclasses.replace(World(rank=1, local_rank=1, world_size=2, master_port=9), master_addr="no.invalid")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no\.invalid cannot be resolved on node0"):
        met(nowhere, 0.1)


def test_a_connection_that_fails_on_one_rank_ends_another_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sits in native code, as gloo's accepting side does for five times its timeout."""
    monkeypatch.setattr(meeting, "COMPANY_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.3)
    ended_with: list[int] = []
    let_go = threading.Event()
    monkeypatch.setattr(meeting, "end_process", lambda code: (ended_with.append(code), let_go.set()))

    def refuse() -> None:
        raise RuntimeError("gloo: Connection refused, remote=[127.0.1.1]:4711")

    def connect(action: Callable[[], Any]) -> Callable[[World], None]:
        def connecting(world: World) -> None:
            here = met(world)
            here.round("meet", None)
            here.connect(action)

        return connecting

    was_let_go: list[bool] = []
    ended = held({0: connect(lambda: was_let_go.append(let_go.wait(120))), 1: connect(refuse)})
    assert (ended_with, was_let_go) == ([9], [True])
    for error in ended.values():
        assert isinstance(error, LostRankError)
        assert str(error).startswith("rank 1 (node0) cannot connect to rank 0 (node0), which is gone or out of reach")
        assert "Connection refused" in str(error)


def test_settings_that_differ_end_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_group(rate: float) -> Callable[[World], Any]:
        settings = {"training": {"learning_rate": rate, "seed": 1}}
        return lambda world: _meet(met(world), world, torch.device("cpu"), "fsdp", settings)

    monkeypatch.setattr("os.environ", dict(os.environ))  # what is set for the ranks
    ended = held({0: in_group(0.1), 1: in_group(0.2), 2: in_group(0.1)}, world_size=3)
    assert {(type(error), error.common, str(error).splitlines()[1]) for error in ended.values()} == {
        (ConfigError, True, "  training.learning_rate: 0.1 for ranks 0, 2 (node0), 0.2 for rank 1 (node0)")
    }


def test_a_rank_without_its_configuration_ends_one_that_waits(tmp_path: Path) -> None:
    port = str(free_port())
    settings = overrides(tmp_path / "run", infra__distributed_type="fsdp", infra__offload_optimizer="none")
    ranks = [
        subprocess.Popen(
            [sys.executable, TRAIN, "--config", config, *settings],
            env=environment()
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, config in enumerate([QUICKSTART, "nowhere.yaml"])
    ]
    printed = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], printed
    assert "error: rank 1 (" in printed[0]
    assert "nowhere.yaml\n      no such file" in printed[0]
    assert not (tmp_path / "run").exists()


SINGLE = discover({})


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[StopRequest], object]:
    monkeypatch.setattr(select, "init_process_group", lambda *_, first, **__: first())
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
