"""The counters of a run: how a step changes them, and what they say is due after it.

Everything here is a function of what all ranks have alike, so that all take the same branches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.types import StepResult, TrainingState


@dataclass(frozen=True, slots=True)
class StepTotals:
    """All ranks' knowledge of a step before its backward pass, from one small exchange between the hosts per step."""

    target_tokens: int
    encoder_tokens: int
    epoch: int
    save_due: bool
    save_over: bool
    bad_rows: int = 0
    long_rows: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """The plan of what happens after a step. Equal on every rank, because everything that decides it is.

    `log`: close the logging interval, which judges its steps too. `judge`: look for alerts in the steps not yet judged.
    `leave`: save and end, because somebody or a machine's alert asks for it. `rolled_back`: the run has gone back to a
    checkpoint, and waits for the save.
    """

    log: bool = False
    judge: bool = False
    evaluate: bool = False
    save: bool = False
    leave: bool = False
    rolled_back: bool = False

    @classmethod
    def after(
        cls, state: TrainingState, result: StepResult, totals: StepTotals, training: TrainingConfig, *, every_step: bool
    ) -> Due:
        """Plan by the counters. `state` is the one after the step; with `every_step` each step is judged."""
        done = is_over(state, training)

        def every(n: int) -> bool:
            """True at steps n, 2n, … when they were applied, and at the last step of the run."""
            return result.applied and (state.global_step % n == 0 or done)

        log, planned = every(training.logging_steps), training.save_strategy == "steps" and every(training.save_steps)
        save = totals.save_due or planned
        # A checkpoint is evaluated, or it could not be the best.
        evaluate = bool(training.eval_samples) and (every(training.eval_steps) or planned)
        # No state is saved unjudged, and no step follows a skipped one unjudged.
        judge = log or evaluate or save or not result.applied or every_step
        return cls(log, judge, evaluate, save)


def is_over(state: TrainingState, training: TrainingConfig) -> bool:
    """Return whether all steps have been applied, or evaluations have brought nothing better for too long."""
    patience = training.early_stopping_patience
    stopped_early = patience is not None and state.evaluations_since_leading >= patience
    return stopped_early or state.global_step >= training.num_train_steps


def after_evaluation(state: TrainingState, value: float | None, training: TrainingConfig) -> TrainingState:
    """Count an evaluation, None for none, by its `metric_for_best_model` for early stopping. Returns the state then."""
    if value is None:
        return state
    if is_better(value, state.leading_value, training, by=training.early_stopping_threshold):
        return replace(state, leading_value=value, evaluations_since_leading=0)
    return replace(state, evaluations_since_leading=state.evaluations_since_leading + 1)


def is_best(state: TrainingState, value: float | None, training: TrainingConfig) -> bool:
    """Return whether an evaluation found a better `metric_for_best_model` than every saved checkpoint has."""
    return value is not None and is_better(value, state.best_value, training)


def is_better(value: float, than: float | None, training: TrainingConfig, *, by: float = 0.0) -> bool:
    """Return whether `value` is better by more than `by`; a finite one is better than none, and no other is at all."""
    gain = math.inf if than is None else value - than if training.best_is_greatest else than - value
    return math.isfinite(value) and gain > by


def advance(state: TrainingState, result: StepResult, totals: StepTotals) -> TrainingState:
    """The state after one consumed step, applied or not."""
    return replace(
        state,
        global_step=state.global_step + result.applied,
        data_step=state.data_step + 1,
        skipped_steps=state.skipped_steps + (not result.applied),
        epoch=totals.epoch,
        total_tokens_seen=state.total_tokens_seen + totals.encoder_tokens + totals.target_tokens,
        target_tokens_seen=state.target_tokens_seen + totals.target_tokens,
        bad_rows=totals.bad_rows,
        long_rows=totals.long_rows,
    )
