"""Choosing a device. Joining the group is covered by real ranks, in test_launchers.py and tests/distributed."""

from __future__ import annotations

import dataclasses
import os
import socket
from datetime import timedelta

import pytest
import torch

from ds_encdec.launch.process_group import choose_device, init_process_group, openmp_threads, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.types import ConfigError

SINGLE = discover({})
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def test_cpu_is_always_there() -> None:
    assert choose_device("cpu", SINGLE) == torch.device("cpu")


@pytest.mark.skipif(DEVICES > 0, reason="this machine has an accelerator")
def test_a_machine_without_accelerators() -> None:
    assert choose_device("auto", SINGLE) == torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        choose_device("cuda", SINGLE)
    assert "ds_configs/quickstart.yaml" in str(caught.value)
    assert "infra.device=cpu" in str(caught.value)


@pytest.mark.skipif(DEVICES == 0, reason="needs an accelerator")
def test_a_machine_with_accelerators() -> None:
    assert choose_device("auto", SINGLE) == torch.device("cuda", 0)
    crowded = dataclasses.replace(SINGLE, world_size=DEVICES + 1, local_world_size=DEVICES + 1)
    with pytest.raises(ConfigError, match=f"{DEVICES + 1} ranks"):
        choose_device("cuda", crowded)


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 3),
        ({"OMP_NUM_THREADS": "2"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, 3),  # torchrun's own doing
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "2"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, 3),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ: dict[str, str], threads: int | None) -> None:
    world = dataclasses.replace(SINGLE, world_size=4, local_world_size=4)
    assert openmp_threads(environ, world, usable_cores=14) == threads
    assert openmp_threads(environ, world, usable_cores=2) == (threads and 1)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))  # what joining a group exports
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        first = dataclasses.replace(SINGLE, world_size=2, local_world_size=2, master_port=port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}: .* --master_port"):
            init_process_group(first, torch.device("cpu"), timedelta(seconds=5), "fsdp")


def test_shutdown_without_a_group_does_nothing() -> None:
    shutdown()
    assert not torch.distributed.is_initialized()
