"""The protocol between the training loop and the engines, and the record that an engine leaves in a checkpoint.

`engine.json` in a checkpoint names the engine that wrote its tensors, so that any engine can read them. Nothing here
imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ds_encdec.base.types import Batch, CheckpointError, LossSum, SavedState, StepResult
from ds_encdec.config.yaml.plain_files import read_json

if TYPE_CHECKING:
    import torch

    from ds_encdec.objectives.protocol import Losses

# Called once per step with the global gradient norm (float32 scalar, pre-clip); True, on every rank, skips the step.
Veto = Callable[["torch.Tensor"], bool]


@dataclass(frozen=True, slots=True)
class StagedSave:
    """One rank's part of a checkpoint: `num_bytes`, about the size of its files; `first_non_finite`, which returns in
    words an element that is NaN or infinite, or None; and `write`, which writes and returns the files, unflushed, and
    raises OSError if the disk refuses. Every rank calls both once, maybe from a background thread while training goes
    on, so they use no collective of the training's groups. One rank returns each file."""

    num_bytes: int
    first_non_finite: Callable[[], str | None]
    write: Callable[[], list[Path]]


class ReplicaDigest(NamedTuple):
    """The sum of the bits (64-bit, signed) of all that the ranks of a `group` (from 0, one of `groups`) hold alike."""

    group: int
    groups: int
    total: int


class Engine(Protocol):
    """An engine shards a model and its optimizer. `backward` accumulates gradients; `step` applies or skips them."""

    device: torch.device
    model: torch.nn.Module  # wrapped; parameters may be sharded: do not read them outside the engine
    objective: Losses

    def losses(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        """Yield the losses of this rank's micro-batches of one optimizer step, from any device, in training mode.
        `backward` is called on each before the next is taken. Collective: ranks have equally many micro-batches."""

    def backward(self, loss_sum: LossSum, *, num_losses: int, last: bool) -> None:
        """Accumulate the gradient of `loss_sum.total / num_losses`, summed over ranks. `num_losses`: the sum of
        `Batch.num_losses` of the optimizer step, over all ranks. `last` marks the step's last micro-batch."""

    def step(self, veto: Veto | None = None) -> StepResult:
        """Unless the norm is not finite or `veto` refuses it, clip and step optimizer and schedule; clear gradients."""

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[LossSum]:
        """Yield the losses of this rank's micro-batches of a set without gradients, in evaluation mode, like `losses`.
        All are to be taken."""

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """Prepare to write weights, optimizer state and an `EngineRecord` under the existing, shared `directory`.
        Collective. With `copy` all is copied to host memory now, in buffers kept for the next save, and training may go
        on before and during the write; without, it must be written before the next step."""

    def load(self, saved: SavedState) -> None:
        """Load weights, moments and counters that any engine saved, also after training. Collective; each rank reads
        its shards and at most one full parameter besides. Rates, betas, decay, clipping and schedule stay this run's.
        Raises CheckpointError, on every rank, if the state is of another model."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every unsharded parameter by canonical name, in the compute dtype on the device, with adapters merged.
        Collective: every rank takes all of them, in this order. One is gathered at a time, and valid until the next."""

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of the engine's own tensors on this rank now: `weights`, also if the optimizer steps them
        directly, `master_weights`, `gradients` (between a step's last backward pass and its `step`), `optimizer`, and
        `host_states`, in host memory for an accelerator. Not a collective."""

    def replica_digest(self) -> ReplicaDigest | None:
        """Return the digest of the weights and optimizer states that other ranks hold as well; None, on every rank, if
        all are sharded. Not for the time of a forward or backward pass. Waits for the device once; no collective."""

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
    """Yield whole parameters (name → number of elements) end to end; `paddings`: elements behind each."""
    offset = 0
    for (name, numel), padding in zip(numels.items(), paddings or [0] * len(numels), strict=True):
        yield Piece(name, 0, numel, offset)
        offset += numel + padding


def own_parts(numels: Mapping[str, int], rank: int, ranks: int) -> Iterator[Piece]:
    """Yield the pieces of `rank` if each parameter is cut into equal parts, the last ones padded."""
    offset = 0
    for name, numel in numels.items():
        size = -(-numel // ranks)
        if rank * size < numel:
            yield Piece(name, rank * size, min(size, numel - rank * size), offset)
        offset += size


ENGINE_RECORD = "engine.json"
# The folder of DeepSpeed's own files in a checkpoint, which DeepSpeed names.
TAG = "zero"
# torch.distributed.checkpoint's files, with float32 tensors `weight.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`.
DCP_FOLDER = "dcp"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The facts that a reader of a checkpoint's tensors needs: `sharding_stage`, zero0 to zero3 or a hybrid;
    `applied_steps`, AdamW's counter; `groups`, names by optimizer group; `loss_scaler`, of a dynamic loss scale."""

    format: Literal["deepspeed", "dcp"]
    sharding_stage: str
    world_size: int
    applied_steps: int
    groups: tuple[tuple[str, ...], ...]
    loss_scaler: Mapping[str, float | int] | None = None


def write_record(record: EngineRecord, directory: Path) -> Path:
    """Write `record` into the checkpoint `directory` and return the file."""
    path = directory / ENGINE_RECORD
    path.write_text(json.dumps(asdict(record), indent=1) + "\n")
    return path


def read_record(directory: Path) -> EngineRecord:
    """Return the record of the checkpoint `directory`. Raises CheckpointError."""
    path = directory / ENGINE_RECORD
    try:
        fields = read_json(path)
        groups = tuple(tuple(names) for names in fields.pop("groups"))
        return EngineRecord(**fields, groups=groups)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable record of an engine ({error})") from None
