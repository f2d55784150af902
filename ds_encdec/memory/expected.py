"""The run's memory estimate: logged at the start, compared with the measured peak, explained when memory runs out."""

import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch

from ds_encdec.base.quantities import GIB, gib
from ds_encdec.base.types import OutOfMemoryError
from ds_encdec.launch.memory_errors import is_of_device, is_of_driver, is_out_of_memory, out_of_memory
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.memory.breakdown import Breakdown, HostBreakdown
from ds_encdec.memory.estimate import RANK_PROCESS_BYTES, estimate
from ds_encdec.memory.job import Job
from ds_encdec.memory.library import GB, device_capacity, get_memory_stats
from ds_encdec.memory.variants import BATCH_FIELDS, HEADROOM, Change, Variant, as_overrides, nearest, settings, variant

logger = logging.getLogger(__name__)

LOADED_BYTES = 0.1 * GIB  # that a CPU rank loads with its engine and first steps. Measured in the quickstart: 0.12 GB
SETTINGS = 3  # proposed at most
_PAGE_LOCKED = (
    "The device has room, so it was page-locked memory of the host, which a system may limit to less than it has "
    "(containers, WSL): infra.pin_memory=false needs little of it."
)


@dataclass(frozen=True, slots=True)
class ExpectedMemory(Variant):
    """A run's job and its estimate. `resident_bytes`: the rank's process before its engine was built."""

    resident_bytes: float = RANK_PROCESS_BYTES["cpu"]

    @property
    def peak_bytes(self) -> float:
        """Expected `mem/peak_bytes`: memory from torch's allocator, or a CPU process's resident memory."""
        peak, host = self.estimate.peak, self.estimate.host
        tensors = peak.total - peak.framework
        on_host = self.resident_bytes + LOADED_BYTES + tensors + host.total - host.process
        return tensors if self.job.device == "cuda" else on_host

    def __str__(self) -> str:
        on_gpu = self.job.device == "cuda"
        per = f"GPU {gib(self.estimate.peak.total)}" if on_gpu else f"rank {gib(self.peak_bytes)}"
        return f"estimated peak per {per} ({self.estimate.moment}), host {gib(self.node_bytes)} per node"


def estimate_run(job: Job) -> ExpectedMemory | None:
    """Estimate `job`. On a failure it warns and returns None; training goes on."""
    try:
        return ExpectedMemory(job, estimate(job), resident_bytes=psutil.Process().memory_info().rss)
    except Exception:
        logger.warning("This run's memory could not be estimated, so mem/estimated_bytes is missing.", exc_info=True)
        return None


@contextmanager
def out_of_memory_explained(expected: ExpectedMemory | None, device: torch.device, rank: int) -> Iterator[None]:
    """Turn an out-of-memory error inside into an OutOfMemoryError with an explanation; other errors pass unchanged."""
    try:
        yield
    except BaseException as error:
        if expected is None or not is_out_of_memory(error):
            raise
        lines = [str(out_of_memory(error, rank))]
        traceback.clear_frames(error.__traceback__)  # activations are local variables of the frames that it shows
        try:
            of_device = is_of_device(error, device_capacity(device).free_bytes)
            lines += [_PAGE_LOCKED] if is_of_driver(error) and not of_device else []
            lines.append(explanation(expected, device, rank, of_device=of_device))
        except Exception:  # it must not replace the error that it explains
            logger.exception("The settings that would have fitted could not be found.")
        raise OutOfMemoryError("\n".join(lines)) from error


def explanation(expected: ExpectedMemory, device: torch.device, rank: int, *, of_device: bool) -> str:
    """Return the estimate by category, this rank's measured peak, the capacity, and settings that would fit."""
    device_bytes = device_capacity(device).total_bytes
    host_bytes = device_capacity(torch.device("cpu")).total_bytes
    measured = get_memory_stats(device if of_device else "cpu")["max_allocated_gb"] * GB
    has = f"the host has {gib(host_bytes)} for {expected.job.ranks_per_node} ranks"
    proposed = settings_that_fit(expected, device_bytes, host_bytes, of_device=of_device)
    lines = [
        f"Estimated for each rank, at its worst moment ({expected.estimate.moment}): "
        f"{_itemised(expected.estimate.peak)}; in host memory: {_itemised(expected.estimate.host)}.",
        f"Rank {rank} has held {gib(measured)} at most; {f'the device has {gib(device_bytes)}' if of_device else has}.",
        "Settings that are estimated to fit, each by itself, the least disturbing first:"
        if proposed
        else "No other setting of this run is estimated to fit: use more ranks, or a smaller model.",
        *(
            f"  {number}. {'in a new run only: ' * is_for_new_run(row)}{as_overrides(row.overrides)} "
            f"({replace(expected, job=row.job, estimate=row.estimate)})"
            for number, row in enumerate(proposed, start=1)
        ),
    ]
    return "\n".join(lines)


def settings_that_fit(expected: Variant, device_bytes: float, host_bytes: float, *, of_device: bool) -> list[Variant]:
    """Return at most `SETTINGS` other settings that should fit a device of `device_bytes` on a node of `host_bytes`."""
    job, peak, on_cpu = expected.job, expected.estimate.peak, expected.job.device == "cpu"
    device_limit, node_limit = math.inf if on_cpu else device_bytes * (1 - HEADROOM), math.inf
    if of_device:
        device_limit = _limit(peak.total, peak.framework, device_bytes)
    else:
        fixed = expected.estimate.host.process + (peak.framework if on_cpu else 0.0)
        node_limit = _limit(expected.node_bytes, fixed * job.ranks_per_node, host_bytes)

    def fits(row: Variant) -> bool:
        return row.estimate.peak.total <= device_limit and row.node_bytes < node_limit

    if of_device or on_cpu:
        found = nearest(job, fits, 20)  # those for a new run come last
    else:
        # On a GPU's host page-locked buffers go first, which torch rounds up, and copies for saves in the background.
        copies: list[Change] = [{"infra.pin_memory": False}, {"training.async_save": False}]
        found = list(filter(fits, (variant(job, change) for change in (*copies, *settings(job)))))
    return sorted(found, key=is_for_new_run)[:SETTINGS]


def is_for_new_run(setting: Variant) -> bool:
    """Return whether the run has checkpoints that cannot continue under this setting, because it reorders the data."""
    folder = RunFolder(setting.job.config.infra.output_dir)
    return bool(BATCH_FIELDS & setting.overrides.keys()) and (folder.checkpoints / "latest").exists()


def _limit(needed: float, fixed: float, capacity: float) -> float:
    """Return all usable bytes, or a tenth below `needed` if that should have fitted."""
    usable = capacity * (1 - HEADROOM)
    return usable if needed > usable else needed - 0.1 * (needed - fixed)


def _itemised(breakdown: Breakdown | HostBreakdown) -> str:
    parts = sorted(breakdown._asdict().items(), key=lambda part: -part[1])
    named = [f"{name.replace('_', ' ')} {gib(value)}" for name, value in parts if value]
    return f"{gib(breakdown.total)} ({', '.join(named)})" if named else gib(0)
