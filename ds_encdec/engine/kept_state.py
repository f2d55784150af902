"""The state that an optimizer keeps for a parameter: moments of its shape, and a counter of its steps."""

from __future__ import annotations

import torch

from ds_encdec.base.types import MOMENTS
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.user_optimizer import KeptState, try_optimizer
from ds_encdec.registry.optimizers import OPTIMIZERS, row_of


def kept_state(training: TrainingConfig, device: torch.device, *, is_matrix: bool = False) -> KeptState:
    """Return the state that the optimizer of `training` keeps for a parameter; AdamW counts its steps on `device`.
    Raises ConfigError for a user's optimizer that engines cannot use."""
    if training.optimizer not in OPTIMIZERS:
        return try_optimizer(training.optimizer, training.optimizer_args, device.type)
    row = row_of(training.optimizer)
    if is_matrix:
        return KeptState(MOMENTS[: row.matrix_moments], None)
    return KeptState(MOMENTS[: row.moments], torch.zeros((), device=device))
