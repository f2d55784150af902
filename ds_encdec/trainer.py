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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.data.bad_rows import check_bad_rows, sum_by_pass
from ds_encdec.data.loader import LaneLoader
from ds_encdec.data.workers import WorkerKilledError
from ds_encdec.engine.protocol import Engine
from ds_encdec.evaluate import evaluate
from ds_encdec.launch.host_collectives import HostCollectives, attempt
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.monitor.recorder import Actions, Alert, Recorder
from ds_encdec.resume import roll_back
from ds_encdec.types import Batch, CheckpointError, DivergedError, Preempted, StepResult, TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks know of a step before its backward pass; one small host-side exchange per step.

    `lacks_data`: some rank has none, because the run is being ended.
    """

    target_tokens: int
    encoder_tokens: int
    epoch: int
    stop: bool
    save_due: bool
    save_over: bool
    lacks_data: bool = False
    bad_rows: int = 0


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
    any thread (rank 0 only). `require_folder` raises where the run's folder is gone.
    """

    config: FullConfig
    engine: Engine
    loader: LaneLoader
    eval_batches: Callable[[], Sequence[Batch]]
    collectives: HostCollectives
    recorder: Recorder
    checkpoints: CheckpointManager
    stop: StopRequest
    run_files: Callable[[CheckpointContent], Callable[[Path], None]]
    state: TrainingState
    require_folder: Callable[[], None] = lambda: None


def train(run: Trainer) -> TrainingState:
    """Train until `training.num_train_steps` steps have been applied, or early stopping; returns the final state.

    Raises Preempted after a save when the run was asked to stop; DivergedError when too many steps in a row were
    skipped, an alert asks for it, or the rollbacks are used up; CheckpointError when the last save of all fails. A
    save may still be under way then.
    """
    training = run.config.training
    state = run.state
    skipped_in_a_row = 0
    last_save = time.monotonic()
    while not is_over(state, training):
        micro_batches, totals = _next_step(run, state, last_save)
        if totals.stop:
            run.stop.acknowledge()
        if totals.lacks_data:
            _stop_without_data(run, state)
        if totals.save_over:
            state = _collect_save(run, state)
        for last, batch in mark_last(micro_batches):
            loss = run.engine.forward(batch)
            run.engine.backward(loss, target_tokens=totals.target_tokens, last=last)
            run.recorder.add(loss, batch)
        run.recorder.measure_held(run.engine.held_bytes)
        result = run.engine.step(run.recorder.veto)
        state = advance(state, result, totals)
        run.recorder.end_step(state, result)

        skipped_in_a_row = 0 if result.applied else skipped_in_a_row + 1
        if skipped_in_a_row >= training.max_consecutive_skipped_steps:
            raise DivergedError(_divergence(state, skipped_in_a_row))

        due = DueSteps(state.global_step, applied=result.applied, done=is_over(state, training))
        logs, saves = due.every(training.logging_steps), totals.save_due or due.every(training.save_steps)
        # A checkpoint is evaluated, or it could not be the best; one that is asked for in a hurry is not.
        evaluates = bool(training.eval_samples) and (due.every(training.eval_steps) or due.every(training.save_steps))
        actions = Actions()
        if logs:
            actions = run.recorder.log(state)
        elif evaluates or saves or totals.stop or not result.applied or run.recorder.judges_every_step:
            actions = run.recorder.judge()  # no state is saved, and no step follows a skipped one, unjudged
        if actions.stop is not None:
            raise DivergedError(_stopped_by(actions.stop))
        leaves = totals.stop or actions.leave is not None

        eval_loss = None
        earlier = _roll_back(run, state, actions.rollback) if actions.rollback is not None else None
        if earlier is not None:
            # Saved at once in its checkpoint's place: a run that is killed now must not meet the same data again.
            state, skipped_in_a_row, saves = earlier, 0, True
        elif evaluates and not leaves:
            eval_loss = _evaluate(run, state)
            state = after_evaluation(state, eval_loss, training)
            saves = saves or (training.save_on_best and is_best(state, eval_loss))
        done = is_over(state, training)
        if done and not logs:  # early, between two lines
            run.recorder.log(state)
        if saves or leaves or done:
            state = _save(run, state, eval_loss, done=done, stopping=leaves, at_once=earlier is not None)
            last_save = time.monotonic()
        if leaves and not done:
            raise _preempted(run, state, actions)
    return state


def is_over(state: TrainingState, training: TrainingConfig) -> bool:
    """Whether all steps have been applied, or evaluation after evaluation has brought nothing more."""
    patience = training.early_stopping_patience
    stopped_early = patience is not None and state.evaluations_since_lowest >= patience
    return stopped_early or state.global_step >= training.num_train_steps


def after_evaluation(state: TrainingState, eval_loss: float | None, training: TrainingConfig) -> TrainingState:
    """The state with an evaluation's loss counted for early stopping; one that is not finite is not lower."""
    if eval_loss is None:
        return state
    lowest = math.inf if state.lowest_eval_loss is None else state.lowest_eval_loss
    if eval_loss < lowest - training.early_stopping_threshold:
        return dataclasses.replace(state, lowest_eval_loss=eval_loss, evaluations_since_lowest=0)
    return dataclasses.replace(state, evaluations_since_lowest=state.evaluations_since_lowest + 1)


def is_best(state: TrainingState, eval_loss: float | None) -> bool:
    """Whether an evaluation found a lower loss than every saved checkpoint has."""
    if eval_loss is None or not math.isfinite(eval_loss):
        return False
    return state.best_eval_loss is None or eval_loss < state.best_eval_loss


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
        bad_rows=totals.bad_rows,
    )


def mark_last(items: Sequence[T]) -> Iterator[tuple[bool, T]]:
    """Each item with whether it is the last one."""
    for index, item in enumerate(items, start=1):
        yield index == len(items), item


def _next_step(run: Trainer, state: TrainingState, last_save: float) -> tuple[list[Batch], StepTotals]:
    """This rank's micro-batches, and what all ranks bring to the step: they take the same branches by it.

    Raises on every rank the error of one that has no data, or no folder, so that the others do not wait for it. Only a
    killed worker is no error where the run is to stop: whoever ends a run may kill its processes in any order.
    """

    def read() -> list[Batch]:
        if state.data_step % run.config.training.logging_steps == 0:
            run.require_folder()
        return next(run.loader)

    with run.recorder.waiting_for_data():
        micro_batches, error = attempt(read)
    hours = run.config.training.save_interval_hours
    mine = [
        0 if error is None else 1 if isinstance(error, WorkerKilledError) else 2,
        sum(batch.target_tokens for batch in micro_batches or ()),
        sum(batch.encoder_tokens for batch in micro_batches or ()),
        run.loader.epoch,
        run.stop.requested,
        hours is not None and time.monotonic() - last_save > hours * 3600,
        run.checkpoints.save_is_over,
        run.loader.found_bad_rows,
    ]
    with run.recorder.waiting_for_ranks():
        rows = run.collectives.all_gather_ints(mine)
    failures, target_tokens, encoder_tokens, epochs, stops, saves_due, saves_over, found_bad_rows = zip(
        *rows, strict=True
    )
    if 2 in failures or (any(failures) and not any(stops)):
        run.collectives.raise_first(error)
    totals = StepTotals(
        target_tokens=sum(target_tokens),
        encoder_tokens=sum(encoder_tokens),
        epoch=min(epochs),
        stop=any(stops),
        save_due=bool(saves_due[0]),  # rank 0's clock decides
        save_over=all(saves_over),
        lacks_data=any(failures),
        bad_rows=_count_bad_rows(run) if any(found_bad_rows) else state.bad_rows,
    )
    return micro_batches or [], totals


def _count_bad_rows(run: Trainer) -> int:
    """The rows passed over by all ranks in the pass that has most of them. Raises DataError for too many."""
    rows = run.collectives.gather((run.loader.bad_rows, run.loader.last_bad_row))
    most = max(sum_by_pass(passes for passes, _ in rows))
    check_bad_rows(most, run.config.data.max_bad_rows, max(newest for _, newest in rows if newest)[-1])
    return most


def _stop_without_data(run: Trainer, state: TrainingState) -> NoReturn:
    """Save the steps that were taken, if any, and raise Preempted: for the next one some rank has no data."""
    run.loader.take_back()
    actions = run.recorder.judge()  # no state is saved unjudged
    if actions.stop is not None:
        raise DivergedError(_stopped_by(actions.stop))
    if actions.rollback is not None:
        state = _roll_back(run, state, actions.rollback) or state
    trained = state.data_step > run.state.data_step
    if trained:
        _save(run, state, None, done=False, stopping=True, at_once=True)
    raise _preempted(run, state, actions, saved=trained)


def _preempted(run: Trainer, state: TrainingState, actions: Actions, *, saved: bool = True) -> Preempted:
    reason = actions.leave["message"] if actions.leave is not None else run.stop.reason or "another rank"
    what = "state saved" if saved else "no step was taken, so there was nothing to save"
    return Preempted(f"stopped at step {state.global_step} by {reason}; {what}")


def _evaluate(run: Trainer, state: TrainingState) -> float | None:
    """The loss on the held-out split; None where it has no target token."""
    with run.recorder.paused():
        metrics = evaluate(run.engine, _with_heartbeat(run, run.eval_batches()), run.collectives)
    if not metrics:
        return None
    run.recorder.log_eval(state, metrics)
    return metrics["eval/loss"]


def _with_heartbeat(run: Trainer, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches; each that is asked for shows that this rank lives."""
    for batch in batches:
        run.stop.heartbeat.beat()
        yield batch


def _save(
    run: Trainer, state: TrainingState, eval_loss: float | None, *, done: bool, stopping: bool, at_once: bool
) -> TrainingState:
    """Save a checkpoint. It becomes `best` when it was evaluated just now, to the lowest loss of all saved ones.

    The last one of this process is written at once, and the run fails with it. Of any other the run learns later
    (unless `at_once`) whether it was written, and goes on if not. Returns the state, with what is known of the best
    checkpoint.
    """
    last = done or stopping
    with run.recorder.paused(), run.stop.busy():
        run.collectives.on_rank_zero(run.require_folder)
        state = _collect_save(run, state)  # at most one under way
        best = is_best(state, eval_loss)
        saved = state
        if best:
            saved = dataclasses.replace(state, best_eval_loss=eval_loss, best_step=state.global_step)
        records = run.recorder.state_dict()
        lanes = [record for rank_records in run.collectives.gather(run.loader.state()) for record in rank_records]
        in_background = run.config.training.async_save and not (last or at_once)
        run.checkpoints.save(
            saved,
            run.engine.stage,
            run.run_files(CheckpointContent(saved, records, lanes)),
            pointers=("best",) * best + ("final",) * done,
            in_background=in_background,
        )
        run.recorder.note_save()
        return state if in_background else _collect_save(run, state, must_succeed=last)


def _roll_back(run: Trainer, state: TrainingState, alert: Alert) -> TrainingState | None:
    """The state that the run went back to, which is not saved yet; None where there is no checkpoint to go back to."""
    with run.recorder.paused(), run.stop.busy():
        return roll_back(
            _collect_save(run, state),
            alert,
            run.config.monitor,
            engine=run.engine,
            checkpoints=run.checkpoints,
            recorder=run.recorder,
            collectives=run.collectives,
        )


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
        if run.collectives.rank == 0:
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


def _stopped_by(alert: Alert) -> str:
    return f"{alert['type']}: {alert['message']} (monitor.on_{alert['type']}=stop). Checkpoints are untouched."


def _divergence(state: TrainingState, skipped: int) -> str:
    return (
        f"{skipped} steps in a row were skipped (not finite, or by the monitor), the last at data step "
        f"{state.data_step} (applied step {state.global_step}). Checkpoints are untouched; look at the data, lower "
        "training.learning_rate, or raise the thresholds of alerts that monitor answers with skip_step."
    )
