"""The loop.

Everything it uses is handed in by build.py. It decides nothing about engines, files or formats: it says when a batch is
read, when the optimizer steps, when metrics are logged, when the model is evaluated and saved, and when the run ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ds_encdec.callbacks import Callback, call
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.data.loader import LaneLoader, copied_ahead
from ds_encdec.data.sources import check_bad_rows, sum_by_pass
from ds_encdec.data.workers import WorkerKilledError
from ds_encdec.engine.protocol import Engine
from ds_encdec.garbage import by_hand
from ds_encdec.launch.host_collectives import HostCollectives, Reduction, attempt
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.monitor.metrics import by_denoiser, eval_metrics
from ds_encdec.monitor.recorder import Actions, Recorder
from ds_encdec.monitor.sinks import Sample
from ds_encdec.progress import Due, StepTotals, advance, after_evaluation, is_best, is_over
from ds_encdec.rehearsal import rehearse
from ds_encdec.resume import roll_back
from ds_encdec.types import (
    TASKS,
    Batch,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Preempted,
    StepResult,
    TrainingState,
)

logger = logging.getLogger(__name__)


class Brought(NamedTuple):
    """The sums of all ranks' parts of a step. The first three: ranks without a batch, for the data, for a worker."""

    failed: int
    of_data: int
    killed: int
    target_tokens: int
    encoder_tokens: int
    stop: int
    save_due: int
    saves_over: int
    bad_rows: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """This rank's micro-batches of the next step, or why it has none, and what all ranks bring to it, on its way.

    `lanes`: the records of the steps before. `last_save`: when the last save was, as it was then.
    """

    micro_batches: list[Batch]
    error: Exception | None
    lanes: list[dict[str, Any]]
    last_save: float
    sums: Reduction
    epoch: Reduction

    def brought(self) -> Brought:
        """The same on every rank. Waits for them."""
        return Brought(*self.sums.result().tolist())


RunFiles = Callable[[TrainingState, dict[str, Any], list[dict[str, Any]], dict[str, Any]], Callable[[Path], None]]
"""Takes a checkpoint's content beside the engine's files, as it is now: the state, the recorder's, one record per
data lane, and `_save_facts`. Returns what writes it into the checkpoint's folder later, from any thread."""


@dataclass
class Trainer:
    """A run, wired. `require_folder` raises where the run's folder is gone. What `run_files` returns is for rank 0.

    `rehearses`: evaluation and saves are tried before the first step, as on accelerators.

    `judge`: figures of the texts that the model generates for held-out inputs, and some of the texts. Collective.
    """

    config: FullConfig
    engine: Engine
    loader: LaneLoader
    eval_batches: Callable[[], Sequence[Batch]]
    eval_sets: Mapping[str, Callable[[], Sequence[Batch]]] = field(default_factory=dict, kw_only=True)
    collectives: HostCollectives
    recorder: Recorder
    checkpoints: CheckpointManager
    stop: StopRequest
    run_files: RunFiles
    state: TrainingState
    require_folder: Callable[[], None] = lambda: None
    judge: Callable[[], tuple[dict[str, float], list[Sample]]] = lambda: ({}, [])
    callbacks: Sequence[Callback] = ()
    rehearses: bool = False
    saved_data_step: int = field(init=False)  # of the newest whole checkpoint, or of the start
    ahead: Ahead | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.saved_data_step = self.state.data_step


def train(run: Trainer) -> TrainingState:
    """Train until `training.num_train_steps` steps have been applied, or early stopping; returns the final state.

    Raises Preempted after a save when the run was asked to stop; DivergedError when too many steps in a row were
    skipped, an alert asks for it, or the rollbacks are used up; CheckpointError when the last save of all fails. A
    save may still be under way then.
    """
    with by_hand() as collect:
        if run.rehearses and not is_over(run.state, run.config.training):
            with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
                copies = run.config.training.async_save
                rehearse(run.engine, run.eval_batches(), run.checkpoints.folder, copies=copies)
        return _train(run, collect)


def _train(run: Trainer, collect_garbage: Callable[[], None]) -> TrainingState:
    """The loop itself."""
    training, state = run.config.training, run.state
    skipped_in_a_row, last_save = 0, time.monotonic()
    while not is_over(state, training):
        micro_batches, totals = _next_step(run, state, last_save)
        if totals.save_over:
            state = _collect_save(run, state)
        for number, batch in enumerate(copied_ahead(micro_batches, run.engine.device), start=1):
            loss = run.engine.forward(batch)
            run.engine.backward(loss, target_tokens=totals.target_tokens, last=number == len(micro_batches))
            run.recorder.add(loss, batch)
        run.recorder.measure_held(run.engine.held_bytes)
        run.ahead = _read_ahead(run, state, last_save)
        result = run.engine.step(run.recorder.veto)
        run.stop.heartbeat.step_over()
        state = advance(state, result, totals)
        run.recorder.end_step(state, result)
        collect_garbage()
        _tell(run, "after_step", state, result)
        skipped_in_a_row = _count_skipped(state, result, skipped_in_a_row, training)

        due = Due.after(state, result, totals, training, every_step=run.recorder.judges_every_step)
        actions = _observe(run, state, due)
        state, due = _react(run, state, due, actions)
        skipped_in_a_row = 0 if due.rolled_back else skipped_in_a_row
        state, value = _evaluate(run, state, due)
        if due.save or is_over(state, training) or (training.saves_best and is_best(state, value, training)):
            state = _save(run, state, due, value)
            last_save = time.monotonic()
        if due.leave and not is_over(state, training):
            raise _preempted(state, actions)
    return state


def _read_ahead(run: Trainer, state: TrainingState, last_save: float) -> Ahead | None:
    """Begin the next step while the device works on this one; not in the last step, which has none. See `_begin`."""
    over = state.global_step + 1 >= run.config.training.num_train_steps
    return None if over else _begin(run, state.data_step + 1, last_save)


def _begin(run: Trainer, data_step: int, last_save: float) -> Ahead:
    """Read the micro-batches of the step after `data_step` steps, and begin to exchange what the ranks bring to it."""

    def read() -> list[Batch]:
        if data_step % run.config.training.logging_steps == 0:
            run.require_folder()
        return next(run.loader)

    lanes = run.loader.state()
    with run.recorder.clock.spent_on("data"):
        micro_batches, error = attempt(read)
    hours = run.config.training.save_interval_hours
    sums = run.collectives.begin_sum(
        error is not None,
        isinstance(error, DataError),
        isinstance(error, WorkerKilledError),
        sum(batch.target_tokens for batch in micro_batches or ()),
        sum(batch.encoder_tokens for batch in micro_batches or ()),
        run.stop.requested,
        # Rank 0's clock decides.
        run.collectives.rank == 0 and hours is not None and time.monotonic() - last_save > hours * 3600,
        run.checkpoints.save_is_over,
        run.loader.found_bad_rows,
    )
    return Ahead(micro_batches or [], error, lanes, last_save, sums, run.collectives.begin_lowest(run.loader.epoch))


def _next_step(run: Trainer, state: TrainingState, last_save: float) -> tuple[list[Batch], StepTotals]:
    """Return this rank's micro-batches, and what all ranks bring to the step, by which they take the same branches.

    Raises on every rank the error of one that has no data, or no folder, so that the others do not wait for it. Where
    it is the data that fails, the steps that were taken are saved first, and so they are where a rank is asked to stop:
    Preempted is raised then. A killed worker is no error there, since whoever ends a run may kill its processes in any
    order.
    """
    ahead = run.ahead = run.ahead or _begin(run, state.data_step, last_save)
    brought = ahead.brought()
    run.recorder.clock.add_exchange(ahead.sums.waited_seconds)
    if brought.failed != brought.of_data:
        run.collectives.raise_first(ahead.error)
    if brought.stop:
        run.stop.acknowledge()
    stops = brought.stop and state.data_step > run.state.data_step  # the first step is taken in any case
    if brought.failed or stops:
        errors, reasons = zip(*run.collectives.gather((ahead.error, run.stop.reason)), strict=True)
        excused = brought.stop and brought.failed == brought.killed
        error = None if excused else next(filter(None, errors))
        _end_before_step(run, state, error, asked_by=next(filter(None, reasons), ""))
    bad, long = _count_rows(run, state) if brought.bad_rows else (state.bad_rows, state.long_rows)
    no_save_since = ahead.last_save == last_save
    totals = StepTotals(
        target_tokens=brought.target_tokens,
        encoder_tokens=brought.encoder_tokens,
        epoch=int(ahead.epoch.result()),
        save_due=brought.save_due > 0 and no_save_since,
        save_over=brought.saves_over == run.collectives.world_size and no_save_since,
        bad_rows=bad,
        long_rows=long,
    )
    run.ahead = None
    return ahead.micro_batches, totals


def _count_rows(run: Trainer, state: TrainingState) -> tuple[int, int]:
    """The rows passed over by all ranks, and those too long, in the pass with most of each; too many end the run."""
    rows = run.collectives.gather((run.loader.bad_rows, run.loader.last_bad_row, run.loader.long_rows))
    bad, long = (max(sum_by_pass(row[part] for row in rows), default=0) for part in (0, 2))
    last = max((row[1] for row in rows if row[1]), default=("",))[-1]
    try:
        check_bad_rows(bad, run.config.data.max_bad_rows, last)
    except DataError as error:
        _end_before_step(run, state, error)
    return bad, long


def _end_before_step(run: Trainer, state: TrainingState, error: Exception | None, asked_by: str = "") -> NoReturn:
    """Save the steps that were taken, if there is no checkpoint of them, and end.

    Raises `error`, for which some rank has no data for the next step, the same on every rank; or Preempted where it is
    None; DivergedError where the steps ask for it.
    """
    if error is not None and run.collectives.rank == 0:  # at once, or it is lost where the save ends the process
        logger.error("There is no data for the next step; the steps before it are saved. %s", error)
    due = Due(judge=True, leave=True)
    actions = _observe(run, state, due)
    state, due = _react(run, state, due, actions)
    try:
        state = _collect_save(run, state)
        if due.rolled_back or state.data_step != run.saved_data_step:
            _save(run, state, due, None)
    except CheckpointError as problem:
        if error is None:
            raise
        if run.collectives.rank == 0:
            logger.error("%s", problem)
    raise error or _preempted(state, actions, asked_by, saved=state.data_step > run.state.data_step)


def _preempted(state: TrainingState, actions: Actions, asked_by: str = "", *, saved: bool = True) -> Preempted:
    reason = asked_by if actions.leave is None else actions.leave["message"]
    what = "state saved; go on with --resume auto" if saved else "no step was taken, so there was nothing to save"
    return Preempted(f"stopped at step {state.global_step} by {reason}; {what}")


def _count_skipped(state: TrainingState, result: StepResult, before: int, training: TrainingConfig) -> int:
    """Return how many steps in a row have been skipped by now. Raises DivergedError for too many."""
    skipped = 0 if result.applied else before + 1
    if skipped >= training.max_consecutive_skipped_steps:
        raise DivergedError(
            f"{skipped} steps in a row were skipped (not finite, or by the monitor), the last at data step "
            f"{state.data_step} (applied step {state.global_step}). Checkpoints are untouched; look at the data, lower "
            "training.learning_rate, or raise the thresholds of alerts that monitor answers with skip_step."
        )
    return skipped


def _observe(run: Trainer, state: TrainingState, due: Due) -> Actions:
    """Log or judge the steps; returns what the alerts ask for. Raises DivergedError where one asks to stop."""
    actions = run.recorder.log(state) if due.log else run.recorder.judge() if due.judge else Actions()
    if (alert := actions.stop) is not None:
        kind = alert["type"]
        raise DivergedError(f"{kind}: {alert['message']} (monitor.on_{kind}=stop). Checkpoints are untouched.")
    return actions


def _react(run: Trainer, state: TrainingState, due: Due, actions: Actions) -> tuple[TrainingState, Due]:
    """Roll back where an alert asks for it and a checkpoint is old enough; returns the state and the plan from there.

    The state after a rollback is saved at once in its checkpoint's place: a run that is killed now must not meet the
    same data again.
    """
    if due.leave or actions.leave is not None:
        due = replace(due, leave=True, save=True, evaluate=False)  # no evaluation in a hurry
    if actions.rollback is None:
        return state, due
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        state = _collect_save(run, state)
        earlier = roll_back(
            state, actions.rollback, engine=run.engine, checkpoints=run.checkpoints, recorder=run.recorder
        )
    if earlier is None:
        return state, due
    return earlier, replace(due, evaluate=False, save=True, rolled_back=True)


def _evaluate(run: Trainer, state: TrainingState, due: Due) -> tuple[TrainingState, float | None]:
    """Evaluate if it is due; returns its `metric_for_best_model` too, None where no held-out example has a target."""
    if not due.evaluate or (run.ahead is not None and run.ahead.brought().stop):  # no evaluation in a hurry
        return state, None
    try:
        with run.recorder.clock.spent_on("pause"):
            metrics = evaluate(run)
            with run.stop.heartbeat.busy():  # each rank generates as long as its texts are, and waits for the others
                figures, samples = run.judge()
    except ConfigError:  # on all ranks: the user's metric that judges the run has no figure; no step is lost
        _save(run, state, Due(judge=True, leave=True), None)
        raise
    metrics |= figures
    run.recorder.show(state, samples)
    if metrics:
        run.recorder.publish(state, metrics)
        _tell(run, "after_evaluation", state, metrics)
    training = run.config.training
    value = metrics.get(f"eval/{training.metric_for_best_model}")
    return after_evaluation(state, value, training), value


def evaluate(run: Trainer) -> dict[str, float]:
    """Mean loss on the held-out split (nats per target token) and perplexity, in all and for each denoiser that occurs.

    It is weighted like the training loss: per target token, over all ranks. Every rank must bring equally many batches
    (empty ones where it has no data): the engine's collectives are per module call. So is each of `data.eval_sets`, as
    `eval/NAME/…`. There are no figures of a set of which no rank has a target token.
    """
    metrics: dict[str, float] = {}
    for name, batches in {"": run.eval_batches, **run.eval_sets}.items():
        sums = torch.zeros(2, len(TASKS), dtype=torch.float64, device=run.engine.device)
        for batch in copied_ahead(batches(), run.engine.device):
            run.stop.heartbeat.beat()
            loss = run.engine.evaluate(batch)
            sums += torch.stack((loss.by_denoiser, loss.tokens_by_denoiser)).double()
        losses, tokens = by_denoiser(torch.stack(run.collectives.gather(sums.cpu())).sum(dim=0))
        if any(tokens.values()):
            metrics |= eval_metrics(losses, tokens, name)
    return metrics


def _tell(run: Trainer, moment: str, state: TrainingState, fact: object) -> None:
    """Call the run's callbacks that have this moment, on every rank. They may take as long as they like."""
    listening = [one for one in run.callbacks if getattr(type(one), moment) is not getattr(Callback, moment)]
    if listening:
        with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
            for callback in listening:
                run.collectives.on_every_rank(partial(call, callback, moment, state, fact))


def _save(run: Trainer, state: TrainingState, due: Due, value: float | None) -> TrainingState:
    """Save a checkpoint. It becomes `best` when it was evaluated just now, and is better than all saved ones.

    The last one of this process is written at once, and the run fails with it. For any other the run learns later
    (unless it was rolled back) whether it was written, and goes on if not. Nothing is saved where it was only thought
    to be the best. Returns the state, with what is known of the best checkpoint.
    """
    done = is_over(state, run.config.training)
    if done and not due.log:  # stopped early, between two lines of metrics
        run.recorder.log(state)
    last = done or due.leave
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        run.collectives.on_rank_zero(run.require_folder)
        state = _collect_save(run, state)  # at most one under way
        best = is_best(state, value, run.config.training)
        if not (best or last or due.save or due.rolled_back):
            return state  # the save that was under way has a better one
        saved = replace(state, best_value=value, best_step=state.global_step) if best else state
        records = run.recorder.state_dict()
        lanes = run.collectives.gather_to_zero(run.ahead.lanes if run.ahead is not None else run.loader.state())
        in_background = run.config.training.async_save and not (last or due.rolled_back)
        run.checkpoints.save(
            saved,
            run.engine.stage,
            run.run_files(saved, records, list(chain.from_iterable(lanes)), _save_facts(run, due, done)),
            pointers=("best",) * best + ("final",) * done,
            in_background=in_background,
        )
        run.recorder.machine.note_save()
        return state if in_background else _collect_save(run, state, must_succeed=last)


def _save_facts(run: Trainer, due: Due, done: bool) -> dict[str, Any]:
    """Return when a checkpoint is saved (UTC), its last step's training loss (nats per target token), and why."""
    because = {"end": done, "stop": due.leave, "rollback": due.rolled_back, "interval": due.save}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "loss": run.recorder.last_loss,
        "reason": next((reason for reason, holds in because.items() if holds), "best"),
    }


def _collect_save(run: Trainer, state: TrainingState, *, must_succeed: bool = False) -> TrainingState:
    """Take note of how the save under way, if any, ended; waits for it. Returns the state with its best checkpoint.

    A failed one changes nothing but the log, unless it `must_succeed`: then CheckpointError is raised.
    """
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        outcome = run.checkpoints.collect()
    if outcome is None:
        return state
    step = outcome.state.global_step
    if outcome.problem is not None:
        problem = f"step {step} was not saved: {outcome.problem}"
        newest_step = outcome.newest_step
        newest = "There is no checkpoint yet" if newest_step is None else f"The newest is step {newest_step}'s"
        if must_succeed:
            raise CheckpointError(f"{problem} {newest}. Then go on with `--resume auto`.")
        if run.collectives.rank == 0:
            again = f"{outcome.failures} saves in a row have failed now. " if outcome.failures > 1 else ""
            logger.error("%s %s%s. Training goes on; the next save is at its usual time.", problem, again, newest)
        return state
    run.saved_data_step = outcome.state.data_step
    run.recorder.log_save(blocked_seconds=outcome.blocked_seconds, seconds=outcome.seconds)
    best = " (best so far)" if outcome.state.best_step == step else ""
    logger.info(f"saved step {step}{best} in {outcome.seconds:.1f} s, training paused {outcome.blocked_seconds:.1f} s")
    _tell(run, "after_save", outcome.state, run.checkpoints.at(step))
    return replace(state, best_value=outcome.state.best_value, best_step=outcome.state.best_step)
