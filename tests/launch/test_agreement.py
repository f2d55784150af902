"""What is compared before ranks train together (settings, code, data, nodes), what a rank takes of its machine, and the
errors of one rank. With real ranks: test_launchers.py."""

import dataclasses
import mmap
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import QUICKSTART
from torch.distributed import DistBackendError

from ds_encdec import train
from ds_encdec.base.types import ConfigError, DataError, DsEncDecError, OutOfMemoryError
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.engine.select import check_nodes, with_counted_nodes
from ds_encdec.launch import process_group
from ds_encdec.launch.agreement import (
    OWN_TO_A_HOST,
    differences,
    digest,
    flat,
    merge_rank_facts,
    ranks_in_words,
    require_same_data,
    shared_settings,
    sharing,
)
from ds_encdec.launch.host import gloo_interface, own_address_towards, wait_without_spinning
from ds_encdec.launch.host_collectives import HostCollectives, attempt
from ds_encdec.launch.memory_errors import is_of_device, is_out_of_memory
from ds_encdec.launch.peers import named_error
from ds_encdec.launch.process_group import choose_device, init_process_group, openmp_threads
from ds_encdec.launch.run_folder import code_hash
from ds_encdec.launch.world import World, discover

HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


def settings(*overrides: str) -> dict[str, str]:
    return shared_settings(load_config(QUICKSTART, overrides).model_dump(mode="json"))


def test_settings_that_differ_are_named_with_their_values_and_hosts() -> None:
    mine, theirs = settings(), settings("training.learning_rate=1e-4", "data.use_mode_tokens=true")
    lines = differences({0: mine, 1: mine, 2: theirs, 3: theirs}, HOSTS)
    assert [line.partition(":")[0] for line in lines] == ["data.use_mode_tokens", "training.learning_rate"]
    assert lines[1] == "training.learning_rate: 0.003 for ranks 0-1 (node0), 0.0001 for ranks 2-3 (node1)"
    (secret,) = differences({0: {"infra.upload_to": "s3://me:hunter2@b"}, 1: {"infra.upload_to": "null"}}, HOSTS)
    assert "s3://***@b" in secret
    assert ranks_in_words([3, 0, 1, 7], HOSTS) == "ranks 0-1 (node0), 3 (node1), 7"


def test_a_host_may_have_its_files_elsewhere_and_nothing_else() -> None:
    files = ["data.dataset_name=text", "data.data_files=a.txt"]
    assert settings(*files) == settings(*files[:1], "data.data_files=b/a.txt", "infra.wandb_project=other")
    known = {name for section in load_config(QUICKSTART).model_dump().values() for name in section}
    assert OWN_TO_A_HOST.keys() <= known, "a field of the list is no field any more"


def test_a_change_of_the_code_on_one_host_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for host, code in (("a", "a = 1"), ("b", "a = 1"), ("c", "a = 2")):
        (tmp_path / host / "launch").mkdir(parents=True)
        (tmp_path / host / "launch" / "world.py").write_text(code)
    digests = [code_hash(tmp_path / host) for host in "abc"]
    assert digests[0] == digests[1] != digests[2]
    place = process_group._own_place(discover({}), torch.device("cpu"), "fsdp", {})
    assert place["equal"]["code of ds_encdec"] == code_hash(Path(process_group.__file__).parents[1])


RANKS = "for ranks 0-1 (node0), 2 (node1)"


@pytest.mark.parametrize(
    ("last_ranks", "is_error", "line"),
    [
        ({}, False, ""),
        ({"noted": {"GPU": "H100"}}, False, f"GPU: H200 {RANKS}, H100 for rank 3 (node1)"),
        ({"uuid": "GPU-2"}, True, "Ranks 2-3 were started on the same GPU (node1, GPU-2). Start one rank for each GPU"),
        ({"equal": {"engine": "other"}}, True, f"engine: fsdp {RANKS}, other for rank 3 (node1)"),
        ({"equal": {"engine": "fsdp", "deepspeed": "1"}}, True, f"deepspeed: nothing {RANKS}, 1 for rank 3 (node1)"),
    ],
)
def test_rank_zero_settles_what_all_must_know(last_ranks: Any, is_error: bool, line: str) -> None:
    places: dict[int, Any] = {
        rank: {
            "machine": HOSTS[rank],
            "address": "127.0.0.1" if rank < 2 else "10.0.0.2",
            "cores": [0, 1],
            "uuid": f"GPU-{rank}" if rank > 1 else None,
            "equal": {"engine": "fsdp"},
            "noted": {"GPU": "H200"},
        }
        for rank in range(4)
    }
    places[3] |= last_ranks
    if is_error:
        with pytest.raises(ConfigError) as refused:
            merge_rank_facts(places, HOSTS)
        assert line in str(refused.value)
    else:
        answer = merge_rank_facts(places, HOSTS)
        assert answer["warnings"] == [line] * bool(line)
        assert answer["sharing"] == [2, 2, 2, 2]
        assert answer["reached"] == [("node0", "127.0.0.1"), ("node1", "10.0.0.2")]


def test_only_ranks_with_cores_in_common_share_them() -> None:
    assert sharing([("a", range(48)), ("a", range(48)), ("a", range(48, 96)), ("b", range(48))]) == [2, 2, 1, 1]


class TwoRanks(HostCollectives):
    def __init__(self, theirs: dict[str, Any]) -> None:
        super().__init__()
        self.theirs = flat(theirs)
        self.their_digest = int(digest(self.theirs), 16)

    def lowest(self, *values: int) -> list[int]:
        return [min(pair) for pair in zip(values, (self.their_digest, -self.their_digest), strict=True)]

    def gather(self, record: Any) -> list[Any]:
        return [record, self.their_digest if isinstance(record, int) else ("node1", self.theirs)]


def test_data_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    mine = {"training.seed": 1, "sources": [{"size": 4, "files": {"a.txt": "1-2"}}]}
    require_same_data(mine, TwoRanks(dict(mine)))
    with pytest.raises(DataError) as caught:
        require_same_data(mine, TwoRanks({**mine, "sources": [{"size": 3, "files": {"a.txt": "1-3"}}]}))
    assert "sources.0.size: 4 for rank 0 (here), 3 for rank 1 (node1)\n" in str(caught.value)
    assert 'sources.0.files.a.txt: "1-2" for rank 0 (here), "1-3" for rank 1 (node1)\n' in str(caught.value)


def test_nodes_are_counted_if_the_launcher_does_not() -> None:
    by_hand = World(rank=3, local_rank=1, world_size=4, local_world_size=4, launcher="environment")
    counted = with_counted_nodes(by_hand, ["a", "a", "b", "b"])
    assert (counted.num_nodes, counted.node_rank, counted.local_world_size) == (2, 1, 2)
    given = dataclasses.replace(by_hand, num_nodes=2, local_world_size=2)
    assert with_counted_nodes(given, ["a"] * 4) == given


def test_ranks_of_a_hybrid_agree_on_the_size_of_a_node() -> None:
    def hybrid(size: str) -> FullConfig:
        stage = ["infra.distributed_type=fsdp", "infra.sharding_stage=zero3_hybrid"]
        return load_config(QUICKSTART, [*stage, f"infra.hybrid_shard_size={size}"])

    check_nodes(hybrid("null"), [*"aabb"], [4] * 4)  # the launcher knows no nodes; they are counted
    check_nodes(hybrid("2"), [*"aabc"], [2, 2, 1, 1])
    check_nodes(load_config(QUICKSTART), [*"aabc"], [4] * 4)
    for ranks_there in ([2, 2, 1, 1], [4] * 4):
        with pytest.raises(ConfigError, match="some nodes have 1 and others 2"):
            check_nodes(hybrid("null"), [*"aabc"], ranks_there)


def test_gloo_takes_the_way_to_the_other_hosts() -> None:
    assert own_address_towards("127.0.1.1") == "127.0.0.1"
    assert gloo_interface("127.0.0.1", None, alone=True) == "lo"
    assert gloo_interface("127.0.0.1", "127.0.0.1", alone=False) is None, "loopback reaches no other host"


def test_errors_keep_their_class_and_foreign_ones_are_named() -> None:
    def fail(error: Exception) -> None:
        raise error

    collectives = HostCollectives()
    with pytest.raises(DataError, match="no such column"):
        collectives.on_every_rank(lambda: fail(DataError("no such column")))
    with pytest.raises(DsEncDecError, match="OSError: disk on fire"):
        collectives.on_rank_zero(lambda: fail(OSError("disk on fire")))


@pytest.mark.parametrize(("lowest_rank", "message"), [(1, "rank 1 (node1): too few files"), (0, "too few files")])
def test_an_error_that_rank_zero_does_not_have_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, lowest_rank: int, message: str
) -> None:
    collectives = HostCollectives()
    collectives.rank, collectives.world_size = 1, 2
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    monkeypatch.setattr(collectives, "lowest", lambda *_: [lowest_rank])
    monkeypatch.setattr(collectives, "broadcast", lambda record, source: record)
    with pytest.raises(DataError) as caught:
        collectives.raise_first(DataError("too few files"))
    assert str(caught.value) == message


SINGLE = discover({})
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.skipif(DEVICES > 0, reason="this machine has an accelerator")
def test_a_machine_without_accelerators() -> None:
    assert choose_device("auto", SINGLE) == choose_device("cpu", SINGLE) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"infra\.device=cpu"):
        choose_device("cuda", SINGLE)


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 3),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, 3),  # torchrun's own doing
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ: dict[str, str], threads: int | None) -> None:
    assert openmp_threads(environ, 14, 4) == threads
    assert openmp_threads(environ, 2, 4) == (threads and 1)


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 7, 0), (8, 7, 7)])
def test_a_rank_takes_the_one_device_that_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    world = World(rank=local_rank, local_rank=local_rank, world_size=8, local_world_size=8)
    try:
        assert choose_device("auto", world) == torch.device("cuda", index)
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "slow for attention of many lengths"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    if visible > 1:
        with pytest.raises(ConfigError, match="LOCAL_RANK=8: more ranks were started on a machine with 8 CUDA devices"):
            choose_device("cuda", dataclasses.replace(world, local_rank=8, world_size=16, local_world_size=16))


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))  # what joining a group exports
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = World(world_size=2, local_world_size=2, master_port=(port := other.getsockname()[1]))
        with pytest.raises(
            ConfigError, match=rf"MASTER_PORT={port}: another program on .* already listens there.* --master_port"
        ):
            init_process_group(first, torch.device("cpu"), timedelta(seconds=5), "fsdp")


def test_threads_do_not_spin_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_without_spinning(environ := {"OMP_WAIT_POLICY": "ACTIVE"})
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(train, "_load", lambda *_: pytest.fail(os.environ.get("GOMP_SPINCOUNT", "unset")))
    with pytest.raises(pytest.fail.Exception, match=r"^1000$"):
        train.main(["--config", "ds_configs/quickstart.yaml", "--print-deepspeed-config"])


GIB = 2**30


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: torch.empty(2**50), id="torch"),
        pytest.param(lambda: bytearray(2**60), id="python"),
        pytest.param(lambda: mmap.mmap(-1, 2**56), id="the kernel"),
    ],
)
def test_a_host_without_memory(action: Callable[[], object]) -> None:
    error = attempt(action)[1]
    assert type(error) is OutOfMemoryError
    assert is_out_of_memory(error)
    assert not is_of_device(error, 0)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        action()
    assert str(named_error(raised.value, 3)).startswith("rank 3 ran out of memory: ")


# A device that has room was not what the driver meant: it says the same of page-locked memory.
@pytest.mark.parametrize(
    ("error", "free_bytes", "elsewhere"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), 64 * GIB, None),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 64 * GIB, None),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError"), GIB / 4, 10 * GIB),
        (
            DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: "
                "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            *(GIB / 4, 10 * GIB),
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_device_without_memory(error: BaseException, free_bytes: float, elsewhere: float | None) -> None:
    named = named_error(error, 0)
    assert is_out_of_memory(error)
    assert elsewhere is None or not is_of_device(error, elsewhere)
    assert is_of_device(named, free_bytes)
    assert (named.exit_code, "\n" in str(named)) == (6, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_that_the_host_does_not_have() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46, dtype=torch.uint8, pin_memory=True)
    assert is_out_of_memory(raised.value)
    assert not is_of_device(raised.value, torch.cuda.mem_get_info()[0])


@pytest.mark.parametrize("error", [RuntimeError("NCCL timeout"), ValueError("not enough memory"), OSError(28, "")])
def test_other_errors_are_others(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert named_error(error, 0).exit_code == 1
    assert type(attempt(lambda: [][0])[1]) is DsEncDecError
