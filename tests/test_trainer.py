"""The pure pieces of the loop. The loop itself runs in tests/launch, on real ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from ds_encdec.base.types import StepResult, TrainingState
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.training.step_plan import StepPlan, StepTotals, advance, after_evaluation, is_best, is_over

TOTALS = StepTotals(target_tokens=70, encoder_tokens=50, epoch=2)


def result(applied: bool) -> StepResult:
    return StepResult(applied=applied, grad_norm=torch.tensor(1.0), learning_rate=0.1)


def test_counters_keep_applied_and_consumed_steps_apart() -> None:
    state = TrainingState()
    for applied in (True, False, True):
        state = advance(state, result(applied), TOTALS)
    assert (state.global_step, state.data_step, state.skipped_steps) == (2, 3, 1)
    assert (state.encoder_tokens_seen, state.target_tokens_seen, state.total_tokens_seen) == (150, 210, 360)
    assert state.epoch == 2
    assert TrainingState(**state.to_dict()) == state


PLAN = TrainingConfig(num_train_steps=100, warmup_steps=1, logging_steps=2, eval_steps=4, save_steps=6)


@pytest.mark.parametrize(
    ("step", "changes", "expected"),
    [
        (1, {}, StepPlan()),
        (4, {}, StepPlan(log=True, judge=True, evaluate=True)),
        (6, {}, StepPlan(log=True, judge=True, evaluate=True, save=True)),  # a checkpoint could be the best
        (6, {"eval_samples": 0}, StepPlan(log=True, judge=True, save=True)),
        (6, {"applied": False}, StepPlan(judge=True)),  # what was due at step 6 happened when that was applied
        (5, {"save_steps": 5}, StepPlan(judge=True, evaluate=True, save=True)),  # no state is saved unjudged
        (6, {"save_strategy": "best"}, StepPlan(log=True, judge=True)),  # evaluations decide, every 4 steps
        (1, {"save_due": True}, StepPlan(judge=True, save=True)),  # by the clock
        (1, {"every_step": True}, StepPlan(judge=True)),
        (99, {"num_train_steps": 99}, StepPlan(log=True, judge=True, evaluate=True, save=True)),  # the last step
        (99, {"num_train_steps": 99, "applied": False, "save_due": True}, StepPlan(judge=True, save=True)),
    ],
)
def test_what_is_due_after_a_step(step: int, changes: dict[str, Any], expected: StepPlan) -> None:
    changes = dict(changes)
    applied, every_step = changes.pop("applied", True), changes.pop("every_step", False)
    totals = dataclasses.replace(TOTALS, **{name: changes.pop(name) for name in {"save_due"} & changes.keys()})
    training = PLAN.model_copy(update=changes)
    assert StepPlan.after(TrainingState(step), result(applied), totals, training, every_step=every_step) == expected


def test_another_metric_forgets_the_best() -> None:
    state = TrainingState(global_step=9, best_value=2.0, best_step=8, leading_value=1.5, evaluations_since_leading=3)
    assert state.with_best_by(TrainingConfig().best_by) == state
    other = TrainingConfig(metric_for_best_model="chrf").best_by
    assert state.with_best_by(other) == TrainingState(global_step=9, best_by=other)


def test_a_figure_may_be_better_when_greater() -> None:
    training = TrainingConfig(metric_for_best_model="exact_match")
    assert [is_best(TrainingState(best_value=0.3), value, training) for value in (0.2, 0.4)] == [False, True]
    state = after_evaluation(TrainingState(leading_value=0.3), 0.4, training)
    assert (state.leading_value, state.evaluations_since_leading) == (0.4, 0)


def test_early_stopping_counts_evaluations_that_are_not_lower_by_the_threshold() -> None:
    training = TrainingConfig(early_stopping_patience=2, early_stopping_threshold=0.5)
    state = TrainingState(global_step=1)
    seen = []
    for loss in (4.0, 3.6, 3.4, 3.3, None, math.nan, 3.0):
        state = after_evaluation(state, loss, training)
        seen.append((state.leading_value, state.evaluations_since_leading, is_over(state, training)))
    assert seen == [
        *((4.0, 0, False), (4.0, 1, False)),  # lower, but not by the threshold
        *((3.4, 0, False), (3.4, 1, False), (3.4, 1, False)),  # no evaluation
        *((3.4, 2, True), (3.4, 3, True)),  # not finite: not lower
    ]
    assert not is_over(state, TrainingConfig())
    assert is_over(TrainingState(global_step=100_000), TrainingConfig())


def test_best_is_lower_than_every_saved_one() -> None:
    for best, loss in ((None, 3.0), (3.0, 2.9), (3.0, 3.0), (None, math.nan), (None, None)):
        assert is_best(TrainingState(best_value=best), loss, TrainingConfig()) is (loss in (2.9, 3.0) and best != loss)
