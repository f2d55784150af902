"""The memory that a device or this machine has, and that this process has taken of it."""

import gc
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ds_encdec.memory.model_memory import GB
from ds_encdec.monitor.machine import peak_host_bytes
from ds_encdec.types import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of a device's memory: all that can be used, and what is free now."""

    total_bytes: int
    free_bytes: int


def get_memory_stats(device: torch.device | str | int | None = None) -> dict[str, float]:
    """`allocated_gb`, `reserved_gb`, `max_allocated_gb`, `free_gb` and `total_gb` of `device`, in GB (1e9 bytes).

    None: the current GPU, or the CPU where there is none. On a GPU: what torch's allocator has given out, what it has
    taken from the driver, the most it had given out since the start or the last `clear_memory`, and the driver's
    figures, which count other processes. On the CPU: this process's resident memory, twice, for nothing is reserved
    beside it; its peak since the process began; and what is available of the machine, or of the control group
    (container, batch job) that this process is limited to. ConfigError where torch can use no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={place}: it must be a GPU (cuda) or the CPU")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={place}: torch finds no GPU here; leave it out, or say cpu")
    capacity, resident = device_capacity(place), psutil.Process().memory_info().rss
    # The kernel brings a process's peak up to date a little later.
    allocated, reserved, peak = resident, resident, max(peak_host_bytes(), resident)
    if place.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(place), torch.cuda.max_memory_allocated(place)
        reserved = torch.cuda.memory_reserved(place)
    return {
        "allocated_gb": allocated / GB,
        "reserved_gb": reserved / GB,
        "max_allocated_gb": peak / GB,
        "free_gb": capacity.free_bytes / GB,
        "total_gb": capacity.total_bytes / GB,
    }


def log_memory_stats(prefix: str = "", device: torch.device | str | int | None = None) -> None:
    """Log what `get_memory_stats` says of `device` in one line, behind `prefix`."""
    stats = get_memory_stats(device)
    figures = ", ".join(f"{name.removesuffix('_gb').replace('_', ' ')} {value:.2f} GB" for name, value in stats.items())
    logger.info("%s%s", f"{prefix}: " if prefix else "", figures)


def clear_memory() -> None:
    """Collect garbage, give what torch's allocator keeps on GPUs back to the driver, and begin their peaks anew.

    The driver gets only what holds no tensor. A run's `mem/peak_bytes` begins anew as well. The peak of a CPU process
    cannot.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def device_capacity(device: torch.device) -> Capacity:
    """A GPU's memory as the driver reports it; a CPU's is the machine's, or this process's control group's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, free)
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _control_groups():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Capacity(total, free)


def _control_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group around this process that has a limit; either version's.

    Inside a container the path may be one of the host's, and then only the mount itself is there to be read.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # no Linux
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            root, (limit_name, use_name, cache_name) = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, limit_name, use_name = mounted / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        inner = root / path.strip("/")
        for group in (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)):
            with suppress(OSError):  # the root group of a machine has no such files
                limit, used = (group / limit_name).read_text().strip(), int((group / use_name).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if limit != "max":
                    # Files that nobody has read lately are given up before anything runs out.
                    yield int(limit), used - int(stat.get(cache_name, 0))
