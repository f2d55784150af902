"""`discover` on the environments that launchers really set, and on broken ones."""

from __future__ import annotations

import os
import subprocess
import sys

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


SLURM_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (SLURM_STEP, "SLURM_STEP_NUM_TASKS=8 says that srun has started 8 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=2 says that Open MPI"),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, "PMI_SIZE=4 says that MPICH"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}, "SageMaker has started 2 tasks"),
    ],
)
def test_tasks_that_no_launcher_explains_are_refused(environ: dict[str, str], named: str) -> None:
    """Each would train alone, on all of the data. Under a launcher that is read here they are nobody's business."""
    with pytest.raises(ConfigError) as caught:
        discover(environ, never)
    assert named in str(caught.value)
    assert "torchrun --nnodes" in str(caught.value)
    assert caught.value.exit_code == 2
    for launched in (TORCHRUN, DEEPSPEED, BY_HAND):
        assert discover({**environ, **launched}, never).world_size > 1


def test_the_program_refuses_them_before_it_imports_torch() -> None:
    code = "import sys; from ds_encdec.train import main; print(main([]), 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name not in BY_HAND} | SLURM_STEP
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert result.stdout == "2 False\n", result.stderr
    assert result.stderr.startswith("error: SLURM_STEP_NUM_TASKS=8")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, of which there is one
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": ""},
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "algo-1,algo-2"},  # nobody's but its user's
    ],
)
def test_one_task_trains(environ: dict[str, str]) -> None:
    assert discover(environ).world_size == 1
