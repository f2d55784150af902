"""Defines the types that travel through the engine, one for each step of the data flow.

    text ─ sources ─► Document ─ tokenizer, ul2 ─► Example ─ packing, collate ─► Batch
         ─ engine ─► LossSum, StepResult ─ monitor ─► metrics ─ checkpoint ─► TrainingState

Torch is imported for type checkers alone, so that `--help` and configuration errors never wait for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor

IGNORE_INDEX = -100  # label of a position that carries no loss (PyTorch's and Hugging Face's convention)


class DsEncDecError(Exception):
    """A problem that the user can fix. The message names what, where and the fix; `exit_code` is the process's.
    `common`: whether every rank ends with it, so that only rank 0 need report it; None if unknown."""

    exit_code = 1
    common: bool | None = None

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code


class ConfigError(DsEncDecError, exit_code=2):
    """The configuration, or the machine it needs, is not usable."""


class OutputLockedError(DsEncDecError, exit_code=3):
    """The output directory belongs to another run."""

    common = True  # rank 0 takes it for all


class DataError(DsEncDecError, exit_code=4):
    """A data source is missing, unreadable, or too small."""


class CheckpointError(DsEncDecError, exit_code=5):
    """A checkpoint or model folder is missing, damaged, or of another model."""


class OutOfMemoryError(DsEncDecError, exit_code=6):
    """The device or the host ran out of memory."""


class DivergedError(DsEncDecError, exit_code=7):
    """Training diverged and was stopped."""


class NonFiniteStateError(DivergedError):
    """A weight or moment that was to be saved is NaN or infinite."""


class HangError(DsEncDecError, exit_code=8):
    """A rank or the launcher died or stopped responding."""


class LostRankError(DsEncDecError, exit_code=9):
    """A rank, or the connection to it, is gone; the others are not at fault, and a new start may go on."""


class GateError(DsEncDecError, exit_code=10):
    """A gate (sanity check, phase) was not passed."""


class ReplicasDifferError(DsEncDecError, exit_code=11):
    """Ranks that must hold the same weights or optimizer states hold different ones."""


class Interrupted(DsEncDecError, exit_code=130):
    """The user, or the system, ended the program before it was done: 128 and the number of the signal."""


class Preempted(DsEncDecError, exit_code=75):
    """The run stopped on request, saved itself, and can be resumed."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text or record of a source. `key` names it uniquely and stably within the data set. `token_ids`: from a
    source of token ids, the input of a `data.examples.ExampleMaker`; for a text an int32 array [n]. `record`: a whole
    row, if the objective needs it. Neither is in the `repr`, by whose digest checkpoints know the built-in corpus."""

    key: str
    text: str
    token_ids: Any = dataclasses.field(default=None, repr=False)
    record: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Example:
    """One training pair: int32 arrays of token ids. `decoder_ids` are the *targets*; the decoder's input is the same
    sequence shifted right behind `decoder_start_token_id`. `denoiser`: one of `TASKS`. `document`: its key. `others`:
    the encoder and decoder ids of further segments, which stay in the same micro-batch."""

    encoder_ids: np.ndarray
    decoder_ids: np.ndarray
    denoiser: str
    document: str
    others: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    @property
    def segments(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """All segments: each side is packed one behind the other, and none sees another."""
        return ((self.encoder_ids, self.decoder_ids), *self.others)

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens of all segments on the encoder's and the decoder's side."""
        encoder, decoder = (sum(map(len, side)) for side in zip(*self.segments, strict=True))
        return encoder, decoder


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed micro-batch: two flat buffers without padding between segments.

    Te and Td are the token budgets of the two sides, N the segments of all examples (most have one). These stand in the
    same order on both sides, from the front of each buffer; the rest is padding, known by length and never by token id.

    | field | dtype, shape | meaning |
    |---|---|---|
    | encoder_ids, decoder_input_ids | int64 [Te], [Td] | token ids |
    | labels | int64 [Td] | targets, of a task `on_encoder` int64 [Te]; -100 where there is no loss |
    | encoder_positions, decoder_positions | int64 [Te], [Td] | restart at 0 in every segment |
    | encoder_cu_seqlens, decoder_cu_seqlens | int32 [max(max_examples, N) + 1] | boundaries; past N the last repeats |
    | denoiser_ids | int64, as `labels` | index into `TASKS` of each label; 0 on padding (no loss there) |
    | encoder_lengths, decoder_lengths | N host integers | tokens of each segment |
    | documents, tasks, group_sizes | host, of each example | key of its document, task, number of segments |
    | num_losses | host integer | losses that the micro-batch's loss adds up: labels, or examples, by the task |
    | reference | float32 [examples, 2], or None | log-probabilities of both answers by the reference model |
    | lane, number | integers | its lane, and its number there: dropout is drawn by them |
    | digest | integer | of its lane, ids, labels and boundaries: `token_digest` in data/loader.py |
    """

    encoder_ids: Tensor
    decoder_input_ids: Tensor
    labels: Tensor
    encoder_positions: Tensor
    decoder_positions: Tensor
    encoder_cu_seqlens: Tensor
    decoder_cu_seqlens: Tensor
    denoiser_ids: Tensor
    encoder_lengths: tuple[int, ...]
    decoder_lengths: tuple[int, ...]
    documents: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    num_losses: int = 0
    reference: Tensor | None = None
    lane: int = 0
    number: int = 0
    digest: int = 0

    @property
    def encoder_tokens(self) -> int:
        """The number of real encoder tokens."""
        return sum(self.encoder_lengths)

    @property
    def target_tokens(self) -> int:
        """The number of real decoder tokens."""
        return sum(self.decoder_lengths)

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on `device`; copies are asynchronous if the memory is pinned."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        moved = {name: value.to(device, non_blocking=True) for name, value in values if hasattr(value, "to")}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, slots=True)
class LossSum:
    """The loss of one micro-batch on this rank, not yet normalised. `total`: float32 scalar with gradient, the sum of
    its `num_losses` losses in nats. `sums` and `counts`: float32 [len(COLUMNS)], detached: by task the sum of the
    reported losses and their number, and by figure the sum of its values and their number. All are on the engine's
    device, and nothing has been synchronised."""

    total: Tensor
    sums: Tensor
    counts: Tensor


class RowCounts(NamedTuple):
    """Counts of rows by pass over their source. `bad`: unreadable, so skipped. `long`: examples above a maximum length,
    left out or cut off. `last_bad`: the newest bad row's step, lane and problem."""

    bad: Sequence[int] = ()
    long: Sequence[int] = ()
    last_bad: tuple[int, int, str] | None = None

    @classmethod
    def summed(cls, counts: Iterable[RowCounts]) -> RowCounts:
        """Return the sum over several lanes, or ranks, some of which may have begun fewer passes."""
        counts = [*counts]
        bad = [sum(of_pass) for of_pass in zip_longest(*(one.bad for one in counts), fillvalue=0)]
        long = [sum(of_pass) for of_pass in zip_longest(*(one.long for one in counts), fillvalue=0)]
        return cls(bad, long, max((one.last_bad for one in counts if one.last_bad), default=None))


NO_ROWS = RowCounts()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. `applied` is False if it was skipped (non-finite gradients, or vetoed). `grad_norm`: float32
    scalar tensor, global L2 norm before clipping. `learning_rate`: of this step (the first parameter group's). `extra`:
    other measurements of the engine by metric name (docs/metrics.md): float32 scalars on its device, with the same
    names on every rank. Their mean over the ranks, and over the interval's applied steps, is logged."""

    applied: bool
    grad_norm: Tensor
    learning_rate: float
    extra: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The position of a run, saved in every checkpoint and equal on all ranks.

    `global_step` counts applied optimizer steps (schedules follow it), `data_step` consumed ones, `skipped_steps` their
    difference. Token counts are global, without padding; `total_tokens_seen` has both sides'. `epoch`: the pass over
    the data that the slowest lane is in. `best_by` orders evaluations as `TrainingConfig.best_by`: `lowest loss` (nats
    per target token), `highest exact_match`. `best_value`: of the best saved checkpoint, that of `best_step`; also
    accepted as `best_eval_loss`. `leading_value`: the best that counted for early stopping, `evaluations_since_leading`
    evaluations ago. `rollbacks` counts those of the whole run, `bad_rows` the unreadable rows in the pass with the most
    of them, `long_rows` likewise those that were too long, and left out or cut off.

    A rollback takes `global_step` and all that belongs to the weights back to the checkpoint's; counts of consumed data
    (`data_step`, tokens, epoch) go on."""

    global_step: int = 0
    data_step: int = 0
    skipped_steps: int = 0
    epoch: int = 0
    best_by: str = "lowest loss"
    best_value: float | None = None
    best_step: int | None = None
    total_tokens_seen: int = 0
    target_tokens_seen: int = 0
    leading_value: float | None = None
    evaluations_since_leading: int = 0
    rollbacks: int = 0
    bad_rows: int = 0
    long_rows: int = 0
    best_eval_loss: dataclasses.InitVar[float | None] = None

    def __post_init__(self, best_eval_loss: float | None) -> None:
        if best_eval_loss is not None:
            object.__setattr__(self, "best_value", best_eval_loss)

    @property
    def encoder_tokens_seen(self) -> int:
        """The encoder side's tokens, without padding."""
        return self.total_tokens_seen - self.target_tokens_seen

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict, which `from_dict` restores."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainingState:
        """Restore the state of a `to_dict`. Raises TypeError for other fields."""
        return cls(**saved)

    def with_best_by(self, best_by: str) -> TrainingState:
        """Return the state that compares evaluations by `best_by`, without results of another order."""
        return self if best_by == self.best_by else dataclasses.replace(self.without_best(), best_by=best_by)

    def without_best(self) -> TrainingState:
        """Return the state without the results of its evaluations."""
        return dataclasses.replace(
            self, best_value=None, best_step=None, leading_value=None, evaluations_since_leading=0
        )


class Callback:
    """Methods for three moments of a run. All ranks call them equally often, so collectives are allowed in them. An
    exception on any rank ends the run on all of them; a `DsEncDecError` is raised unchanged."""

    def after_step(self, state: TrainingState, result: StepResult) -> None:
        """React to a step, applied or skipped, with the `state` after it. Reading `result` waits for the device."""

    def after_evaluation(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """React to an evaluation of the held-out examples; `metrics` (`eval/loss`, …) are equal on all ranks."""

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """React to the complete folder `checkpoint`, which holds `state`. Training may be some steps ahead of it."""


class WeightSource(Protocol):
    """Looks up a parameter, on the CPU, by its canonical name: the name in `named_parameters()`, a tied one's first."""

    def __call__(self, name: str, rows: slice = slice(None), /) -> Tensor:
        """Return the parameter, or `rows` (start and stop, no step) of its first dimension, in any floating dtype."""


# The parts of each trained parameter's state: its float32 weight, and AdamW's first and second moments.
StateKind = Literal["weight", "exp_avg", "exp_avg_sq"]
# The moments that optimizers may keep: AdamW keeps both, Muon only the first of a hidden matrix.
MOMENTS: tuple[StateKind, StateKind] = ("exp_avg", "exp_avg_sq")


def is_hidden_matrix(name: str) -> bool:
    """Return whether the parameter of this canonical name is a layer's matrix, which Muon orthogonalizes."""
    return ".layers." in name and name.endswith("_proj.weight")


class SavedState(Protocol):
    """The weights and AdamW state in a checkpoint, whatever engine, sharding and number of ranks wrote them. Every rank
    opens it after the hashes of all files were checked; it reads files, and has no collectives."""

    applied_steps: int
    """Optimizer steps behind this state: AdamW's counter of every parameter."""
    loss_scaler: Mapping[str, float | int] | None
    """State of a dynamic loss scale (float16), if the engine that saved had one."""
    shapes: Mapping[str, tuple[int, ...]]
    """Neutral name → full shape, in the order of `named_parameters()`."""

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of the flattened full parameter: float32, on the CPU, not shared, and taking
        only their own memory. Raises CheckpointError if the checkpoint has no such entry."""
