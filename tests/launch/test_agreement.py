"""What is compared before ranks train together: settings, code, versions, data; pure functions all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tiny_run import QUICKSTART

from ds_encdec.base.types import ConfigError, DataError
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.engine.select import check_nodes, with_counted_nodes
from ds_encdec.launch.agreement import (
    OWN_TO_A_HOST,
    compare_rank_facts,
    differences,
    digest,
    flat,
    merge_rank_facts,
    ranks_in_words,
    require_same_data,
    shared_settings,
)
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.network import gloo_interface, own_address_towards
from ds_encdec.launch.world import World

HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


def settings(*overrides: str) -> dict[str, str]:
    return shared_settings(load_config(QUICKSTART, overrides).model_dump(mode="json"))


def test_settings_that_differ_are_named_with_their_values_and_hosts() -> None:
    mine, theirs = settings(), settings("training.learning_rate=1e-4", "data.use_mode_tokens=true")
    lines = differences({0: mine, 2: theirs}, HOSTS, {0: [0, 1], 2: [2, 3]})
    assert "training.learning_rate: 0.003 for ranks 0-1 (node0), 0.0001 for ranks 2-3 (node1)" in lines
    assert [line.partition(":")[0] for line in lines] == ["data.use_mode_tokens", "training.learning_rate"]
    secret = differences({0: {"infra.upload_to": "s3://me:hunter2@b"}, 1: {"infra.upload_to": "null"}}, HOSTS)
    assert "s3://***@b" in secret[0]
    assert "hunter2" not in secret[0]


def test_a_host_may_have_its_files_elsewhere_and_nothing_else() -> None:
    files = ["data.dataset_name=text", "data.data_files=a.txt"]
    assert settings(*files) == settings(*files[:1], "data.data_files=b/a.txt", "infra.wandb_project=other")
    known = {name for section in load_config(QUICKSTART).model_dump().values() for name in section}
    assert OWN_TO_A_HOST.keys() <= known, "a field of the list is no field any more"


def facts(**changes: Any) -> dict[str, Any]:
    found = {
        "settings": "same",
        "equal": {"code of ds_encdec": "abc", "engine": "fsdp"},
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "noted": {"GPU": "H200"},
    }
    for kind, values in changes.items():
        found[kind] = found[kind] | values if isinstance(values, dict) else values
    return found


@pytest.mark.parametrize(
    ("changes", "kind", "lines"),
    [
        ({}, 0, []),
        ({"versions": {"torch": "2.13.1"}}, 1, ["torch: 2.13.0 for rank 0 (node0), 2.13.1 for rank 2 (node1)"]),
        ({"versions": {"torch": "2.12.0"}}, 0, ["torch: 2.13.0 for rank 0 (node0), 2.12.0 for rank 2 (node1)"]),
        ({"versions": {"deepspeed": "1"}}, 0, ["deepspeed: nothing for rank 0 (node0), 1 for rank 2 (node1)"]),
        ({"noted": {"GPU": "H100"}}, 1, ["GPU: H200 for rank 0 (node0), H100 for rank 2 (node1)"]),
        ({"equal": {"engine": "other"}}, 0, ["engine: fsdp for rank 0 (node0), other for rank 2 (node1)"]),
    ],
)
def test_versions_may_differ_in_their_last_part(changes: Any, kind: int, lines: list[str]) -> None:
    """`kind`: 0 for errors, 1 for warnings."""
    found = compare_rank_facts({0: facts(), 2: facts(**changes)}, HOSTS)
    assert found[kind] == lines
    assert found[1 - kind] == []


def test_rank_zero_settles_what_all_must_know() -> None:
    def place(machine: str, address: str, **changes: Any) -> dict[str, Any]:
        return {"machine": machine, "address": address, "cores": [0, 1], "uuid": None, "facts": facts(**changes)}

    places = {rank: place(*(("a", "127.0.0.1") if rank < 2 else ("b", "10.0.0.2"))) for rank in range(4)}
    answer = merge_rank_facts(places, HOSTS)
    assert answer["sharing"] == [2, 2, 2, 2]
    assert answer["reached"] == [("a", "127.0.0.1"), ("b", "10.0.0.2")]
    assert answer["kinds"] == []
    others = {2: place("b", "10.0.0.2", settings="other"), 3: place("b", "10.0.0.2", settings="other")}
    assert merge_rank_facts(places | others, HOSTS)["kinds"] == [[0, 1], [2, 3]]
    with pytest.raises(
        ConfigError, match=r"engine: fsdp for ranks 0-1 \(node0\), 2 \(node1\), deepspeed for rank 3 \(node1\)"
    ):
        merge_rank_facts(places | {3: place("b", "10.0.0.2", equal={"engine": "deepspeed"})}, HOSTS)


def test_ranks_in_words() -> None:
    assert ranks_in_words([3, 0, 1, 2], HOSTS) == "ranks 0-1 (node0), 2-3 (node1)"
    assert ranks_in_words([7], HOSTS) == "rank 7"


class TwoRanks(HostCollectives):
    """Rank 0 of two, the other of which reads the data `theirs`."""

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


def test_nodes_are_counted_where_no_launcher_tells() -> None:
    by_hand = World(rank=3, local_rank=1, world_size=4, local_world_size=4, launcher="environment")
    counted = with_counted_nodes(by_hand, ["a", "a", "b", "b"])
    assert (counted.num_nodes, counted.node_rank, counted.local_world_size) == (2, 1, 2)
    assert with_counted_nodes(by_hand, ["a"] * 4) == by_hand
    told = dataclasses.replace(by_hand, num_nodes=2, local_world_size=2)
    assert with_counted_nodes(told, ["a"] * 4) == told


def test_a_hybrid_knows_the_size_of_a_node() -> None:
    """Ranks that take different numbers for it would wait for each other in groups that the others never make."""

    def hybrid(size: str = "null") -> FullConfig:
        return load_config(
            QUICKSTART,
            ["infra.distributed_type=fsdp", "infra.sharding_stage=zero3_hybrid", f"infra.hybrid_shard_size={size}"],
        )

    uneven, told = ["a", "a", "b", "c"], [2, 2, 1, 1]
    check_nodes(hybrid(), ["a", "a", "b", "b"], [2] * 4)
    check_nodes(hybrid(), ["a", "a", "b", "b"], [4] * 4)  # no launcher tells; they are counted
    check_nodes(hybrid("2"), uneven, told)
    check_nodes(load_config(QUICKSTART), uneven, told)
    for launchers_word in (told, [4] * 4):
        with pytest.raises(ConfigError, match="some nodes have 1 and others 2: set infra"):
            check_nodes(hybrid(), uneven, launchers_word)


def test_gloo_takes_the_way_to_the_other_hosts() -> None:
    assert own_address_towards("127.0.1.1") == "127.0.0.1"
    assert gloo_interface("127.0.0.1", None, alone=True) == "lo"
    assert gloo_interface("10.255.255.1", "10.255.255.2", alone=False) is None, "of no interface of this host"
    assert gloo_interface("127.0.0.1", "127.0.0.1", alone=False) is None, "loopback reaches no other host"
