"""Which parameters decay, and the learning-rate schedules as pure functions of the update's index.

Matrices decay, norms and biases do not.

`learning_rate(i, training)` is the rate of the i-th *applied* update (0, 1, 2, …); skipped steps do not count. A
schedule is a row: its warm-up, and the shape of its decay. Six are ours, and run through a LambdaLR under DeepSpeed;
three are classes that DeepSpeed builds from its JSON. The rows of those give their sequences as they really are
(deepspeed/runtime/lr_schedules.py), for FSDP2 and for checking a run; there are two surprises:

- DeepSpeed's scheduler is stepped after an update, and its step 0 is the minimum rate, as is its state
  before: updates 0 and 1 both run at the minimum, 0. With warmup 4, total 10, peak 1, linear: 0 0 .25 .5
  .75 1 .833 .667 .5 .333 .167 0 0: the peak comes at update 5, and 0 is reached at update 11, beyond a
  run of 10 updates (whose last one is made at .333).
- WarmupCosineLR begins its cosine one step ahead, so it never reaches its peak.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ds_encdec.base.plugins import load_plugin
from ds_encdec.config.schema import TrainingConfig


class _Schedule(NamedTuple):
    """`decay`: the factor when `done` of `steps` updates behind the warm-up are over. `native`: DeepSpeed's."""

    decay: Callable[[int, int, TrainingConfig], float]
    native: bool = False


def _cosine(done: int, steps: int, training: TrainingConfig) -> float:
    low = training.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * (done / steps)))


def _polynomial(done: int, steps: int, training: TrainingConfig) -> float:
    """transformers' get_polynomial_decay_schedule_with_warmup, whose `lr_end` is `min_lr_ratio` times the peak."""
    low = training.min_lr_ratio
    return low + (1.0 - low) * (1.0 - done / steps) ** training.lr_scheduler_power


def _inverse_sqrt(done: int, steps: int, training: TrainingConfig) -> float:
    """transformers' get_inverse_sqrt_schedule, which does not know where the run ends."""
    timescale = training.lr_scheduler_timescale or training.warmup_steps or 10_000
    return math.sqrt(timescale / (done + timescale))


_SCHEDULES = {
    "WarmupDecayLR": _Schedule(lambda done, steps, _: (steps - done) / steps, native=True),  # as DeepSpeed rounds it
    "WarmupLR": _Schedule(lambda done, steps, _: 1.0, native=True),
    "WarmupCosineLR": _Schedule(_cosine, native=True),
    "cosine": _Schedule(_cosine),
    "linear": _Schedule(lambda done, steps, _: 1.0 - done / steps),
    "constant": _Schedule(lambda done, steps, _: 1.0),
    "wsd": _Schedule(_cosine),  # MiniCPM's (arXiv 2404.06395, section 4), with a cosine for the decay
    "polynomial": _Schedule(_polynomial),
    "inverse_sqrt": _Schedule(_inverse_sqrt),
}


def learning_rate(update_index: int, training: TrainingConfig) -> float:
    """The learning rate of applied update `update_index` (from 0), of the first parameter group."""
    return training.learning_rate * lr_lambda(update_index, training)


def lr_lambda(update_index: int, training: TrainingConfig) -> float:
    """`learning_rate` over the peak: what a torch LambdaLR wants."""
    kind, end = training.lr_scheduler_type, training.num_train_steps
    if kind not in _SCHEDULES:  # the user's own
        return float(load_plugin("training.lr_scheduler_type", kind, "schedules")(update_index, training))
    decay, native = _SCHEDULES[kind]
    index = update_index - native  # DeepSpeed's `last_batch_iteration` is one behind
    start = max(2, training.warmup_steps) if native else training.warmup_steps
    if index < start:
        return _native_warmup(max(0, index), start, training.warmup_type) if native else (index + 1) / start
    if kind == "wsd":
        start = max(start, end - max(1, round(training.wsd_decay_fraction * end)))
    steps = max(1, end - start)
    done = index - start + (kind == "WarmupCosineLR") if end > start else steps
    return decay(min(steps, max(0, done)), steps, training)


def _native_warmup(iteration: int, steps: int, warmup_type: str) -> float:
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps
