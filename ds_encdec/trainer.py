"""The loop.

Everything it uses is handed in by build.py. It decides nothing about engines, files or formats: it says
when a batch is read, when the optimizer steps, when metrics are logged, when the model is evaluated and
saved, and when the run ends.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.loader import LaneLoader
from ds_encdec.engine.protocol import Engine
from ds_encdec.evaluate import evaluate
from ds_encdec.launch.agreement import Agreement, attempt
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.monitor.recorder import Recorder
from ds_encdec.types import Batch, CheckpointError, DivergedError, Preempted, StepResult, TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks know of a step before its backward pass; one small host-side exchange per step."""

    target_tokens: int
    encoder_tokens: int
    epoch: int
    stop: bool
    save_due: bool
    save_over: bool


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What a checkpoint holds beside the engine's files: counters, metrics, and one record per data lane."""

    state: TrainingState
    recorder: dict[str, Any]
    lanes: list[dict[str, Any]]


@dataclass
class Trainer:
    """A run, wired.

    `run_files` turns a `CheckpointContent`, as it is now, into what writes it into a checkpoint's folder later, from
    any thread (rank 0 only).
    """

    config: FullConfig
    engine: Engine
    loader: LaneLoader
    eval_batches: Callable[[], Sequence[Batch]]
    agreement: Agreement
    recorder: Recorder
    checkpoints: CheckpointManager
    stop: StopRequest
    run_files: Callable[[CheckpointContent], Callable[[Path], None]]
    state: TrainingState


def train(run: Trainer) -> TrainingState:
    """Train until `training.num_train_steps` steps have been applied; returns the final state.

    Raises Preempted after a save when the run was asked to stop, DivergedError when too many steps in
    a row were skipped, CheckpointError when the last save of all fails. A save may still be under way then.
    """
    training = run.config.training
    state = run.state
    skipped_in_a_row = 0
    last_save = time.monotonic()
    while state.global_step < training.num_train_steps:
        micro_batches, totals = _next_step(run, last_save)
        if totals.stop:
            run.stop.acknowledge()
        if totals.save_over:
            state = _collect_save(run, state)
        for last, batch in mark_last(micro_batches):
            loss = run.engine.forward(batch)
            run.engine.backward(loss, target_tokens=totals.target_tokens, last=last)
            run.recorder.add(loss, batch)
        result = run.engine.step()
        state = advance(state, result, totals)
        run.recorder.end_step(state, result)

        skipped_in_a_row = 0 if result.applied else skipped_in_a_row + 1
        if skipped_in_a_row >= training.max_consecutive_skipped_steps:
            raise DivergedError(_divergence(state, skipped_in_a_row))

        done = state.global_step == training.num_train_steps
        due = DueSteps(state.global_step, applied=result.applied, done=done)
        if due.every(training.logging_steps):
            run.recorder.log(state)
        eval_loss = None
        # A checkpoint is evaluated, or it could not be the best; one that is asked for in a hurry is not.
        evaluates = due.every(training.eval_steps) or due.every(training.save_steps)
        if training.eval_samples and evaluates and not totals.stop:
            eval_loss = _evaluate(run, state)
        if totals.save_due or totals.stop or due.every(training.save_steps):
            state = _save(run, state, eval_loss, done=done, stopping=totals.stop)
            last_save = time.monotonic()
        if totals.stop and not done:
            raise Preempted(f"stopped at step {state.global_step} by {run.stop.reason or 'another rank'}; state saved")
    return state


@dataclass(frozen=True, slots=True)
class DueSteps:
    """Whether something that happens every n applied steps happens now (and always at the end)."""

    step: int
    applied: bool
    done: bool

    def every(self, n: int) -> bool:
        """True at steps n, 2n, … when they were applied, and at the last step of the run."""
        return self.applied and (self.step % n == 0 or self.done)


def advance(state: TrainingState, result: StepResult, totals: StepTotals) -> TrainingState:
    """The state after one consumed step, applied or not."""
    return dataclasses.replace(
        state,
        global_step=state.global_step + result.applied,
        data_step=state.data_step + 1,
        skipped_steps=state.skipped_steps + (not result.applied),
        epoch=totals.epoch,
        encoder_tokens_seen=state.encoder_tokens_seen + totals.encoder_tokens,
        target_tokens_seen=state.target_tokens_seen + totals.target_tokens,
    )


def mark_last(items: Sequence[T]) -> Iterator[tuple[bool, T]]:
    """Each item with whether it is the last one."""
    for index, item in enumerate(items, start=1):
        yield index == len(items), item


def _next_step(run: Trainer, last_save: float) -> tuple[list[Batch], StepTotals]:
    """This rank's micro-batches, and what all ranks bring to the step: they take the same branches by it.

    Raises on every rank the error of one that has no data, so that the others do not wait for it.
    """
    with run.recorder.waiting_for_data():
        micro_batches, error = attempt(lambda: next(run.loader))
    hours = run.config.training.save_interval_hours
    rows = run.agreement.exchange(
        [
            error is not None,
            sum(batch.target_tokens for batch in micro_batches or ()),
            sum(batch.encoder_tokens for batch in micro_batches or ()),
            run.loader.epoch,
            run.stop.requested,
            hours is not None and time.monotonic() - last_save > hours * 3600,
            run.checkpoints.save_is_over,
        ]
    )
    failures, target_tokens, encoder_tokens, epochs, stops, saves_due, saves_over = zip(*rows, strict=True)
    if any(failures):
        run.agreement.raise_first(error)
    totals = StepTotals(
        target_tokens=sum(target_tokens),
        encoder_tokens=sum(encoder_tokens),
        epoch=min(epochs),
        stop=any(stops),
        save_due=bool(saves_due[0]),  # rank 0's clock decides
        save_over=all(saves_over),
    )
    return micro_batches or [], totals


def _evaluate(run: Trainer, state: TrainingState) -> float | None:
    """The loss on the held-out split; None where it has no target token."""
    with run.recorder.paused():
        metrics = evaluate(run.engine, run.eval_batches(), run.agreement)
    if not metrics:
        return None
    run.recorder.log_eval(state, metrics)
    return metrics["eval/loss"]


def _save(run: Trainer, state: TrainingState, eval_loss: float | None, *, done: bool, stopping: bool) -> TrainingState:
    """Save a checkpoint. It becomes `best` when it was evaluated just now, to the lowest loss of all saved ones.

    The last one of this process is written at once, and the run fails with it. Of any other the run learns later
    whether it was written, and goes on if not. Returns the state, with what is known of the best checkpoint.
    """
    last = done or stopping
    with run.recorder.paused(), run.stop.busy():
        state = _collect_save(run, state)  # at most one under way
        best = state.best_eval_loss
        is_best = eval_loss is not None and math.isfinite(eval_loss) and (best is None or eval_loss < best)
        saved = state
        if is_best:
            saved = dataclasses.replace(state, best_eval_loss=eval_loss, best_step=state.global_step)
        records = run.recorder.state_dict()
        lanes = [record for rank_records in run.agreement.gather(run.loader.state()) for record in rank_records]
        in_background = run.config.training.async_save and not last
        run.checkpoints.save(
            saved,
            run.engine.stage,
            run.run_files(CheckpointContent(saved, records, lanes)),
            pointers=("best",) * is_best + ("final",) * done,
            in_background=in_background,
        )
        return state if in_background else _collect_save(run, state, must_succeed=last)


def _collect_save(run: Trainer, state: TrainingState, *, must_succeed: bool = False) -> TrainingState:
    """Take note of how the save under way, if any, ended; waits for it. Returns the state with its best checkpoint.

    A failed one changes nothing but the log, unless it `must_succeed`: then CheckpointError is raised.
    """
    outcome = run.checkpoints.collect()
    if outcome is None:
        return state
    step = outcome.state.global_step
    if outcome.problem is not None:
        problem = f"step {step} was not saved: {outcome.problem}"
        newest = (
            "There is no checkpoint yet"
            if outcome.newest_step is None
            else f"The newest is step {outcome.newest_step}'s"
        )
        if must_succeed:
            raise CheckpointError(f"{problem} {newest}. Then go on with `--resume auto`.")
        if run.agreement.rank == 0:
            again = f"{outcome.failures} saves in a row have failed now. " if outcome.failures > 1 else ""
            logger.error("%s %s%s. Training goes on; the next save is at its usual time.", problem, again, newest)
        return state
    run.recorder.log_save(blocked_seconds=outcome.blocked_seconds, seconds=outcome.seconds)
    best = "" if outcome.state.best_step != step else ", the best so far"
    logger.info(
        "saved step %d%s in %.1f s, %.1f s of them with training held up",
        step,
        best,
        outcome.seconds,
        outcome.blocked_seconds,
    )
    return dataclasses.replace(state, best_eval_loss=outcome.state.best_eval_loss, best_step=outcome.state.best_step)


def _divergence(state: TrainingState, skipped: int) -> str:
    return (
        f"{skipped} steps in a row had non-finite gradients, the last at data step {state.data_step} (applied step "
        f"{state.global_step}). The newest checkpoint is untouched; lower training.learning_rate or look at the data."
    )
