"""Decides when the loop saves, saves a checkpoint, records the outcome of a save, and answers alerts of the state."""

import logging
import math
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

from ds_encdec.base.types import CheckpointError, DivergedError, NonFiniteStateError, TrainingState
from ds_encdec.monitor.metrics_file import answer_field
from ds_encdec.monitor.recorder import Actions
from ds_encdec.training.loop_state import Trainer, run_callbacks
from ds_encdec.training.replicas import compare_replicas, replicas_error
from ds_encdec.training.resume import go_back
from ds_encdec.training.step_plan import StepPlan, is_best

logger = logging.getLogger(__name__)


def reason_to_save(
    run: Trainer, plan: StepPlan, actions: Actions, *, rolled_back: bool, value: float | None
) -> str | None:
    """Return why a checkpoint is due after a step, or None. `value`: of the step's evaluation."""
    saves_best = run.training.save_on_best or run.training.save_strategy == "best"
    reasons = {
        "end": run.is_over,
        "stop": actions.leave is not None,
        "rollback": rolled_back,
        "interval": plan.save,
        "best": saves_best and is_best(run.state, value, run.training),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def save(run: Trainer, reason: str, value: float | None = None) -> None:
    """Save a checkpoint. It becomes `best` if it was evaluated just now and is better than all saved ones. The last
    save of this process (`end`, `stop`) is written at once, and the run fails with it; `stop`: the run is not complete,
    and a state that is not finite is left to the next start. The outcome of any other save is known later (at once
    after a rollback), and the run goes on if it failed. If a state is not finite, or replicas differ, and the run rolls
    back for it, that earlier state is saved instead."""
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        has_checkpoints = run.collectives.on_rank_zero(run.require_folder)
        after_rollback = "stop" if reason == "stop" else "rollback"  # the run goes on where it was at its end
        went_back = collect_save(run)  # at most one under way
        if not has_checkpoints:
            logger.warning("%s was moved away or deleted in mid-run: it is made again", run.checkpoints.folder)
            run.checkpoints.newest_step = None
            run.state = replace(run.state, best_value=None, best_step=None)
        if heal(run, compare_replicas(run)) or went_back:
            reason, value = after_rollback, None
        best = is_best(run.state, value, run.training)
        if reason == "best" and not best:
            return  # the save that was under way is better
        saved = replace(run.state, best_value=value, best_step=run.state.global_step) if best else run.state
        run.recorder.record_tokens(run.state)  # a resume repeats no part of this entry
        lanes = list(chain.from_iterable(run.collectives.gather_to_zero(run.lanes)))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"time": now, "loss": run.recorder.last_loss, "reason": reason}
        files = run.run_files(saved, run.recorder.state_dict(), lanes, facts)
        in_background = run.training.async_save and reason in ("interval", "best")
        pointers = ("best",) * best + ("final",) * (reason == "end")
        run.checkpoints.save(saved, run.engine.stage, files, pointers=pointers, in_background=in_background)
        run.recorder.machine.note_save()
        if not in_background and collect_save(run, reason):
            save(run, after_rollback)


def collect_save(run: Trainer, reason: str = "") -> bool:
    """Wait for the save under way, if any, and record its outcome. A failed one changes nothing but the log, unless it
    is this process's last (see `save`): then CheckpointError is raised. A state that is not finite raises an alert;
    returns whether the run has rolled back for it (see `answer_alert`)."""
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        outcome = run.checkpoints.collect()
    if outcome is None:
        return False
    step = outcome.state.global_step
    if isinstance(outcome.problem, NonFiniteStateError):
        message = f"this state is not saved, because it is not finite: {outcome.problem}"
        return answer_alert(run, outcome.state, "non_finite_state", math.nan, message, is_last=reason == "end")
    if outcome.problem is not None:
        number = run.checkpoints.newest_step
        newest = "There is no checkpoint yet" if number is None else f"The newest is step {number}'s"
        problem = f"step {step} was not saved: {outcome.problem} {newest}"
        if reason in ("end", "stop"):
            raise CheckpointError(f"{problem}. Then go on with `--resume auto`.")
        if run.collectives.rank == 0:
            again = f"{outcome.failures} saves in a row have failed now. " if outcome.failures > 1 else ""
            logger.error("%s. %sTraining goes on; the next save is at its usual time.", problem, again)
        return False
    run.saved_data_step = outcome.state.data_step
    run.recorder.log_save(blocked_seconds=outcome.blocked_seconds, seconds=outcome.seconds)
    best = " (best so far)" if outcome.state.best_step == step else ""
    logger.info(f"saved step {step}{best} in {outcome.seconds:.1f} s, training paused {outcome.blocked_seconds:.1f} s")
    run_callbacks(run, "after_save", outcome.state, run.checkpoints.files.at(step))
    run.state = replace(run.state, best_value=outcome.state.best_value, best_step=outcome.state.best_step)
    return False


def answer_alert(run: Trainer, state: TrainingState, kind: str, value: float, message: str, *, is_last: bool) -> bool:
    """Raise the alert `kind` about `state`, and act on its answer; returns whether the run has rolled back, and its
    caller saves at once. Raises DivergedError if the alert stops the run, or if it `is_last`, so that nothing later
    decides, and there is no rollback: the state of an evaluation is saved first."""
    actions = unless_stopped(run.recorder.alert(state, kind, value, math.inf, message))
    if roll_back(run, actions):
        return True
    if is_last:
        remedy = "lower training.learning_rate"
        if kind == "non_finite_evaluation":
            save(run, "stop")
            remedy = "go back to an earlier checkpoint (`--resume PATH`), and lower training.learning_rate"
        raise DivergedError(
            f"{kind}: step {state.global_step}: {message}. `--resume auto` goes on from step "
            f"{run.checkpoints.newest_step or 0}; if it happens again, {remedy}."
        )
    return False


def unless_stopped(actions: Actions) -> Actions:
    """Return `actions`, or raise DivergedError if an alert ends the run."""
    if (alert := actions.stop) is not None:
        kind = alert["type"]
        raise DivergedError(
            f"{kind}: {alert['message']} (monitor.{answer_field(kind)}=stop). Checkpoints are untouched."
        )
    return actions


def roll_back(run: Trainer, actions: Actions) -> bool:
    """Roll back if an alert demands it and a checkpoint is old enough; returns whether it did. The caller saves at
    once, in that checkpoint's place: a run that is killed now must not meet the same data again."""
    if actions.rollback is None:
        return False
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        if collect_save(run):
            return True
        earlier = go_back(run.state, actions.rollback, run.engine, run.checkpoints, run.recorder)
    if earlier is not None:
        run.state, run.skipped_in_a_row = earlier, 0
    return earlier is not None


def heal(run: Trainer, actions: Actions) -> bool:
    """Roll back if replicas differ and the answer demands it; returns whether it did, with replicas that are equal now.
    Raises ReplicasDifferError if there is no way back. A collective."""
    if (alert := actions.rollback) is None:
        return False
    if not roll_back(run, actions):
        raise replicas_error(alert, "there is no checkpoint to go back to")
    if compare_replicas(run).rollback is not None:
        step = run.state.global_step
        raise replicas_error(alert, f"still after the rollback to step {step}, in weights that no checkpoint holds")
    return True
