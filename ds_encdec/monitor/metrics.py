"""Sum a run's steps on the device, reduce the sums over the ranks once per interval, and turn them into floats: each
optimizer step becomes a `StepRecord`. Recording never waits for the device; an interval takes one collective over the
ranks, and one copy to the host."""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, Self

import torch

from ds_encdec.base.types import LossSum, StepResult
from ds_encdec.monitor.metrics_file import strict_json
from ds_encdec.registry.objectives import TASKS

_LARGEST_EXPONENT = math.log(sys.float_info.max)


class MetricWindow:
    """The last `window_size` values of one metric. An empty window has mean and std 0.0, min inf and max -inf."""

    def __init__(self, window_size: int = 100) -> None:
        self.window_size = window_size
        self.values: deque[float] = deque(maxlen=window_size)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        """Append `value`; a full window drops its oldest one."""
        self.values.append(float(value))

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return math.fsum(self.values) / len(self.values) if self.values else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        mean = self.mean  # statistics.pstdev raises AttributeError for values that are not finite
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / max(len(self.values), 1))

    @property
    def min(self) -> float:
        """Smallest value."""
        return min(self.values, default=math.inf)

    @property
    def max(self) -> float:
        """Largest value."""
        return max(self.values, default=-math.inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, JSON-able."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`, at most as many as this window's own size."""
        self.values = deque(state["values"], maxlen=self.window_size)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, over all micro-batches and all ranks; equal on every rank. `loss_sums` (nats) and
    `target_tokens` are by denoiser, `global_step` and `data_step` those after the step, `grad_norm` the norm before
    clipping, `extra` the mean of `StepResult.extra` over the ranks."""

    global_step: int
    data_step: int
    applied: bool
    learning_rate: float
    grad_norm: float
    loss_sums: Mapping[str, float]
    target_tokens: Mapping[str, float]
    encoder_tokens: int
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss of the step, in nats per target token; NaN without targets."""
        return mean_loss(self.loss_sums, self.target_tokens)

    @property
    def tokens(self) -> float:
        """Non-padding tokens of both sides."""
        return self.encoder_tokens + sum(self.target_tokens.values())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a saved record exactly."""
        sums = {
            name: {key: float(value) for key, value in values[name].items()}
            for name in ("loss_sums", "target_tokens", "extra")
        }
        return cls(**{**values, **sums, "grad_norm": float(values["grad_norm"])})


class StepAccumulator:
    """Collects this rank's steps and turns them into `StepRecord`s of all ranks. Sums are float64 and added in the
    order of the ranks: the records of a run that was interrupted between two lines equal an uninterrupted run's to the
    bit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begin_step()
        # The steps that have not been reduced: facts, names of the engine's metrics, and this rank's part of the sums.
        self._pending: list[tuple[dict[str, Any], list[str], torch.Tensor]] = []
        self._records: list[StepRecord] = []

    def add(self, loss_sum: LossSum, *, encoder_tokens: int) -> None:
        """Add one micro-batch of this rank to the current step. Does not wait for the device."""
        self.sums += torch.stack((loss_sum.by_denoiser, loss_sum.tokens_by_denoiser)).detach()
        self._encoder_tokens += encoder_tokens

    def end_step(self, result: StepResult, *, global_step: int, data_step: int) -> None:
        """Close the current step, applied or not; the counters are those after it."""
        metrics = [value.detach().to(self.sums) for value in (result.grad_norm, *result.extra.values())]
        tokens = self.sums.new_full((1,), self._encoder_tokens)
        row = torch.cat([self.sums.flatten(), tokens, torch.stack(metrics)])
        facts = {"global_step": global_step, "data_step": data_step, "applied": result.applied}
        self._pending.append((facts | {"learning_rate": result.learning_rate}, list(result.extra), row))
        self._begin_step()

    def reduce(self) -> list[StepRecord]:
        """Return all steps since the last `take`. A collective: every rank calls it after the same steps."""
        pending, self._pending = self._pending, []
        if pending:
            ranks = _gather(torch.cat([row for *_, row in pending]))
            # An all-reduce would add in an order that depends on the buffer's size.
            totals = iter(sum(ranks[1:], start=ranks[0]).tolist())
            for facts, names, _ in pending:
                loss_sums, target_tokens = (dict(zip(TASKS, totals, strict=False)) for _ in range(2))
                encoder_tokens = int(next(totals))
                grad_norm, *means = (total / len(ranks) for total in islice(totals, 1 + len(names)))
                self._records.append(
                    StepRecord(**facts, grad_norm=grad_norm, loss_sums=loss_sums, target_tokens=target_tokens,
                               encoder_tokens=encoder_tokens, extra=dict(zip(names, means, strict=True)))
                )  # fmt: skip
        return list(self._records)

    def take(self) -> list[StepRecord]:
        """Reduce like `reduce`, and begin a new interval. A collective."""
        records, self._records = self.reduce(), []
        return records

    def state_dict(self) -> dict[str, Any]:
        """Return the records of the interval so far, JSON-able and equal on all ranks. A collective, like `reduce`."""
        return {"records": [strict_json(asdict(record)) for record in self.reduce()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the interval that `state_dict` recorded."""
        self._records, self._pending = [StepRecord.from_dict(values) for values in state["records"]], []

    def _begin_step(self) -> None:
        # This rank's losses and target tokens of the step that has not ended.
        self.sums = torch.zeros(2, len(TASKS), dtype=torch.float64, device=self.device)
        self._encoder_tokens = 0


def _gather(row: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's `row`, in rank order. A collective."""
    ranks = [row]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        ranks = [torch.empty_like(row) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, row)
    return ranks


def by_denoiser(sums: torch.Tensor) -> list[dict[str, float]]:
    """Return the rows of [rows, denoisers] as dicts by denoiser. Waits for the device."""
    return [dict(zip(TASKS, row, strict=True)) for row in sums.tolist()]


def mean_loss(loss_sums: Mapping[str, float], target_tokens: Mapping[str, float]) -> float:
    """Return the sum of token losses over the number of target tokens, in nats; NaN without target tokens."""
    tokens = sum(target_tokens.values())
    return sum(loss_sums.values()) / tokens if tokens else math.nan


def loss_metrics(prefix: str, loss_sums: Mapping[str, float], target_tokens: Mapping[str, float]) -> dict[str, float]:
    """Return `PREFIX/loss` and `PREFIX/loss_R1`… from sums by denoiser; those without tokens are left out."""
    return {f"{prefix}/loss": mean_loss(loss_sums, target_tokens)} | {
        f"{prefix}/loss_{name}": loss_sums[name] / tokens for name, tokens in target_tokens.items() if tokens
    }


def eval_metrics(
    loss_sums: Mapping[str, float], target_tokens: Mapping[str, float], eval_set: str = ""
) -> dict[str, float]:
    """Return `eval/loss`, `eval/perplexity`, both per denoiser (`eval/loss_X1`); `eval/NAME/loss`… of an `eval_set`."""
    losses = loss_metrics(f"eval/{eval_set}" if eval_set else "eval", loss_sums, target_tokens)
    return losses | {
        "/perplexity".join(name.rsplit("/loss", 1)): math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
        for name, loss in losses.items()
    }


def train_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the `train/` metrics of an interval of at least one step, and the engine's own (`StepResult.extra`).
    Losses and the engine's metrics are means over the applied steps (over all, if no step was applied): a skipped NaN
    would hide the others. Learning rate and gradient norm are the last step's."""
    counted = [record for record in records if record.applied] or records
    loss_sums = _by_name([record.loss_sums for record in counted], sum)
    target_tokens = _by_name([record.target_tokens for record in counted], sum)
    return {
        **loss_metrics("train", loss_sums, target_tokens),
        "train/learning_rate": records[-1].learning_rate,
        "train/grad_norm": records[-1].grad_norm,
        "train/skipped_steps": sum(not record.applied for record in records),
        **_by_name([record.extra for record in counted], lambda values: sum(values) / len(values)),
    }


def _by_name(rows: Sequence[Mapping[str, float]], combine: Callable[[list[float]], float]) -> dict[str, float]:
    return {name: combine([row[name] for row in rows if name in row]) for name in dict.fromkeys(chain(*rows))}
