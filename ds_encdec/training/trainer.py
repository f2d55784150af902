"""The training loop, over the parts in loop_state.py. It knows no engines, files or formats: it decides when a batch is
read, the optimizer steps, metrics are logged, the model is evaluated and saved (saving.py), and the run ends."""

import gc
import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import NoReturn

from ds_encdec.base.types import (
    Batch,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Preempted,
    StepResult,
    TrainingState,
)
from ds_encdec.data.loader import count_rows
from ds_encdec.data.sources.sources import check_bad_rows
from ds_encdec.data.workers import WorkerKilledError
from ds_encdec.evaluate.in_training import evaluate
from ds_encdec.launch.host_collectives import attempt
from ds_encdec.monitor.recorder import Actions
from ds_encdec.monitor.token_digests import digest_sums
from ds_encdec.training.loop_state import NextStep, Trainer, run_callbacks
from ds_encdec.training.replicas import due_digest, judge_replicas, places
from ds_encdec.training.saving import answer_alert, collect_save, heal, reason_to_save, roll_back, save, unless_stopped
from ds_encdec.training.step_plan import StepPlan, StepTotals, advance, after_evaluation

logger = logging.getLogger(__name__)

GARBAGE_STEPS = 50  # between two collections; their garbage is small beside a step's own memory


def train(run: Trainer) -> TrainingState:
    """Train until `training.num_train_steps` steps have been applied, or early stopping; returns the final state.
    Raises Preempted after a save if the run is to stop; DivergedError if too many steps in a row were skipped, an alert
    demands it, or the rollbacks are used up; CheckpointError if the last save fails. A save may still be under way."""
    run.before_steps()
    _rehearse(run)
    # The last evaluation was not finite, or `num_train_steps` was lowered to this step. A rollback may end there again.
    is_final = run.checkpoints.files.is_final
    while run.is_over and not run.collectives.on_rank_zero(partial(is_final, run.state.global_step)):
        value, rolled_back = _evaluate(run, StepPlan(log=True, evaluate=bool(run.training.eval_samples)))
        save(run, "end" if run.is_over and not rolled_back else "rollback", value)
    while not run.is_over:
        micro_batches, totals = _next_step(run)
        for number, loss in enumerate(run.engine.losses(micro_batches), start=1):
            run.engine.backward(loss, num_losses=totals.losses, last=number == len(micro_batches))
            run.recorder.add(loss, micro_batches[number - 1])
        run.recorder.measure_held(run.engine.held_bytes)
        if run.state.global_step + 1 < run.training.num_train_steps:  # read while the device works on this step
            run.ahead = _begin_next_step(run, run.state.data_step + 1)
        result = run.engine.step(run.recorder.veto)
        run.stop.heartbeat.step_over()

        run.state = advance(run.state, result, totals)
        run.recorder.end_step(run.state, result)
        run.recorder.tokens.append((totals.token_digest, totals.lane_digest))
        if run.state.data_step % GARBAGE_STEPS == 0:
            gc.collect()  # in the same step on every rank: see build.manual_gc
        run_callbacks(run, "after_step", run.state, result)
        _count_skipped(run, result)

        plan = StepPlan.after(run.state, result, totals, run.training, every_step=run.recorder.veto is not None)
        rolled_back = totals.saves_over == run.collectives.world_size and collect_save(run)
        if rolled_back:
            plan = StepPlan()  # the step is taken back
        actions = unless_stopped(_log(run) if plan.log else run.recorder.judge() if plan.judge else Actions())
        rolled_back = roll_back(run, actions) or rolled_back
        value = None
        if not rolled_back and (run.is_over or not actions.leave):
            value, rolled_back = _evaluate(run, plan)
        if reason := reason_to_save(run, plan, actions, rolled_back=rolled_back, value=value):
            save(run, reason, value)
            run.last_save = time.monotonic()
        if actions.leave and not run.is_over:
            raise _preempted(run, actions.leave["message"])
    return run.state


def _rehearse(run: Trainer) -> None:
    """Copy the state for a save and evaluate a micro-batch, before the first step: a lack of memory for them shows now,
    not hours later. Nothing is written; the host memory of the copies is kept for the saves. A collective."""
    if not run.rehearses or run.is_over:
        return
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        if run.training.async_save:
            staged = run.engine.stage(run.checkpoints.folder, copy=True)
            logger.info("copies of a save take %.2f GiB of this rank's host memory", staged.num_bytes / 2**30)
        if batches := run.eval_sets[""]():
            for _ in run.engine.evaluate(batches[:1]):
                pass


def _next_step(run: Trainer) -> tuple[list[Batch], StepTotals]:
    """Return this rank's micro-batches and the sums of all ranks, by which they take the same branches. Raises on every
    rank the error of one that has no data, or no folder. If the data fails or a rank is to stop, the steps taken are
    saved first; a stop raises Preempted, and a killed worker is no error then, since whoever ends a run may kill its
    processes in any order."""
    ahead = run.ahead = run.ahead or _begin_next_step(run, run.state.data_step)
    totals = ahead.totals()
    run.recorder.clock.add_exchange(ahead.sums.waited_seconds)
    if totals.failed != totals.failed_data:
        run.collectives.raise_first(ahead.error)
    if totals.stop:
        run.stop.has_seen = True
    if totals.failed or (totals.stop and run.has_stepped):  # the first step is taken in any case
        errors, reasons = zip(*run.collectives.gather((ahead.error, run.stop.reason)), strict=True)
        excused = totals.stop and totals.failed == totals.killed_workers
        _end_between_steps(run, None if excused else next(filter(None, errors)), next(filter(None, reasons), ""))
    if heal(run, judge_replicas(run, ahead.digest, ahead.lowest.result()[1:].tolist(), ahead.behind)):
        save(run, "rollback")
        run.last_save = time.monotonic()
    run.ahead = None
    if ahead.last_save != run.last_save:  # the sums about saves are older than the last save
        totals = replace(totals, save_due=0, saves_over=0)
    return ahead.micro_batches, totals


def _begin_next_step(run: Trainer, data_step: int) -> NextStep:
    def read() -> list[Batch]:
        if data_step % run.training.logging_steps == 0:
            run.require_folder()
        return next(run.loader)

    lanes = run.loader.state()
    with run.recorder.clock.spent_on("data"):
        micro_batches, error = attempt(read)
    hours = run.training.save_interval_hours
    sums = run.collectives.begin_sum(  # in the order of the fields of StepTotals
        error is not None,
        isinstance(error, DataError),
        isinstance(error, WorkerKilledError),
        sum(batch.target_tokens for batch in micro_batches or ()),
        sum(batch.num_losses for batch in micro_batches or ()),
        sum(batch.encoder_tokens for batch in micro_batches or ()),
        run.stop.requested,
        # Rank 0's clock decides.
        run.collectives.rank == 0 and hours is not None and time.monotonic() - run.last_save > hours * 3600,
        run.checkpoints.save_is_over,
        *digest_sums(micro_batches or ()),
    )
    digest = due_digest(run)  # behind the other sums, which need not wait for the device
    lowest = run.collectives.begin_lowest(run.loader.epoch, *places(digest))
    return NextStep(micro_batches or [], error, lanes, run.last_save, run.state, digest, sums, lowest)


def _end_between_steps(run: Trainer, error: Exception | None, stopped_by: str = "") -> NoReturn:
    """Save the steps taken, if no checkpoint has them, and raise `error` (the same on every rank), or Preempted if it
    is None; DivergedError if alerts of the steps demand it."""
    if error is not None and run.collectives.rank == 0:  # now, since the save may end the process
        logger.error("No data for the next step; the steps before it are saved: %s", error)
    actions = unless_stopped(run.recorder.judge())
    rolled_back = roll_back(run, actions)
    try:
        rolled_back = collect_save(run) or rolled_back
        if rolled_back or run.state.data_step != run.saved_data_step:
            save(run, "stop")
    except CheckpointError as problem:
        if error is None:
            raise
        if run.collectives.rank == 0:
            logger.error("%s", problem)
    raise error or _preempted(run, actions.leave["message"] if actions.leave else stopped_by)


def _preempted(run: Trainer, stopped_by: str) -> Preempted:
    if run.saved_data_step != run.state.data_step:
        newest = run.checkpoints.newest_step or 0
        what = f"its state is not finite, and not saved: --resume auto goes on from step {newest}"
    elif run.has_stepped:
        what = "state saved; go on with --resume auto"
    else:
        what = "no step was taken, so there was nothing to save"
    return Preempted(f"stopped at step {run.state.global_step} by {stopped_by}; {what}")


def _count_skipped(run: Trainer, result: StepResult) -> None:
    skipped = run.skipped_in_a_row = 0 if result.applied else run.skipped_in_a_row + 1
    if skipped >= run.training.max_consecutive_skipped_steps:
        raise DivergedError(
            f"{skipped} steps in a row were skipped (not finite, or by the monitor), the last at data step "
            f"{run.state.data_step} (applied step {run.state.global_step}). Checkpoints are untouched: check "
            "the data, lower training.learning_rate, or raise the thresholds of alerts with skip_step."
        )


def _log(run: Trainer) -> Actions:
    actions, rows = run.recorder.log(run.state, count_rows(run.lanes))
    earlier, bad = run.state.bad_rows, max(rows.bad, default=0)
    run.state = replace(run.state, bad_rows=bad, long_rows=max(rows.long, default=0))
    if bad > earlier and rows.last_bad is not None:
        try:
            check_bad_rows(bad, run.config.data.max_bad_rows, rows.last_bad[-1])
        except DataError as error:
            _end_between_steps(run, error)
    return actions


def _evaluate(run: Trainer, plan: StepPlan) -> tuple[float | None, bool]:
    """Evaluate if it is planned. Returns the figure by which the best checkpoint is chosen, if any, and whether the run
    has rolled back because a loss is not finite."""
    if not plan.evaluate or (run.ahead is not None and run.ahead.totals().stop):  # a stop does not wait for this
        return None, False
    try:
        with run.recorder.clock.spent_on("pause"):
            metrics = evaluate(run.engine, run.eval_sets, run.collectives, run.stop.heartbeat)
            with run.stop.heartbeat.busy():  # ranks' texts differ in length, so ranks wait for each other
                figures, samples = run.judge() if run.judge else ({}, [])
    except ConfigError:  # on all ranks: the user's metric that chooses the best has no figure; no step is lost
        save(run, "stop")
        raise
    losses = [name for name in metrics if name.rpartition("/")[2].startswith("loss")]  # also of one denoiser
    bad = next((name for name in losses if not math.isfinite(metrics[name])), None)
    metrics |= figures
    run.recorder.show(run.state, samples)
    if metrics:
        run.recorder.publish(run.state, metrics)
        run_callbacks(run, "after_evaluation", run.state, metrics)
    value = metrics.get(f"eval/{run.training.metric_for_best_model}")  # None: no held-out example has a target
    run.state = after_evaluation(run.state, value, run.training)
    if run.is_over and not plan.log:  # stopped early, between two lines of metrics
        _log(run)
    if bad is not None:
        message, is_last = f"{bad} is {metrics[bad]}", run.is_over
        if answer_alert(run, run.state, "non_finite_evaluation", metrics[bad], message, is_last=is_last):
            return None, True
    return value, False
