"""Decides when the loop saves, saves a checkpoint, and records the outcome of a save."""

import logging
from dataclasses import replace
from datetime import UTC, datetime

from ds_encdec.base.types import CheckpointError
from ds_encdec.monitor.recorder import Actions
from ds_encdec.training.loop_state import Trainer, run_callbacks
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
    save of this process is written at once, and the run fails with it. The outcome of any other is known later (at once
    after a rollback), and the run goes on if it failed."""
    last = reason in ("end", "stop")
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        run.collectives.on_rank_zero(run.require_folder)
        collect_save(run)  # at most one under way
        best = is_best(run.state, value, run.training)
        if reason == "best" and not best:
            return  # the save that was under way is better
        saved = replace(run.state, best_value=value, best_step=run.state.global_step) if best else run.state
        everyones = run.collectives.gather_to_zero((run.lanes, run.recorder.tokens.lanes))
        run.recorder.record_tokens(run.state, [digests for _, digests in everyones])  # a resume repeats no part of it
        lanes = [lane for of_rank, _ in everyones for lane in of_rank]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {"time": now, "loss": run.recorder.last_loss, "reason": reason}
        files = run.run_files(saved, run.recorder.state_dict(), lanes, facts)
        in_background = run.training.async_save and not last and reason != "rollback"
        pointers = ("best",) * best + ("final",) * run.is_over
        run.checkpoints.save(saved, run.engine.stage, files, pointers=pointers, in_background=in_background)
        run.recorder.machine.note_save()
        if not in_background:
            collect_save(run, must_succeed=last)


def collect_save(run: Trainer, *, must_succeed: bool = False) -> None:
    """Wait for the save under way, if any, and record its outcome. A failed one changes nothing but the log, unless it
    `must_succeed`: then CheckpointError is raised."""
    with run.recorder.clock.spent_on("pause"), run.stop.heartbeat.busy():
        outcome = run.checkpoints.collect()
    if outcome is None:
        return
    step = outcome.state.global_step
    if outcome.problem is not None:
        problem, newest_step = f"step {step} was not saved: {outcome.problem}", outcome.newest_step
        newest = "There is no checkpoint yet" if newest_step is None else f"The newest is step {newest_step}'s"
        if must_succeed:
            raise CheckpointError(f"{problem} {newest}. Then go on with `--resume auto`.")
        if run.collectives.rank == 0:
            again = f"{outcome.failures} saves in a row have failed now. " if outcome.failures > 1 else ""
            logger.error("%s %s%s. Training goes on; the next save is at its usual time.", problem, again, newest)
        return
    run.saved_data_step = outcome.state.data_step
    run.recorder.log_save(blocked_seconds=outcome.blocked_seconds, seconds=outcome.seconds)
    best = " (best so far)" if outcome.state.best_step == step else ""
    logger.info(f"saved step {step}{best} in {outcome.seconds:.1f} s, training paused {outcome.blocked_seconds:.1f} s")
    run_callbacks(run, "after_save", outcome.state, run.checkpoints.files.at(step))
    run.state = replace(run.state, best_value=outcome.state.best_value, best_step=outcome.state.best_step)
