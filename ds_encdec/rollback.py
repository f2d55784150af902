"""The way back to an earlier checkpoint in mid-run, past the data that was read since.

Weights, optimizer, schedule and the monitor's windows become the checkpoint's; the data loader is left where it is. So
the run goes on as one that trained up to that checkpoint and then never saw the data in between.
"""

from __future__ import annotations

import dataclasses
import logging

from ds_encdec.checkpoint.find import find_checkpoint
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.engine.protocol import Engine
from ds_encdec.monitor.recorder import Alert, Recorder
from ds_encdec.resume import load_engine
from ds_encdec.types import DivergedError, TrainingState

logger = logging.getLogger(__name__)


def roll_back(
    state: TrainingState, alert: Alert, *, engine: Engine, checkpoints: CheckpointManager, recorder: Recorder
) -> TrainingState | None:
    """Go back to a checkpoint. Returns its state to go on from, or None where no checkpoint is old enough.

    `alert`: what asks for it. Collective; no save is under way. The caller saves the new state at once: it has the
    checkpoint's step, and other data behind it. Raises DivergedError where the run has used up its rollbacks,
    CheckpointError where every checkpoint that is old enough is damaged.
    """
    settings, collectives = recorder.settings, recorder.collectives
    if state.rollbacks >= settings.max_rollbacks:
        raise DivergedError(
            f"{alert['type']}: {alert['message']}, and monitor.max_rollbacks={settings.max_rollbacks} rollbacks are "
            "used up. Checkpoints are untouched; lower training.learning_rate, or look at the data."
        )
    where = {"step": state.global_step, "data_step": state.data_step}
    oldest = alert["step"] - settings.rollback_min_steps
    found = find_checkpoint(checkpoints.folder, collectives, "auto", at_most=oldest)
    if found is None:
        needed = f"of step {oldest} or before" if oldest > 0 else f"{settings.rollback_min_steps} steps old"
        refusal = f"No rollback: there is no checkpoint {needed} (monitor.rollback_min_steps). Training goes on."
        recorder.events.write("no_rollback", **where, message=refusal)
        if collectives.rank == 0:
            logger.error(refusal)
        return None
    saved = found.read_json("trainer.json")
    then = found.training_state()
    load_engine(engine, found, collectives)
    now = checkpoints.adopt(found, _gone_back(state, then))
    recorder.go_back(saved["recorder"], now)
    recorder.events.write(
        "rollback",
        **where,
        type=alert["type"],
        message=alert["message"],
        to_step=then.global_step,
        to_data_step=then.data_step,
        number=now.rollbacks,
    )
    if collectives.rank == 0:
        skipped = f"data steps {then.data_step + 1} to {state.data_step} are not trained on again"
        number = f"{now.rollbacks} of at most {settings.max_rollbacks}"
        logger.warning(f"Rollback {number}: back to step {then.global_step}; {skipped}.")
    return now


def _gone_back(state: TrainingState, then: TrainingState) -> TrainingState:
    """The checkpoint's state, `then`, with the current data counters, those of `state`."""
    return dataclasses.replace(
        then,
        data_step=state.data_step,
        skipped_steps=state.data_step - then.global_step,
        epoch=state.epoch,
        encoder_tokens_seen=state.encoder_tokens_seen,
        target_tokens_seen=state.target_tokens_seen,
        rollbacks=state.rollbacks + 1,
        bad_rows=state.bad_rows,
    )
