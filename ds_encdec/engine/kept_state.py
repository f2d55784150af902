"""The state that an optimizer keeps for a parameter: moments of its shape, and a counter of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.optimizers import OPTIMIZERS, row_of, tried
from ds_encdec.types import MOMENTS, StateKind


@dataclass(frozen=True, slots=True)
class KeptState:
    """`moments`: their names. `counter`: `step` before the first step, a number or a tensor of one, if any."""

    moments: tuple[StateKind, ...]
    counter: Any

    def zero(self, weights: Tensor) -> dict[str, Any]:
        """Make the state of `weights` before the first step."""
        state: dict[str, Any] = {}
        if self.counter is not None:
            # Not a copy: that of a real tensor is refused where the tensors have no numbers (memory/trace.py).
            counter, is_tensor = self.counter, isinstance(self.counter, Tensor)
            state["step"] = torch.zeros((), dtype=counter.dtype, device=counter.device) if is_tensor else counter
        return state | {kind: torch.zeros_like(weights, requires_grad=False) for kind in self.moments}


def kept_state(training: TrainingConfig, device: torch.device, *, is_matrix: bool = False) -> KeptState:
    """Return what the optimizer of `training` keeps for a parameter; `device`: where AdamW counts.

    `is_matrix`: for one of a group that has this mark (`optim.parameter_groups`). Raises ConfigError for an optimizer
    of the user's own that engines cannot have.
    """
    if training.optimizer not in OPTIMIZERS:
        kept: KeptState = tried(training.optimizer, training.optimizer_args, device.type)
        return kept
    row = row_of(training.optimizer)
    if is_matrix:
        return KeptState(MOMENTS[: row.matrix_moments], None)
    return KeptState(MOMENTS[: row.moments], torch.zeros((), device=device))
