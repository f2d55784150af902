"""Checks of hosts together: that they meet, share versions and the output folder, and how fast they exchange."""

import os
import socket
import statistics
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_encdec.doctor.checks import Finding, Host
from ds_encdec.engines import ENGINES
from ds_encdec.launch.agreement import differences, versions
from ds_encdec.launch.host_collectives import HostCollectives, attempt
from ds_encdec.launch.preemption import awaited
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.types import DsEncDecError

CALLS = 5  # of the all_reduce; their median counts
NUM_BYTES = {"cuda": 2**26, "cpu": 2**24}
SEEN_WITHIN_SECONDS = 10.0  # network file systems show other hosts' files a little later


def together(host: Host, own: list[Finding], timeout: timedelta) -> list[Finding]:
    """The findings of all hosts and of their meeting, on every rank. Where they do not meet: `own`, and why."""
    try:
        # A host without the GPU that is asked for comes as what it is, and is compared.
        device, _ = attempt(lambda: choose_device(host.config.infra.device, host.world))
        device = device or torch.device("cpu")
        init_process_group(
            host.world, device, timeout, "fsdp", meeting="doctor", settings=host.config.model_dump(mode="json")
        )
        everyone = HostCollectives(timeout)
        findings = [finding for found in everyone.gather(own) for finding in found]
        hosts = dict(enumerate(everyone.gather(socket.gethostname())))
        findings += [_same_versions(host, hosts, everyone), _one_folder(host, hosts, everyone), _speed(device)]
    except Exception as error:
        return [*own, Finding("meeting", socket.gethostname(), False, f"{type(error).__name__}: {error}")]
    shutdown()
    return findings


def _same_versions(host: Host, hosts: dict[int, str], everyone: HostCollectives) -> Finding:
    """All that ranks compare, to the last part: a run stops where others differ, and only warns of that one."""
    found = everyone.gather(versions(ENGINES, nccl=host.uses_gpus))
    if lines := differences(dict(enumerate(found)), hosts):
        return Finding("equal versions", "", False, "; ".join(lines), "install the same on all hosts")
    return Finding("equal versions", "", True, f"{len(found)} ranks agree")


def _one_folder(host: Host, hosts: dict[int, str], everyone: HostCollectives) -> Finding:
    """Every rank sees what rank 0 writes to the output folder, or where it will be made."""

    def make() -> Path:
        descriptor, name = tempfile.mkstemp(dir=host.output, prefix=".ds-encdec-doctor-")
        os.close(descriptor)
        return Path(name)

    try:
        path = everyone.on_rank_zero(make)
    except DsEncDecError as error:
        return Finding("shared folder", "", False, f"{hosts[0]} cannot write there: {error}", "see `output folder`")
    sees = awaited(SEEN_WITHIN_SECONDS, lambda: path.name in _names(path))
    blind = sorted({hosts[rank] for rank, can in enumerate(everyone.gather(sees)) if not can})
    if host.world.is_main:
        path.unlink(missing_ok=True)
    if not blind:
        return Finding("shared folder", "", True, f"every rank sees what rank 0 writes to {path.parent}")
    return Finding(
        "shared folder",
        "",
        False,
        f"{path.parent}: {', '.join(blind)} do not see what {hosts[0]} writes there",
        "mount one folder on all hosts, and set infra.output_dir to it",
    )


def _names(path: Path) -> set[str]:
    """Names in the folder, if it can be listed, which makes a network file system look again."""
    with suppress(OSError):
        return {other.name for other in path.parent.iterdir()}
    return set()


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
