"""The seam between the loop and whatever shards the model.

`deepspeed_zero.DeepSpeedEngine` implements it; the tests hold a plain single-process torch
implementation against it. The trainer knows this protocol and nothing of what lies behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ds_encdec.types import Batch, LossSum, StepResult

Veto = Callable[[Tensor], bool]
"""Called once per step with the global gradient norm (float32 scalar, pre-clip); True skips the step.

It must give the same answer on every rank.
"""


class Engine(Protocol):
    """A sharded model and its optimizer. `backward` accumulates; `step` steps, or is vetoed."""

    device: torch.device
    model: torch.nn.Module
    """The wrapped model. Parameters may be sharded: do not read them outside the engine."""

    def forward(self, batch: Batch) -> LossSum:
        """Run one micro-batch (already on any device) in training mode."""
        ...

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """Accumulate the gradient of `loss_sum.total / target_tokens`, summed over ranks.

        `target_tokens` of the whole optimizer step, over all micro-batches and all ranks. `last` marks
        the step's last micro-batch on this rank.
        """
        ...

    def step(self, veto: Veto | None = None) -> StepResult:
        """Clip, step the optimizer and the schedule, and clear gradients; or skip all three."""
        ...

    def evaluate(self, batch: Batch) -> LossSum:
        """The loss of one micro-batch without gradients, in evaluation mode."""
        ...

    def save(self, directory: Path) -> list[Path]:
        """Write weights, optimizer and schedule under `directory` (exists, shared by all ranks).

        Returns the files this rank wrote; every file is returned by exactly one rank, and all are
        complete when the call returns on that rank.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, at the same world size: state and counters. Raises CheckpointError.

        Settings stay those of this run's configuration: rates, decay, clipping, the schedule and its length.
        """
        ...

    def close(self) -> None:
        """Release the process-wide resources that the engine took."""
        ...
