"""Chooses for `training.activation_checkpointing: auto` the fastest mode that fits; on CPUs that is always `none`."""

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
"""Modes that `auto` chooses from, the fastest first."""
_FIELD = "training.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Choice:
    """The estimated modes, the chosen one last (empty on CPUs), and the bytes of a device that they may use."""

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
    """Return whether the mode is still `auto`."""
    return config.training.activation_checkpointing == "auto"


def with_recompute(config: Run, mode: str) -> Run:
    """Return `config` with this mode."""
    return config.model_copy(update={"training": config.training.model_copy(update={"activation_checkpointing": mode})})


def choose_recompute(job: Job, device_bytes: float, *, first: str | None = None) -> Choice:
    """Choose the mode of `job` on devices of `device_bytes`, of which `HEADROOM` stays free; `full` if none fits.

    `first` is taken if it fits, even if a faster one does. Modes that the engine or a setting excludes are skipped.
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
    """Return `job` with a chosen mode instead of `auto`."""
    if not needs_recompute_choice(job.config):
        return job
    return replace(job, config=with_recompute(job.config, choose_recompute(job, device_bytes).mode))
