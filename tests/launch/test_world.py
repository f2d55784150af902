"""`discover` on the environments that launchers really set, and on broken ones."""

import os
import subprocess
import sys

import pytest

from ds_encdec.base.types import ConfigError
from ds_encdec.launch.world import SINGLE_PROCESS, World, discover, first_host

Environ = dict[str, str]


def env(words: str) -> Environ:
    return dict(word.split("=", 1) for word in words.split())


# Rank 9 of 16 on the second of two nodes.
NODE0 = "MASTER_ADDR=node0 MASTER_PORT=29500"
NINTH = f"RANK=9 LOCAL_RANK=1 WORLD_SIZE=16 {NODE0} "
TORCHRUN = env(f"{NINTH} TORCHELASTIC_RUN_ID=none LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2")
DEEPSPEED = env(f"{NINTH} LOCAL_SIZE=8 CROSS_RANK=1 CROSS_SIZE=2")
# Rank 3 of 4, on the second of two nodes: what Slurm 22.05, Open MPI 4.1 and 5.0, and MPICH 4.0 set there.
SRUN = env(
    "SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_STEP_NODELIST=node[0-1] SLURM_JOB_NODELIST=node[0-1] SLURM_LAUNCH_NODE_IPADDR=10.77.0.1 "
    "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1"
)
MPIRUN = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_RANK=3"
)
OPENMPI = MPIRUN | env(
    "OMPI_MCA_orte_hnp_uri=1550581760.0;tcp://10.77.0.1:51555 PMIX_NAMESPACE=1550581761 "
    "PMIX_SERVER_URI2=1550581760.1;tcp4://127.0.0.1:41319"
)
OPENMPI_5 = MPIRUN | env(
    "PMIX_NAMESPACE=prterun-node0-2066@1 PMIX_SERVER_URI2=prterun-node0-2066@0.1;tcp4://127.0.0.1:33549"
)
HYDRA = env("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
DEEPSPEED_MPICH = HYDRA | env(f"RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_SIZE=2 {NODE0}")
UNKNOWN_MPI = env("PMI_SIZE=4 PMI_RANK=3")
# mpirun in a batch job starts its daemons by srun: one on the second node alone, or one on each.
DAEMON = SRUN | env("SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=node1 SLURM_PROCID=0 SLURM_LOCALID=0")
DAEMONS = SRUN | env("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1")
# Kubeflow's PyTorchJob, whose pods run python.
POD = env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
BY_HAND = env("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501")
KUBEFLOW = env("PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=node0 PET_MASTER_PORT=29500")

FOURTH = (3, 1, 4, 2, 1, 2)  # rank, local rank, world size, local world size, node rank, number of nodes
HERE = "127.0.0.1"


def never() -> int:
    raise AssertionError("a launched process must not choose its own port")


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "address", "port"),
    [
        (KUBEFLOW | TORCHRUN, "torchrun", (9, 1, 16, 8, 1, 2), "node0", 29500),
        (DEEPSPEED, "deepspeed", (9, 1, 16, 8, 1, 2), "node0", 29500),
        (SRUN, "slurm", FOURTH, "node0", None),
        (SRUN | env("MASTER_ADDR=10.77.0.1 MASTER_PORT=3442"), "slurm", FOURTH, "node0", 3442),  # $(hostname -i)
        (SRUN | {"MASTER_ADDR": "192.168.1.1 10.77.0.1"}, "slurm", FOURTH, "node0", None),  # a login node's two cards
        (SRUN | env("MASTER_ADDR=192.168.0.7"), "slurm", FOURTH, "192.168.0.7", None),
        (SRUN | env("MASTER_ADDR=127.0.1.1 RANK=3 WORLD_SIZE=4"), "slurm", FOURTH, "node0", None),
        (
            SRUN | env("SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=2 SLURM_LOCALID=0"),
            *("slurm", (2, 0, 3, 1, 1, 2), "node0", None),
        ),
        (OPENMPI, "openmpi", FOURTH, "10.77.0.1", None),
        (OPENMPI_5, "openmpi", FOURTH, "node0", None),
        (OPENMPI | DAEMON | env("MASTER_ADDR=ib0 MASTER_PORT=1234"), "openmpi", FOURTH, "ib0", 1234),
        (HYDRA | DAEMONS, "mpich", FOURTH, "node0", 29500),
        (HYDRA | env("PMI_SIZE=2 PMI_RANK=1"), "mpich", (1, 1, 2, 2, 0, 1), HERE, 29500),  # needs no address
        (DEEPSPEED_MPICH, "mpich", FOURTH, "node0", 29500),
        (POD, "environment", (1, 0, 2, 1, 1, 2), "job-master-0", 23456),  # nothing of local ranks: one for each pod
        (BY_HAND, "environment", (1, 1, 2, 2, 0, 1), HERE, 29501),
    ],
)
def test_every_launcher_gives_a_process_its_place(
    environ: Environ, launcher: str, place: tuple[int, ...], address: str, port: int | None
) -> None:
    world = discover(environ, never)
    assert world == World(*place, address, port or world.master_port, launcher)
    assert port or 20000 <= world.master_port < 30000
    assert not world.is_main


def test_tasks_of_a_job_meet_at_one_port_and_those_of_another_elsewhere() -> None:
    first = env("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0")
    first |= env("PMIX_SERVER_URI2=1550581760.0;tcp4://127.0.0.1:43951")
    for environ, job in ((SRUN, "SLURM_JOB_ID"), (SRUN, "SLURM_STEP_ID"), (OPENMPI, "PMIX_NAMESPACE")):
        ports = [discover({**environ, **change}, never).master_port for change in ({}, first, {job: "8"})]
        assert ports[0] == ports[1] != ports[2], job


def test_the_first_host_of_a_list() -> None:
    for nodes, first in (("login-1,gpu[1-2]", "login-1"), ("rack[2,4]-n[08-16].example", "rack2-n08.example")):
        assert first_host(nodes) == first


def test_a_single_process_chooses_a_port() -> None:
    world = discover({"PATH": "/bin"}, lambda: 4711)
    assert world == World(0, 0, 1, 1, 0, 1, HERE, 4711, SINGLE_PROCESS)
    assert world.is_main
    assert 1024 <= discover({}).master_port < 65536


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (env("RANK=0"), ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
        (OPENMPI | env("OMPI_COMM_WORLD_RANK=0"), ["MASTER_ADDR is not", "mpirun -x MASTER_ADDR=HOST"]),  # elsewhere
        (env("SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=1"), ["SLURM_STEP_TASKS_PER_NODE=(unset)"]),
        (env("LOCAL_RANK=0 WORLD_SIZE=2"), ["WORLD_SIZE", "LOCAL_RANK"]),
        (BY_HAND | env("RANK=one"), ["RANK=one"]),
        (BY_HAND | env("RANK=2"), ["RANK=2", "WORLD_SIZE=2"]),
        (TORCHRUN | env("LOCAL_RANK=8"), ["LOCAL_RANK=8", "LOCAL_WORLD_SIZE=8"]),
        (DEEPSPEED | env("CROSS_RANK=0 CROSS_SIZE=1"), ["LOCAL_SIZE=8", "WORLD_SIZE=16", "CROSS_SIZE=1"]),
        (TORCHRUN | env("MASTER_PORT=0"), ["MASTER_PORT=0"]),
        # Tasks that no launcher explains would each train alone, on all of the data.
        (UNKNOWN_MPI, ["PMI_SIZE=4: an unknown MPI has started 4 tasks", "torchrun --nnodes"]),
        (env("PMIX_RANK=1"), ["PMIX_RANK=1: prterun", "torchrun --nnodes"]),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, ["SageMaker has started 2 tasks", "torchrun --nnodes"]),
        (KUBEFLOW, ["PET_NNODES=2: Kubeflow", "torchrun --nnodes"]),  # python where torchrun was meant
    ],
)
def test_broken_environments_name_the_variables(environ: Environ, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(environ, never)
    assert all(name in str(caught.value) for name in named), caught.value
    assert caught.value.exit_code == 2


def test_the_program_refuses_them_before_it_imports_torch() -> None:
    code = "import sys; from ds_encdec.train import main; print(main([]), 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name not in BY_HAND} | UNKNOWN_MPI
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert result.stdout == "2 False\n", result.stderr
    assert result.stderr.startswith("error: PMI_SIZE=4")


@pytest.mark.parametrize(
    "environ",
    [
        env("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0"),  # a batch script, of which there is one
        env("OMPI_COMM_WORLD_SIZE=1"),
        env("PMI_SIZE=1 MPI_LOCALRANKID=0"),
        DAEMON,
        {"SM_HOSTS": '["algo-1"]'},
        env("SM_HOSTS=algo-1,algo-2"),  # nobody's but its user's
    ],
)
def test_one_task_trains(environ: Environ) -> None:
    assert discover(environ).world_size == 1
