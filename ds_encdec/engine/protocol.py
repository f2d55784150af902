"""The protocol between the training loop and the engines, and the record that an engine leaves in a checkpoint.

`deepspeed_zero.DeepSpeedEngine` and `fsdp2.FSDP2Engine` implement it; the trainer knows nothing else of them.
`engine.json` in a checkpoint names the engine that wrote its tensors, so that any engine can read them. Nothing here
imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ds_encdec.base.types import Batch, CheckpointError, LossSum, SavedState, StepResult
from ds_encdec.config.yaml.plain_files import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Veto = Callable[["Tensor"], bool]
"""Called once per step with the global gradient norm (float32 scalar, pre-clip); True skips the step.

It must give the same answer on every rank.
"""


@dataclass(frozen=True, slots=True)
class StagedSave:
    """One rank's part of a checkpoint, ready to be written.

    `num_bytes`: about the size of its files. `write` writes and returns them, not yet flushed to disk; every file is
    returned by exactly one rank. It is called once on every rank, maybe from a background thread while training goes
    on: it uses no collective of the training's groups, and raises OSError where the disk does not take the files.
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

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """Accumulate the gradient of `loss_sum.total / target_tokens`, summed over ranks.

        `target_tokens` of the whole optimizer step, over all micro-batches and all ranks. `last` marks
        the step's last micro-batch on this rank.
        """

    def step(self, veto: Veto | None = None) -> StepResult:
        """Clip, step the optimizer and the schedule, and clear gradients; or skip all three."""

    def evaluate(self, batch: Batch) -> LossSum:
        """The loss of one micro-batch without gradients, in evaluation mode."""

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """Prepare to write weights, optimizer state and an `EngineRecord` under `directory`, which exists, shared.

        Collective. With `copy` everything is copied to host memory now, so that training may go on before and while it
        is written; the buffers are kept for the next save. Without, it must be written before the next step.
        """

    def load(self, saved: SavedState) -> None:
        """Take over weights, moments and counters, whatever engine saved them; also into an engine that has trained.

        Collective; each rank reads what it holds and no more than one full parameter besides. Settings stay those of
        this run's configuration: rates, betas, decay, clipping, the schedule and its length. Raises CheckpointError, on
        every rank, where the state is another model's.
        """

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its canonical name, whole, in the compute dtype on the device; each holds until the next.

        Collective: every rank takes all of them, in this order. One is gathered at a time. Adapters are merged into
        what they stand beside.
        """

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the engine's own tensors on this rank now: `weights`, `master_weights`, `gradients`, `optimizer`.

        `host_states` are held in host memory for an accelerator. Tensors that layers compute with and that the
        optimizer steps are `weights`. Gradients are there between a step's last backward pass and its `step`. Not a
        collective.
        """

    def close(self) -> None:
        """Release the process-wide resources that the engine took."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + length) of the flattened parameter `name`; they begin at `offset` in a shard."""

    name: str
    start: int
    length: int
    offset: int = 0


def end_to_end(numels: Mapping[str, int], paddings: Sequence[int] = ()) -> Iterator[Piece]:
    """Whole parameters (name → number of elements) laid end to end; `paddings`: elements behind each, where aligned."""
    offset = 0
    for (name, numel), padding in zip(numels.items(), paddings or [0] * len(numels), strict=True):
        yield Piece(name, 0, numel, offset)
        offset += numel + padding


def own_parts(numels: Mapping[str, int], rank: int, ranks: int) -> Iterator[Piece]:
    """The pieces of `rank` where each parameter is cut into equal parts, the last ones padded: its own, end to end."""
    offset = 0
    for name, numel in numels.items():
        size = -(-numel // ranks)
        if rank * size < numel:
            yield Piece(name, rank * size, min(size, numel - rank * size), offset)
        offset += size


ENGINE_RECORD = "engine.json"
TAG = "zero"
"""The folder of DeepSpeed's own files in a checkpoint; its files are named by DeepSpeed."""
DCP_FOLDER = "dcp"
"""torch.distributed.checkpoint's files, with float32 tensors `weight.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The facts that a reader of a checkpoint's tensors needs.

    `sharding_stage`: zero0 to zero3, or a hybrid. `applied_steps`: AdamW's counter. `groups`: canonical names in each
    optimizer group, in its order. `loss_scaler`: the state of a dynamic loss scale, which runs in other dtypes pass on.
    """

    format: Literal["deepspeed", "dcp"]
    sharding_stage: str
    world_size: int
    applied_steps: int
    groups: tuple[tuple[str, ...], ...]
    loss_scaler: Mapping[str, float | int] | None = None


def write_record(record: EngineRecord, directory: Path) -> Path:
    """Put `record` into the checkpoint `directory`; returns the file."""
    path = directory / ENGINE_RECORD
    path.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    return path


def read_record(directory: Path) -> EngineRecord:
    """The record of the checkpoint `directory`. Raises CheckpointError."""
    path = directory / ENGINE_RECORD
    try:
        fields = read_json(path)
        groups = tuple(tuple(names) for names in fields.pop("groups"))
        return EngineRecord(**fields, groups=groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: no readable record of an engine ({error})") from None
