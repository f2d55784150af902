"""The run's memory estimate, logged at start and compared with the measured peak."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import psutil

from ds_encdec.memory.breakdown import GIB, Estimate
from ds_encdec.memory.estimate import RANK_PROCESS_BYTES, engine_memory, estimate
from ds_encdec.memory.job import Job

logger = logging.getLogger(__name__)


KERNEL_CACHE_BYTES = 0.5 * GIB
"""Kernels that oneDNN makes and keeps for each shape on a CPU. Measured: up to 0.55 GB."""


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """A run's job, and the estimate of it. `resident_bytes`: what the rank's process held when that was made."""

    job: Job
    estimate: Estimate
    resident_bytes: float = RANK_PROCESS_BYTES["cpu"]

    @property
    def peak_bytes(self) -> float:
        """The value that `mem/peak_bytes` should come to, asked once the engine has been built.

        On a GPU that is what torch's allocator has given out, so without the `framework`'s share. On a CPU it is one
        process's resident memory: what it holds by now, libraries and the engine's states included, and what the steps
        add. Data workers are not in it.
        """
        peak, host = self.estimate.peak, self.estimate.host
        tensors = peak.total - peak.framework
        if self.job.device == "cuda":
            return tensors
        added = tensors - engine_memory(self.job).resting.total + host.activations + host.save
        return psutil.Process().memory_info().rss + max(added, 0.0) + KERNEL_CACHE_BYTES

    @property
    def node_bytes(self) -> float:
        """Bytes of host memory that all ranks of a node hold; on a CPU what they compute with is there too."""
        on_device = self.estimate.peak.total if self.job.device == "cpu" else 0.0
        return (on_device + self.estimate.host.total) * self.job.ranks_per_node

    def __str__(self) -> str:
        on_gpu = self.job.device == "cuda"
        peak, host = self.estimate.peak, self.estimate.host
        of_process = self.resident_bytes + peak.total - peak.framework + host.total - host.process
        per = f"GPU {gib(peak.total)}" if on_gpu else f"rank {gib(of_process)}"
        return f"estimated peak per {per} ({self.estimate.moment}), host {gib(self.node_bytes)} per node"


def estimate_run(job: Job) -> ExpectedMemory | None:
    """The estimate of `job`. Returns None and warns if it fails; training goes on."""
    try:
        return ExpectedMemory(job, estimate(job), psutil.Process().memory_info().rss)
    except Exception:
        logger.warning("This run's memory could not be estimated, so mem/estimated_bytes is missing.", exc_info=True)
        return None


def gib(num_bytes: float) -> str:
    """An amount with its unit; three significant digits below 100 GiB, as tiny models have little."""
    amount = num_bytes / GIB
    return f"{amount:.3g} GiB" if amount < 100 else f"{amount:,.0f} GiB"
