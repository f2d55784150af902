"""Sums of a run's steps: collected on the device, reduced over the ranks once per interval, then floats.

One optimizer step becomes one `StepRecord`. Between two lines of metrics the sums stay where the loss
was computed, so that recording never waits for the device:

    add         per micro-batch   two small additions on the device
    end_step    per step          keeps the sums and the gradient norm as tensors
    reduce      per interval      one collective over the ranks, one copy to the host
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_encdec.types import DENOISERS, LossSum, StepResult

_NUM_SUMS = 2 * len(DENOISERS)


def encode_float(value: float) -> float | str:
    """`value` for strict JSON, which has no NaN and no infinity: those become strings that `float` reads."""
    return value if math.isfinite(value) else str(value)


class MetricWindow:
    """The last `window_size` values of one metric, with their statistics. An empty window's are 0.0."""

    def __init__(self, window_size: int = 100) -> None:
        if window_size < 1:
            raise ValueError(f"window_size is {window_size}; it must be at least 1")
        self.window_size = window_size
        self.values: deque[float] = deque(maxlen=window_size)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        """Append `value`; the oldest one leaves when the window is full."""
        self.values.append(float(value))

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return math.fsum(self.values) / len(self.values) if self.values else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        if not self.values:
            return 0.0
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / len(self.values))

    @property
    def min(self) -> float:
        """Smallest value."""
        return min(self.values, default=0.0)

    @property
    def max(self) -> float:
        """Largest value."""
        return max(self.values, default=0.0)

    def state_dict(self) -> dict[str, Any]:
        """The values, JSON-able."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s values; this window's own size holds."""
        self.values = deque(state["values"], maxlen=self.window_size)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, over all micro-batches and all ranks; equal on every rank.

    `loss_sums` (nats) and `target_tokens` are in the order of `DENOISERS`. `global_step` and `data_step`
    are `TrainingState`'s, after the step; `grad_norm` is the norm before clipping.
    """

    global_step: int
    data_step: int
    applied: bool
    learning_rate: float
    grad_norm: float
    loss_sums: tuple[float, ...]
    target_tokens: tuple[int, ...]
    encoder_tokens: int

    @property
    def loss(self) -> float:
        """Mean loss of the step, in nats per target token; NaN without targets."""
        return mean_loss(self.loss_sums, self.target_tokens)

    @property
    def tokens(self) -> int:
        """Non-padding tokens of both sides."""
        return self.encoder_tokens + sum(self.target_tokens)

    def to_dict(self) -> dict[str, Any]:
        """A strictly JSON-able dict, for `from_dict`."""
        return {
            "global_step": self.global_step,
            "data_step": self.data_step,
            "applied": self.applied,
            "learning_rate": self.learning_rate,
            "grad_norm": encode_float(self.grad_norm),
            "loss_sums": [encode_float(value) for value in self.loss_sums],
            "target_tokens": list(self.target_tokens),
            "encoder_tokens": self.encoder_tokens,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """What `to_dict` wrote, exactly."""
        return cls(
            **{
                **values,
                "grad_norm": float(values["grad_norm"]),
                "loss_sums": tuple(float(value) for value in values["loss_sums"]),
                "target_tokens": tuple(values["target_tokens"]),
            }
        )


@dataclass(slots=True)
class _PendingStep:
    """A step of this rank that has not been reduced yet."""

    global_step: int
    data_step: int
    result: StepResult
    sums: Tensor
    encoder_tokens: int


class StepAccumulator:
    """Collects this rank's steps and turns them into `StepRecord`s of all ranks.

    Sums are float64 and added in the order of the ranks, whatever the number of steps reduced together: the
    records of a run that was interrupted between two lines equal an uninterrupted run's to the bit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums = self._zeros()
        self._encoder_tokens = 0
        self._pending: list[_PendingStep] = []
        self._records: list[StepRecord] = []

    def add(self, loss_sum: LossSum, *, encoder_tokens: int) -> None:
        """Add one micro-batch of this rank to the current step. Does not wait for the device."""
        self._sums[: len(DENOISERS)] += loss_sum.by_denoiser.detach()
        self._sums[len(DENOISERS) :] += loss_sum.tokens_by_denoiser.detach()
        self._encoder_tokens += encoder_tokens

    def end_step(self, result: StepResult, *, global_step: int, data_step: int) -> None:
        """Close the current step, applied or not; the counters are those after it."""
        self._pending.append(_PendingStep(global_step, data_step, result, self._sums, self._encoder_tokens))
        self._sums = self._zeros()
        self._encoder_tokens = 0

    def reduce(self) -> list[StepRecord]:
        """All steps since the last `take`. A collective: every rank calls it after the same steps."""
        pending, self._pending = self._pending, []
        if pending:
            sums = torch.stack([step.sums for step in pending])
            encoder_tokens = torch.tensor([[step.encoder_tokens] for step in pending], dtype=torch.float64)
            norms = torch.stack([step.result.grad_norm.detach().double().to(self.device) for step in pending])
            ranks = _gather(torch.cat([sums, encoder_tokens.to(self.device), norms[:, None]], dim=1))
            totals = _sum_in_rank_order([rank[:, :-1] for rank in ranks]).tolist()
            # The norm is every rank's; rank 0's word makes the records, and what is decided by them, equal for sure.
            self._records += [_record(*item) for item in zip(pending, totals, ranks[0][:, -1].tolist(), strict=True)]
        return list(self._records)

    def current_sums(self) -> list[float]:
        """This rank's sums of the step that has not ended: losses, then target tokens. Waits for the device."""
        return self._sums.tolist()

    def take(self) -> list[StepRecord]:
        """`reduce`, and begin a new interval."""
        records = self.reduce()
        self._records = []
        return records

    def state_dict(self) -> dict[str, Any]:
        """The records of the interval so far, JSON-able and equal on all ranks. A collective, like `reduce`."""
        return {"records": [record.to_dict() for record in self.reduce()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the interval that `state_dict` was taken in."""
        self._records = [StepRecord.from_dict(values) for values in state["records"]]
        self._pending = []

    def _zeros(self) -> Tensor:
        return torch.zeros(_NUM_SUMS, dtype=torch.float64, device=self.device)


def _gather(rows: Tensor) -> list[Tensor]:
    """Every rank's `rows`, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [rows]
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    return gathered


def _sum_in_rank_order(ranks: Sequence[Tensor]) -> Tensor:
    """The sum of every rank's rows.

    Added here, because the order in which an all-reduce adds depends on where in the buffer an element lies, and so on
    how many steps are reduced together.
    """
    total = ranks[0].clone()
    for other in ranks[1:]:
        total += other
    return total


def _record(step: _PendingStep, row: Sequence[float], grad_norm: float) -> StepRecord:
    return StepRecord(
        global_step=step.global_step,
        data_step=step.data_step,
        applied=step.result.applied,
        learning_rate=step.result.learning_rate,
        grad_norm=grad_norm,
        loss_sums=tuple(row[: len(DENOISERS)]),
        target_tokens=tuple(int(count) for count in row[len(DENOISERS) : _NUM_SUMS]),
        encoder_tokens=int(row[_NUM_SUMS]),
    )


def mean_loss(loss_sums: Sequence[float], target_tokens: Sequence[float]) -> float:
    """Sum of token losses over the number of target tokens, in nats; NaN where there are none."""
    tokens = sum(target_tokens)
    return sum(loss_sums) / tokens if tokens else math.nan


def mean_loss_of_ranks(ranks: Sequence[Sequence[float]]) -> float:
    """`mean_loss` of a step from all ranks' `StepAccumulator.current_sums`: the number that its record will have."""
    totals = [functools.reduce(operator.add, column) for column in zip(*ranks, strict=True)]
    return mean_loss(totals[: len(DENOISERS)], totals[len(DENOISERS) :])


def loss_metrics(prefix: str, loss_sums: Sequence[float], target_tokens: Sequence[float]) -> dict[str, float]:
    """`PREFIX/loss` and `PREFIX/loss_R1`… from sums in the order of `DENOISERS`; those without tokens are left out."""
    metrics = {f"{prefix}/loss": mean_loss(loss_sums, target_tokens)}
    for denoiser, loss_sum, tokens in zip(DENOISERS, loss_sums, target_tokens, strict=True):
        if tokens:
            metrics[f"{prefix}/loss_{denoiser}"] = loss_sum / tokens
    return metrics


def eval_metrics(loss_sums: Sequence[float], target_tokens: Sequence[float]) -> dict[str, float]:
    """`eval/loss`, `eval/perplexity`, and both per denoiser (`eval/loss_X1`, `eval/perplexity_X1`)."""
    losses = loss_metrics("eval", loss_sums, target_tokens)
    perplexities = {name.replace("/loss", "/perplexity"): _exp(loss) for name, loss in losses.items()}
    return losses | perplexities


def train_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """The `train/` metrics of an interval of at least one step.

    Losses are those of the applied steps: a step that was skipped for its NaN would hide the others. (If none
    was applied, of all.) Learning rate and gradient norm are the last step's.
    """
    counted = [record for record in records if record.applied] or records
    loss_sums = [sum(column) for column in zip(*(record.loss_sums for record in counted), strict=True)]
    target_tokens = [sum(column) for column in zip(*(record.target_tokens for record in counted), strict=True)]
    return {
        **loss_metrics("train", loss_sums, target_tokens),
        "train/learning_rate": records[-1].learning_rate,
        "train/grad_norm": records[-1].grad_norm,
        "train/skipped_steps": sum(not record.applied for record in records),
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
