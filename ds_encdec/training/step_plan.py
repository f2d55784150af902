"""Update a run's counters, and plan from them the actions after a step, by values that are equal on all ranks."""

import math
from dataclasses import dataclass, replace
from typing import Self

from ds_encdec.base.types import StepResult, TrainingState
from ds_encdec.config.schema import TrainingConfig


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks, known before a step's backward pass, from one small exchange between the hosts per step. The
    first three count ranks without a batch: for any reason, for lack of data, because a worker was killed. `losses` are
    those of `Batch.num_losses`. `stop`: ranks that are to stop. `save_due`: 1 if the clock demands a save.
    `saves_over`: ranks whose background save has ended. `token_digest`, `lane_digest`: the sums of
    monitor/token_digests.py. `epoch` is the lowest."""

    failed: int = 0
    failed_data: int = 0
    killed_workers: int = 0
    target_tokens: int = 0
    losses: int = 0
    encoder_tokens: int = 0
    stop: int = 0
    save_due: int = 0
    saves_over: int = 0
    token_digest: int = 0
    lane_digest: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The actions that follow a step, by the counters; equal on every rank. `log`: close the logging interval, which
    judges its steps too. `judge`: look for alerts in the steps not judged yet."""

    log: bool = False
    judge: bool = False
    evaluate: bool = False
    save: bool = False

    @classmethod
    def after(
        cls, state: TrainingState, result: StepResult, totals: StepTotals, training: TrainingConfig, *, every_step: bool
    ) -> Self:
        """Plan by the counters. `state` is the one after the step; with `every_step` each step is judged."""
        done = is_over(state, training)

        def every(n: int) -> bool:
            # At steps n, 2n, … when they were applied, and at the last step of the run.
            return result.applied and (state.global_step % n == 0 or done)

        log, planned = every(training.logging_steps), training.save_strategy == "steps" and every(training.save_steps)
        save = totals.save_due > 0 or planned
        # A checkpoint is evaluated, or it could not be the best.
        evaluate = bool(training.eval_samples) and (every(training.eval_steps) or planned)
        # No state is saved unjudged, and no step follows a skipped one unjudged.
        return cls(log, log or evaluate or save or not result.applied or every_step, evaluate, save)


def is_over(state: TrainingState, training: TrainingConfig) -> bool:
    """Return whether all steps have been applied, or evaluations have not improved for too long."""
    patience = training.early_stopping_patience
    stopped_early = patience is not None and state.evaluations_since_leading >= patience
    return stopped_early or state.global_step >= training.num_train_steps


def after_evaluation(state: TrainingState, value: float | None, training: TrainingConfig) -> TrainingState:
    """Return the state with an evaluation's `metric_for_best_model` (None: no figure) counted for early stopping."""
    if value is None:
        return state
    if _is_better(value, state.leading_value, training, by=training.early_stopping_threshold):
        return replace(state, leading_value=value, evaluations_since_leading=0)
    return replace(state, evaluations_since_leading=state.evaluations_since_leading + 1)


def is_best(state: TrainingState, value: float | None, training: TrainingConfig) -> bool:
    """Return whether an evaluation has a better `metric_for_best_model` than every saved checkpoint."""
    return value is not None and _is_better(value, state.best_value, training)


def _is_better(value: float, than: float | None, training: TrainingConfig, *, by: float = 0.0) -> bool:
    # Any finite value is better than None.
    gain = math.inf if than is None else value - than if training.best_is_greatest else than - value
    return math.isfinite(value) and gain > by


def advance(state: TrainingState, result: StepResult, totals: StepTotals) -> TrainingState:
    """Return the state after one consumed step, applied or not."""
    return replace(
        state,
        global_step=state.global_step + result.applied,
        data_step=state.data_step + 1,
        skipped_steps=state.skipped_steps + (not result.applied),
        epoch=totals.epoch,
        total_tokens_seen=state.total_tokens_seen + totals.encoder_tokens + totals.target_tokens,
        target_tokens_seen=state.target_tokens_seen + totals.target_tokens,
    )
