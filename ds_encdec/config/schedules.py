"""Learning-rate schedules as pure functions of the update's index.

`learning_rate(i, training)` is the rate of the i-th *applied* update (0, 1, 2, …); skipped steps do not count. Six
schedules are ours, and run through a LambdaLR under DeepSpeed; DeepSpeed builds the other three from its JSON, and
their rows here give its real sequences (deepspeed/runtime/lr_schedules.py), for FSDP2 and for checking a run:

- DeepSpeed steps its scheduler after an update, and its step 0, like its initial state, is the minimum rate, 0. So
  updates 0 and 1 both run at 0. With warmup 4, total 10, peak 1, linear: 0 0 .25 .5 .75 1 .833 .667 .5 .333 .167 0 0:
  the peak is at update 5, and 0 at update 11, beyond a run of 10 updates (whose last rate is .333).
- WarmupCosineLR begins its cosine one step ahead, so it never reaches its peak.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ds_encdec.base.plugins import load_plugin
from ds_encdec.config.schema import TrainingConfig


class _Schedule(NamedTuple):
    """A schedule: `decay` returns the factor after `done` of `steps` past the warm-up; `native` marks DeepSpeed's."""

    decay: Callable[[int, int, TrainingConfig], float]
    native: bool = False


def _cosine(done: int, steps: int, training: TrainingConfig) -> float:
    low = training.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * (done / steps)))


def _polynomial(done: int, steps: int, training: TrainingConfig) -> float:
    """Follow transformers' get_polynomial_decay_schedule_with_warmup, with `lr_end` = `min_lr_ratio` times the peak."""
    low = training.min_lr_ratio
    return low + (1.0 - low) * (1.0 - done / steps) ** training.lr_scheduler_power


def _inverse_sqrt(done: int, steps: int, training: TrainingConfig) -> float:
    """Follow transformers' get_inverse_sqrt_schedule, which does not depend on the length of the run."""
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
    """Return the learning rate of applied update `update_index` (from 0) for the first parameter group."""
    return training.learning_rate * lr_lambda(update_index, training)


def lr_lambda(update_index: int, training: TrainingConfig) -> float:
    """Return `learning_rate` divided by the peak, as torch's LambdaLR needs it."""
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
