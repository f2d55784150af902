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
from ds_encdec.registry.objectives import COLUMNS, FIGURES, TASKS

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
    """One optimizer step, over all micro-batches and all ranks; equal on every rank. `sums` and `counts` are those of
    its `LossSum`s by `COLUMNS`, `global_step` and `data_step` those after the step, `grad_norm` the norm before
    clipping, `tokens` the non-padding ones of both sides, `extra` the mean of `StepResult.extra` over the ranks."""

    global_step: int
    data_step: int
    applied: bool
    learning_rate: float
    grad_norm: float
    sums: Mapping[str, float]
    counts: Mapping[str, float]
    tokens: int
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss of the step, in nats; NaN without targets."""
        return mean_loss(self.sums, self.counts)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a saved record exactly."""
        values = dict(values)
        if "loss_sums" in values:  # written before objectives had figures
            targets = values.pop("target_tokens")
            tokens = int(values.pop("encoder_tokens") + sum(targets.values()))
            values |= {"sums": values.pop("loss_sums"), "counts": targets, "tokens": tokens}
        sums = {
            name: {key: float(value) for key, value in values[name].items()} for name in ("sums", "counts", "extra")
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

    def add(self, loss_sum: LossSum, *, tokens: int) -> None:
        """Add one micro-batch of this rank to the current step. Does not wait for the device."""
        self.sums += torch.stack((loss_sum.sums, loss_sum.counts)).detach()
        self._tokens += tokens

    def end_step(self, result: StepResult, *, global_step: int, data_step: int) -> None:
        """Close the current step, applied or not; the counters are those after it."""
        metrics = [value.detach().to(self.sums) for value in (result.grad_norm, *result.extra.values())]
        tokens = self.sums.new_full((1,), self._tokens)
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
                sums, counts = (dict(zip(COLUMNS, totals, strict=False)) for _ in range(2))
                tokens = int(next(totals))
                grad_norm, *means = (total / len(ranks) for total in islice(totals, 1 + len(names)))
                self._records.append(
                    StepRecord(**facts, grad_norm=grad_norm, sums=sums, counts=counts, tokens=tokens,
                               extra=dict(zip(names, means, strict=True)))
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
        # This rank's sums and counts of the step that has not ended.
        self.sums = torch.zeros(2, len(COLUMNS), dtype=torch.float64, device=self.device)
        self._tokens = 0


def _gather(row: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's `row`, in rank order. A collective."""
    ranks = [row]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        ranks = [torch.empty_like(row) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, row)
    return ranks


def by_column(sums: torch.Tensor) -> list[dict[str, float]]:
    """Return the rows of [rows, len(COLUMNS)] as dicts by task and figure. Waits for the device."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in sums.tolist()]


def has_losses(counts: Mapping[str, float]) -> bool:
    """Return whether a loss was counted."""
    return any(counts.get(name) for name in TASKS)


def mean_loss(sums: Mapping[str, float], counts: Mapping[str, float]) -> float:
    """Return the mean of the losses of all tasks, in nats; NaN without losses."""
    count = sum(counts.get(name, 0.0) for name in TASKS)
    return sum(sums.get(name, 0.0) for name in TASKS) / count if count else math.nan


def loss_metrics(prefix: str, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
    """Return `PREFIX/loss`, `PREFIX/loss_R1`… by task, and `PREFIX/FIGURE`…; those without a count are left out."""
    means = {name: sums[name] / count for name, count in counts.items() if count}
    return {f"{prefix}/loss": mean_loss(sums, counts)} | {
        f"{prefix}/{name if name in FIGURES else f'loss_{name}'}": mean for name, mean in means.items()
    }


def eval_metrics(sums: Mapping[str, float], counts: Mapping[str, float], eval_set: str = "") -> dict[str, float]:
    """Return the `loss_metrics` of a held-out set (`eval/…`, or `eval/NAME/…`), and for each loss per token the
    perplexity (`eval/perplexity`, `eval/perplexity_X1`)."""
    metrics = loss_metrics(f"eval/{eval_set}" if eval_set else "eval", sums, counts)
    if any(TASKS[name].per_example for name in TASKS if counts.get(name)):
        return metrics
    return metrics | {
        "/perplexity".join(name.rsplit("/loss", 1)): math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
        for name, loss in metrics.items()
        if name.rpartition("/")[2].startswith("loss")
    }


def train_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the `train/` metrics of an interval of at least one step, and the engine's own (`StepResult.extra`).
    Losses and the engine's metrics are means over the applied steps (over all, if no step was applied): a skipped NaN
    would hide the others. Learning rate and gradient norm are the last step's."""
    counted = [record for record in records if record.applied] or records
    sums, counts = (_by_name([getattr(record, name) for record in counted], sum) for name in ("sums", "counts"))
    return {
        **loss_metrics("train", sums, counts),
        "train/learning_rate": records[-1].learning_rate,
        "train/grad_norm": records[-1].grad_norm,
        "train/skipped_steps": sum(not record.applied for record in records),
        **_by_name([record.extra for record in counted], lambda values: sum(values) / len(values)),
    }


def _by_name(rows: Sequence[Mapping[str, float]], combine: Callable[[list[float]], float]) -> dict[str, float]:
    return {name: combine([row[name] for row in rows if name in row]) for name in dict.fromkeys(chain(*rows))}
