"""`discover` on the environments that launchers really set, and on broken ones."""

from __future__ import annotations

import pytest

from ds_encdec.launch.world import SINGLE_PROCESS, World, discover
from ds_encdec.types import ConfigError

# Rank 9 of 16 on the second of two nodes, as each launcher describes it.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
DEEPSPEED = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_SIZE": "8",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
BY_HAND = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def never() -> int:
    raise AssertionError("a launched process must not choose its own port")


@pytest.mark.parametrize(("environ", "launcher"), [(TORCHRUN, "torchrun"), (DEEPSPEED, "deepspeed")])
def test_launchers_of_two_nodes(environ: dict[str, str], launcher: str) -> None:
    expected = World(
        rank=9,
        local_rank=1,
        world_size=16,
        local_world_size=8,
        node_rank=1,
        num_nodes=2,
        master_addr="node0",
        master_port=29500,
        launcher=launcher,
    )
    assert discover(environ, never) == expected


def test_single_process_chooses_a_port() -> None:
    world = discover({"PATH": "/bin"}, lambda: 4711)
    assert (world.rank, world.world_size, world.local_world_size, world.num_nodes) == (0, 1, 1, 1)
    assert (world.master_addr, world.master_port, world.launcher) == ("127.0.0.1", 4711, SINGLE_PROCESS)
    assert world.is_main


def test_free_port_is_usable() -> None:
    assert 1024 <= discover({}).master_port < 65536


def test_plain_environment_assumes_one_node() -> None:
    world = discover(BY_HAND, never)
    assert (world.launcher, world.local_world_size, world.num_nodes) == ("environment", 2, 1)
    assert not world.is_main


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        ({**DEEPSPEED, "MASTER_PORT": ""}, ["MASTER_PORT"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE", "RANK"]),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["WORLD_SIZE", "LOCAL_RANK"]),
        ({**BY_HAND, "RANK": "one"}, ["RANK='one'"]),
        ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, ["LOCAL_RANK=8", "LOCAL_WORLD_SIZE=8"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "32"}, ["LOCAL_WORLD_SIZE=32", "WORLD_SIZE=16"]),
        ({**DEEPSPEED, "CROSS_RANK": "2"}, ["CROSS_RANK=2", "CROSS_SIZE=2"]),
        ({**DEEPSPEED, "CROSS_RANK": "0", "CROSS_SIZE": "1"}, ["LOCAL_SIZE=8", "WORLD_SIZE=16", "CROSS_SIZE=1"]),
        ({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
    ],
)
def test_broken_environments_name_the_variables(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(environ, never)
    assert all(name in str(caught.value) for name in named)
    assert caught.value.exit_code == 2
