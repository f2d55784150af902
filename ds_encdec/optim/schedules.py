"""Learning-rate schedules, as pure functions of the update's index.

`learning_rate(i, training)` is the rate of the i-th *applied* update (0, 1, 2, …); skipped steps do not
count. Four schedules are ours and run through a LambdaLR; three (`config.rules.NATIVE_SCHEDULES`) are
classes that DeepSpeed builds from its JSON. Their sequences are repeated here, for checking a run and
its plan, as they really are (deepspeed/runtime/lr_schedules.py), with two surprises:

- DeepSpeed's scheduler is stepped after an update, and its step 0 is the minimum rate, as is its state
  before: updates 0 and 1 both run at the minimum, 0. With warmup 4, total 10, peak 1, linear: 0 0 .25 .5
  .75 1 .833 .667 .5 .333 .167 0 0: the peak comes at update 5, and 0 is reached at update 11, beyond a
  run of 10 updates (whose last one is made at .333).
- WarmupCosineLR begins its cosine one step ahead, so it never reaches its peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ds_encdec.config.schema import TrainingConfig


def learning_rate(update_index: int, training: TrainingConfig) -> float:
    """The learning rate of applied update `update_index` (from 0), of the first parameter group."""
    return training.learning_rate * lr_lambda(update_index, training)


def lr_lambda(update_index: int, training: TrainingConfig) -> float:
    """`learning_rate` over the peak: what a torch LambdaLR wants."""
    return _FACTORS[training.lr_scheduler_type](update_index, training)


def _warmup_factor(update_index: int, training: TrainingConfig) -> float | None:
    """Linear from 1/warmup to 1, so that no update is made at rate 0; None once warm."""
    if update_index < training.warmup_steps:
        return (update_index + 1) / training.warmup_steps
    return None


def _share_done(update_index: int, start: int, end: int) -> float:
    """Share of the updates [start, end) that are over before this one; 1 from `end` on."""
    return min(1.0, (update_index - start) / max(1, end - start))


def _cosine_between(high: float, low: float, share: float) -> float:
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * share))


def _cosine(update_index: int, training: TrainingConfig) -> float:
    if (warmup := _warmup_factor(update_index, training)) is not None:
        return warmup
    share = _share_done(update_index, training.warmup_steps, training.num_train_steps)
    return _cosine_between(1.0, training.min_lr_ratio, share)


def _linear(update_index: int, training: TrainingConfig) -> float:
    if (warmup := _warmup_factor(update_index, training)) is not None:
        return warmup
    return 1.0 - _share_done(update_index, training.warmup_steps, training.num_train_steps)


def _constant(update_index: int, training: TrainingConfig) -> float:
    warmup = _warmup_factor(update_index, training)
    return 1.0 if warmup is None else warmup


def _warmup_stable_decay(update_index: int, training: TrainingConfig) -> float:
    """MiniCPM's schedule (arXiv 2404.06395, section 4), with a cosine for the decay."""
    if (warmup := _warmup_factor(update_index, training)) is not None:
        return warmup
    decay_steps = max(1, round(training.wsd_decay_fraction * training.num_train_steps))
    start = max(training.warmup_steps, training.num_train_steps - decay_steps)
    share = max(0.0, _share_done(update_index, start, training.num_train_steps))
    return _cosine_between(1.0, training.min_lr_ratio, share)


def _native_warmup(iteration: int, training: TrainingConfig) -> float | None:
    """DeepSpeed's warm-up at its `last_batch_iteration`; None once warm. It warms for 2 steps at least."""
    warmup_steps = max(2, training.warmup_steps)
    if iteration >= warmup_steps:
        return None
    if training.warmup_type == "log":
        return math.log(max(0, iteration) + 1) / math.log(warmup_steps)
    return max(0, iteration) / warmup_steps


def _warmup_lr(update_index: int, training: TrainingConfig) -> float:
    warmup = _native_warmup(update_index - 1, training)
    return 1.0 if warmup is None else warmup


def _warmup_decay_lr(update_index: int, training: TrainingConfig) -> float:
    iteration = update_index - 1
    if (warmup := _native_warmup(iteration, training)) is not None:
        return warmup
    decay_steps = max(1, training.num_train_steps - max(2, training.warmup_steps))
    return max(0.0, (training.num_train_steps - iteration) / decay_steps)


def _warmup_cosine_lr(update_index: int, training: TrainingConfig) -> float:
    iteration = update_index - 1
    if (warmup := _native_warmup(iteration, training)) is not None:
        return warmup
    warmup_steps = max(2, training.warmup_steps)
    decay_steps = max(1, training.num_train_steps - warmup_steps)
    return _cosine_between(1.0, training.min_lr_ratio, min(1.0, (iteration - warmup_steps + 1) / decay_steps))


_FACTORS: dict[str, Callable[[int, TrainingConfig], float]] = {
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupLR": _warmup_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _warmup_stable_decay,
}
