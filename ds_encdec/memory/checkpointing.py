"""The choice that `training.activation_checkpointing: auto` leaves open.

It is the cheapest in time that the estimate says fits into the device; on CPUs, where recomputation only costs, none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ds_encdec.config.rules import Sections
from ds_encdec.memory.breakdown import in_gib
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import HEADROOM, Variant, variant

Run = TypeVar("Run", bound=Sections)
AUTO = "auto"
MODES = ("none", "selective", "full")
"""The modes that `auto` takes one of, the cheapest in time first."""
_FIELD = "training.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Choice:
    """The modes that were estimated, the chosen one last, and the bytes of a device that they may take.

    On CPUs none is estimated.
    """

    tried: Sequence[Variant]
    limit_bytes: float

    @property
    def mode(self) -> str:
        """The chosen mode."""
        return str(self.tried[-1].job.config.training.activation_checkpointing) if self.tried else MODES[0]

    def __str__(self) -> str:
        if not self.tried:
            return f"{_FIELD}=auto is {self.mode} on CPUs"
        needs = ", ".join(
            f"{row.job.config.training.activation_checkpointing} {in_gib(row.estimate.peak.total)} GiB"
            for row in self.tried
        )
        fits = self.tried[-1].estimate.peak.total <= self.limit_bytes
        reason = "" if fits else ": nothing else needs less, though this does not fit either"
        return (
            f"{_FIELD}=auto is {self.mode}{reason} (estimated: {needs}; {in_gib(self.limit_bytes)} GiB are to be had)"
        )


def is_open(config: Sections) -> bool:
    """Return whether the mode is still to be chosen."""
    return config.training.activation_checkpointing == AUTO


def with_mode(config: Run, mode: str) -> Run:
    """`config` with this mode."""
    return config.model_copy(update={"training": config.training.model_copy(update={"activation_checkpointing": mode})})


def choose(job: Job, device_bytes: float, *, first: str | None = None) -> Choice:
    """The mode of `job` on devices of so many bytes, of which `HEADROOM` stays free; where none fits, `full`.

    `first`: a mode to take if it fits, though a cheaper one may fit, too. What the engine or another setting rules out
    is passed over.
    """
    limit_bytes, tried = device_bytes * (1 - HEADROOM), list[Variant]()
    if job.device == "cpu":
        return Choice((), limit_bytes)
    for mode in dict.fromkeys((*([first] if first in MODES else []), *MODES)):
        row = variant(job, {_FIELD: mode})
        tried += [] if row.reason and mode != MODES[-1] else [row]
        if row.estimate.peak.total <= limit_bytes:
            break
    return Choice(tried, limit_bytes)


def closed(job: Job, device_bytes: float) -> Job:
    """`job`, with a mode where that was still to be chosen."""
    if not is_open(job.config):
        return job
    return replace(job, config=with_mode(job.config, choose(job, device_bytes).mode))
