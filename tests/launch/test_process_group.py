"""What a rank takes of its machine: device, cores, port. With real ranks: test_launchers.py."""

import dataclasses
import os
import socket
from datetime import timedelta

import pytest
import torch

from ds_encdec import train
from ds_encdec.base.types import ConfigError
from ds_encdec.launch import process_group
from ds_encdec.launch.host import wait_without_spinning
from ds_encdec.launch.process_group import choose_device, init_process_group, openmp_threads
from ds_encdec.launch.world import World, discover

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


def test_a_gpu_without_expandable_segments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "empty", fails)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match=r"cuda:0 .*not supported.* set PYTORCH_ALLOC_CONF=expandable_segments:False"):
        process_group._take(torch.device("cuda", 0))


@pytest.mark.parametrize("theirs", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_do_not_spin_unless_the_user_decides(theirs: dict[str, str]) -> None:
    environ = dict(theirs)
    wait_without_spinning(environ)
    assert environ == (theirs or {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"})


def test_training_decides_before_it_loads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(train, "_load", lambda *_: pytest.fail(os.environ.get("GOMP_SPINCOUNT", "unset")))
    with pytest.raises(pytest.fail.Exception, match=r"^1000$"):
        train.main(["--config", "ds_configs/quickstart.yaml", "--print-deepspeed-config"])
