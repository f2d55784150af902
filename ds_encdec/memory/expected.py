"""What a run expects to hold: estimated before its engine is built, said, and set beside what it measures."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ds_encdec.memory.breakdown import GIB, Estimate
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """A run's job, and the estimate of it."""

    job: Job
    estimate: Estimate

    @property
    def peak_bytes(self) -> float:
        """What `mem/peak_bytes` should come to.

        On a GPU that is what torch's allocator has given out, so without the `framework`'s share. On a CPU it is one
        process's resident memory: what is offloaded is in it, data workers are not.
        """
        peak, host = self.estimate.peak, self.estimate.host
        if self.job.device == "cuda":
            return peak.total - peak.framework
        return peak.total + host.total - host.process

    @property
    def node_bytes(self) -> float:
        """Of the host's memory, by all ranks of a node; on a CPU what the ranks themselves hold is there too."""
        on_device = self.estimate.peak.total if self.job.device == "cpu" else 0.0
        return (on_device + self.estimate.host.total) * self.job.ranks_per_node

    def __str__(self) -> str:
        on_gpu = self.job.device == "cuda"
        peak = f"GPU {gib(self.estimate.peak.total)}" if on_gpu else f"rank {gib(self.peak_bytes)}"
        return f"estimated peak per {peak} ({self.estimate.moment}), host {gib(self.node_bytes)} per node"


def expect(job: Job) -> ExpectedMemory | None:
    """The estimate of `job`; None, with a warning that shows why, where it fails: that is no reason not to train."""
    try:
        return ExpectedMemory(job, estimate(job))
    except Exception:
        logger.warning("This run's memory could not be estimated, so mem/estimated_bytes is missing.", exc_info=True)
        return None


def gib(num_bytes: float) -> str:
    """With its unit, and three significant digits below 100 GiB: tiny models have some, too."""
    amount = num_bytes / GIB
    return f"{amount:.3g} GiB" if amount < 100 else f"{amount:,.0f} GiB"
