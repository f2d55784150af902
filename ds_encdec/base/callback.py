"""Defines the callbacks by which a user's own code takes part in a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_encdec.base.types import StepResult, TrainingState


class Callback:
    """Methods for three moments of a run. All ranks call them equally often, so collectives are allowed in them. An
    exception on any rank ends the run on all of them; a `DsEncDecError` is raised unchanged."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """React to an optimizer step, applied or skipped; `state` is the one after it. Reading a tensor of `result`
        waits for the device."""

    def after_evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """React to an evaluation of the held-out examples; `metrics` (`eval/loss`, …) are equal on all ranks."""

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """React to the complete folder `checkpoint`, which holds `state`. Training may be some steps ahead of it."""
