"""The choice of `training.activation_checkpointing: auto`: the fastest mode that the estimate says fits the device.

On CPUs, where recomputation only costs time, it is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ds_encdec.base.quantities import in_gib
from ds_encdec.config.sections import Sections
from ds_encdec.memory.job import Job
from ds_encdec.memory.variants import HEADROOM, Variant, variant

Run = TypeVar("Run", bound=Sections)
MODES = ("none", "selective", "full")
"""The modes that `auto` takes one of, the fastest first."""
_FIELD = "training.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Choice:
    """The modes that were estimated, the chosen one last (none on CPUs), and the bytes that a device may give them."""

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
        even = "" if fits else ", and even that does not fit"
        return f"{_FIELD}=auto is {self.mode}{even} (estimated: {needs}; available: {in_gib(self.limit_bytes)} GiB)"


def needs_recompute_choice(config: Sections) -> bool:
    """Return whether the mode is still to be chosen."""
    return config.training.activation_checkpointing == "auto"


def with_recompute(config: Run, mode: str) -> Run:
    """`config` with this mode."""
    return config.model_copy(update={"training": config.training.model_copy(update={"activation_checkpointing": mode})})


def choose_recompute(job: Job, device_bytes: float, *, first: str | None = None) -> Choice:
    """Choose the mode of `job` on devices of `device_bytes`, of which `HEADROOM` stays free; `full` where none fits.

    `first` is a mode that is taken if it fits, though a faster one may fit, too. Modes that the engine or another
    setting rules out are skipped.
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


def resolve_recompute(job: Job, device_bytes: float) -> Job:
    """`job`, with a mode where that was still to be chosen."""
    if not needs_recompute_choice(job.config):
        return job
    return replace(job, config=with_recompute(job.config, choose_recompute(job, device_bytes).mode))
