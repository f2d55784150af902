"""Checks of hosts together: that they meet, share versions and the output folder, and how fast they exchange."""

import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_encdec.doctor.checks import Finding, Host, versions
from ds_encdec.launch.preemption import awaited
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown

CALLS = 5  # of the all_reduce; their median counts
NUM_BYTES = {"cuda": 2**26, "cpu": 2**24}
SEEN_WITHIN_SECONDS = 10.0  # network file systems show other hosts' files a little later


def together(host: Host, own: list[Finding], timeout: timedelta) -> list[Finding]:
    """The findings of all hosts and of their meeting, on every rank. Where they do not meet: `own`, and why."""
    try:
        device = choose_device(host.config.infra.device, host.world)
        init_process_group(
            host.world, device, timeout, "fsdp", meeting="doctor", settings=host.config.model_dump(mode="json")
        )
        findings = [finding for found in _everyones(own) for finding in found]
        hosts = _everyones(socket.gethostname())
        findings += [_same_versions(hosts, _everyones(versions())), _one_folder(host, hosts), _speed(device)]
    except Exception as error:
        return [*own, Finding("meeting", socket.gethostname(), False, f"{type(error).__name__}: {error}")]
    shutdown()
    return findings


def _everyones(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _same_versions(hosts: Sequence[str], found: Sequence[Mapping[str, str]]) -> Finding:
    differing = []
    for name in {name: None for one in found for name in one}:
        where = defaultdict(set)
        for host, one in zip(hosts, found, strict=True):
            where[one.get(name, "missing")].add(host)
        if len(where) > 1:
            differing.append(f"{name} is " + ", ".join(f"{v} on {', '.join(sorted(on))}" for v, on in where.items()))
    if differing:
        return Finding("equal versions", "", False, "; ".join(differing), "install the same on all hosts")
    return Finding("equal versions", "", True, f"{len(found)} ranks agree")


def _one_folder(host: Host, hosts: Sequence[str]) -> Finding:
    """Every rank sees what rank 0 writes to the output folder, or where it will be made."""
    named: list[Any] = [None]
    is_main = host.world.is_main
    with tempfile.NamedTemporaryFile(dir=host.output if is_main else None, prefix=".ds-encdec-doctor-") as file:
        if is_main:
            named = [file.name]
        dist.broadcast_object_list(named)
        path = Path(named[0])
        seen = _everyones(awaited(SEEN_WITHIN_SECONDS, lambda: path.parent.is_dir() and path.name in _names(path)))
    if all(seen):
        return Finding("shared folder", "", True, f"every rank sees what rank 0 writes to {path.parent}")
    blind = sorted({name for name, sees in zip(hosts, seen, strict=True) if not sees})
    return Finding(
        "shared folder",
        "",
        False,
        f"{path.parent}: {', '.join(blind)} do not see what {hosts[0]} writes there",
        "mount one folder on all hosts, and set infra.output_dir to it",
    )


def _names(path: Path) -> set[str]:
    """Names in the folder: listing makes a network file system look again."""
    return {other.name for other in path.parent.iterdir()}


def _speed(device: torch.device) -> Finding:
    """The rate at which each rank sends and receives in an all_reduce: nccl-tests' bus bandwidth."""
    ranks = dist.get_world_size()
    numbers = torch.zeros(NUM_BYTES[device.type] // 4, device=device)
    seconds = []
    for _ in range(1 + CALLS):
        began = time.monotonic()
        dist.all_reduce(numbers)
        numbers[0].item()  # waits for it
        seconds.append(time.monotonic() - began)
    rate = 2 * (ranks - 1) / ranks * NUM_BYTES[device.type] / statistics.median(seconds[1:])
    size = NUM_BYTES[device.type] // 2**20
    return Finding(
        "all_reduce", "", True, f"{size} MiB over {ranks} ranks ({dist.get_backend()}): {rate / 1e9:.2f} GB/s each"
    )
