"""The seam between the loop and whatever shards the model.

`deepspeed_zero.DeepSpeedEngine` and `fsdp2.FSDP2Engine` implement it; the tests hold a plain single-process torch
implementation against it. The trainer knows this protocol and nothing of what lies behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ds_encdec.types import Batch, LossSum, SavedState, StepResult

Veto = Callable[[Tensor], bool]
"""Called once per step with the global gradient norm (float32 scalar, pre-clip); True skips the step.

It must give the same answer on every rank.
"""


@dataclass(frozen=True, slots=True)
class StagedSave:
    """One rank's part of a checkpoint, ready to be written.

    `num_bytes`: about the size of the files this rank will write. `write`: writes them and returns them, complete but
    not yet flushed to disk; every file is returned by exactly one rank. It is called on every rank, once, possibly from
    a background thread while training goes on: it uses no collective of the training's groups, and raises OSError (on
    this rank or on several) where the disk does not take the files.
    """

    num_bytes: int
    write: Callable[[], list[Path]]


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

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """Prepare to write weights, optimizer state and `record.EngineRecord` under `directory`, which exists, shared.

        Collective. With `copy` everything is copied to host memory now, so that training may go on before and while it
        is written; the buffers are kept for the next save. Without, it must be written before the next step.
        """
        ...

    def load(self, saved: SavedState) -> None:
        """Take over weights, moments and counters, whatever engine saved them; also into an engine that has trained.

        Collective; each rank reads what it holds and no more than one full parameter besides. Settings stay those of
        this run's configuration: rates, betas, decay, clipping, the schedule and its length. Raises CheckpointError, on
        every rank, where the state is another model's.
        """
        ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the engine's own tensors on this rank now: `weights`, `master_weights`, `gradients`, `optimizer`.

        What is held for an accelerator in host memory is `host_states`. Tensors that layers compute with and that the
        optimizer steps are `weights`. Gradients are there between a step's last backward pass and its `step`. Not a
        collective; held_bytes.py says how it is counted.
        """
        ...

    def close(self) -> None:
        """Release the process-wide resources that the engine took."""
        ...
