"""`discover` on the environments that launchers really set, and on broken ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.launch.world import SINGLE_PROCESS, World, discover, first_host

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
# Rank 3 of 4, on the second of two nodes: what is read of what Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 4.0 and Intel
# MPI 2021.19 set there.
SRUN = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1550581760.0;tcp://10.77.0.1:51555",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1550581761",
    "PMIX_SERVER_URI2": "1550581760.1;tcp4://127.0.0.1:41319",
}
OPENMPI_5 = {name: value for name, value in OPENMPI.items() if "MCA" not in name} | {
    "PMIX_NAMESPACE": "prterun-node0-2066@1",
    "PMIX_SERVER_URI2": "prterun-node0-2066@0.1;tcp4://127.0.0.1:33549",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
DEEPSPEED_MPICH = HYDRA | {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
# mpirun in a batch job starts its daemons by srun: one on the second node alone, or one on each.
DAEMON = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
DAEMONS = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
# Kubeflow's PyTorchJob, whose pods run python.
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
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


@pytest.mark.parametrize(
    ("environ", "launcher", "address", "port"),
    [
        (SRUN, "slurm", "node0", None),
        ({**SRUN, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "3442"}, "slurm", "node0", 3442),  # $(hostname -i)
        ({**SRUN, "MASTER_ADDR": "192.168.1.1 10.77.0.1"}, "slurm", "node0", None),  # of a login node with two cards
        ({**SRUN, "MASTER_ADDR": "192.168.0.7"}, "slurm", "192.168.0.7", None),
        ({**SRUN, "MASTER_ADDR": "127.0.1.1", "RANK": "3", "WORLD_SIZE": "4"}, "slurm", "node0", None),
        (OPENMPI, "openmpi", "10.77.0.1", None),
        (OPENMPI_5, "openmpi", "node0", None),
        ({**OPENMPI, **DAEMON, "MASTER_ADDR": "ib0", "MASTER_PORT": "1234"}, "openmpi", "ib0", 1234),
        ({**HYDRA, "MASTER_ADDR": "node0"}, "mpich", "node0", 29500),
        ({**HYDRA, **DAEMONS}, "mpich", "node0", 29500),
        (DEEPSPEED_MPICH, "mpich", "node0", 29500),
        (
            {**POD, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            *("environment", "job-master-0", 23456),
        ),
    ],
)
def test_starters_of_tasks(environ: dict[str, str], launcher: str, address: str, port: int | None) -> None:
    world = discover(environ, never)
    assert 20000 <= world.master_port < 30000 or port
    placed = dataclasses.replace(world, master_port=port or 0)
    assert placed == World(3, 1, 4, 2, 1, 2, address, port or 0, launcher)


def test_tasks_of_a_job_meet_at_one_port_and_those_of_another_elsewhere() -> None:
    for environ, job in ((SRUN, "SLURM_JOB_ID"), (SRUN, "SLURM_STEP_ID"), (OPENMPI, "PMIX_NAMESPACE")):
        first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "OMPI_COMM_WORLD_RANK": "0"}
        mpirun = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_SERVER_URI2": "1550581760.0;tcp4://127.0.0.1:43951"}
        ports = [discover({**environ, **change}, never).master_port for change in ({}, first | mpirun, {job: "8"})]
        assert ports[0] == ports[1] != ports[2], job


def test_places_that_are_not_two_nodes_of_two() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
    world = discover({**uneven, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, never)
    assert (world.rank, world.local_rank, world.local_world_size, world.num_nodes) == (2, 0, 1, 2)
    world = discover({**HYDRA, "PMI_SIZE": "2", "PMI_RANK": "1"}, never)  # one host needs no address
    assert (world.local_world_size, world.num_nodes, world.master_addr) == (2, 1, "127.0.0.1")
    world = discover(POD, never)  # nothing of local ranks: one for each pod
    assert (world.rank, world.local_rank, world.local_world_size, world.num_nodes, world.node_rank) == (1, 0, 1, 2, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[0-1]", "node0"),
        ("a[03-05,7],b1", "a03"),
        ("login-1,gpu[1-2]", "login-1"),
        ("rack[2,4]-n[08-16].example", "rack2-n08.example"),
        ("node7", "node7"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


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
        ({"RANK": "0"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        (HYDRA, ["MASTER_ADDR is not", "mpirun -genv MASTER_ADDR HOST"]),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"}, ["MASTER_ADDR is not", "mpirun -x MASTER_ADDR=HOST"]),  # elsewhere
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "1"}, ["SLURM_STEP_TASKS_PER_NODE=(unset)"]),
        ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_STEP_TASKS_PER_NODE=2(x2)"]),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "four"}, ["SLURM_STEP_NUM_TASKS='four'"]),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, ["accelerate launch", "torchrun"]),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"]),
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


UNKNOWN_MPI = {"PMI_SIZE": "4", "PMI_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (UNKNOWN_MPI, "PMI_SIZE=4 says that an MPI that is not known here has started 4 tasks"),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_SIZE=2 says that MVAPICH"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 says that prterun"),
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


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        (SRUN, "SLURM_STEP_NUM_TASKS=4 says that srun has started 4 tasks"),
        (OPENMPI, "OMPI_COMM_WORLD_SIZE=4 says that mpirun has started 4 tasks"),
        (UNKNOWN_MPI, "PMI_SIZE=4 says that an MPI"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SageMaker has started 2 tasks"),
    ],
)
def test_a_launcher_of_one_node_in_each_of_several_tasks_is_refused(tasks: dict[str, str], named: str) -> None:
    """`srun -N2 torchrun --nproc-per-node 8`, its --nnodes forgotten, is two runs. Where it is one task, it is one."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    deepspeed = {"LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    for launcher in (torchrun, deepspeed):
        with pytest.raises(ConfigError, match=named) as caught:
            discover({**tasks, **place, **launcher}, never)
        assert "torchrun --nnodes" in str(caught.value)
        assert discover({**place, **launcher, **DAEMON}, never).world_size == 2
        elastic = {"TORCHELASTIC_MAX_RESTARTS": "3"}  # whose other hosts may be lost
        assert discover({**tasks, **place, **launcher, **elastic}, never).world_size == 2
        daemons = {**DAEMONS, "PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        assert discover({**place, **launcher, **daemons}, never).world_size == 2
    for launched in (TORCHRUN, DEEPSPEED):
        assert discover({**tasks, **launched}, never).world_size == 16


def test_the_program_refuses_them_before_it_imports_torch() -> None:
    code = "import sys; from ds_encdec.train import main; print(main([]), 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name not in BY_HAND} | UNKNOWN_MPI
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert result.stdout == "2 False\n", result.stderr
    assert result.stderr.startswith("error: PMI_SIZE=4")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, of which there is one
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": ""},
        {"PMI_SIZE": "1", "MPI_LOCALRANKID": "0"},
        DAEMON,
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "algo-1,algo-2"},  # nobody's but its user's
    ],
)
def test_one_task_trains(environ: dict[str, str]) -> None:
    assert discover(environ).world_size == 1
