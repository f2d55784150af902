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

from ds_encdec.base.plugins import load_plugin
from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schema import TrainingConfig


def _cosine(done: int, steps: int, training: TrainingConfig) -> float:
    low = training.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * (done / steps)))


def _polynomial(done: int, steps: int, training: TrainingConfig) -> float:
    low = training.min_lr_ratio
    return low + (1.0 - low) * (1.0 - done / steps) ** training.lr_scheduler_power


def _inverse_sqrt(done: int, steps: int, training: TrainingConfig) -> float:
    timescale = training.lr_scheduler_timescale or training.warmup_steps or 10_000
    return math.sqrt(timescale / (done + timescale))


# The factor of each schedule after `done` of `steps` past the warm-up.
_DECAYS: dict[str, Callable[[int, int, TrainingConfig], float]] = {
    "WarmupDecayLR": lambda done, steps, _: (steps - done) / steps,  # as DeepSpeed rounds it
    "WarmupLR": lambda done, steps, _: 1.0,
    "WarmupCosineLR": _cosine,
    "cosine": _cosine,
    "linear": lambda done, steps, _: 1.0 - done / steps,
    "constant": lambda done, steps, _: 1.0,
    "wsd": _cosine,  # MiniCPM's (arXiv 2404.06395, section 4), with a cosine for the decay
    # transformers' get_polynomial_decay_schedule_with_warmup, with `lr_end` = `min_lr_ratio` times the peak, and
    # get_inverse_sqrt_schedule, which does not depend on the length of the run
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
}


def learning_rate(update_index: int, training: TrainingConfig) -> float:
    """Return the learning rate of applied update `update_index` (from 0) for the first parameter group."""
    return training.learning_rate * lr_lambda(update_index, training)


def lr_lambda(update_index: int, training: TrainingConfig) -> float:
    """Return `learning_rate` divided by the peak, as torch's LambdaLR needs it."""
    kind, end = training.lr_scheduler_type, training.num_train_steps
    if kind not in _DECAYS:  # the user's own
        return float(load_plugin("training.lr_scheduler_type", kind, "schedules")(update_index, training))
    native = kind in NATIVE_SCHEDULES
    index = update_index - native  # DeepSpeed's `last_batch_iteration` is one behind
    start = max(2, training.warmup_steps) if native else training.warmup_steps
    if index < start:
        if native and training.warmup_type == "log":
            return math.log(max(0, index) + 1) / math.log(start)
        return max(0, index) / start if native else (index + 1) / start
    if kind == "wsd":
        start = max(start, end - max(1, round(training.wsd_decay_fraction * end)))
    steps = max(1, end - start)
    done = index - start + (kind == "WarmupCosineLR") if end > start else steps
    return _DECAYS[kind](min(steps, max(0, done)), steps, training)
