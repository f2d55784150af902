"""A user's own code in a run: the moments of the loop that it is called at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_encdec.base.types import StepResult, TrainingState


class Callback:
    """Methods for three moments of a run. All ranks call them equally often, so collectives are allowed in them.

    An exception on any rank ends the run on all of them; a `DsEncDecError` is raised as it is.
    """

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """An optimizer step has been made, or skipped; `state` is the one after it. Reading a tensor of `result` waits
        for the device."""

    def after_evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """The held-out examples have been evaluated; `metrics` (`eval/loss`, …) are equal on all ranks."""

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """The folder `checkpoint` is complete, and `state` is what it holds. Training may be some steps ahead of it."""
