"""The phases, one after the other: train, judge, hand the weights on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.launch.world import LAUNCHERS
from ds_encdec.phase_runs.records import PhaseRecords, only_one_pipeline
from ds_encdec.phase_runs.subprocess_run import TRAIN_PROGRAM, SubprocessRun, launcher_command
from ds_encdec.phases import (
    PlannedPhase,
    TrainingPhase,
    phase_before,
    phase_config,
    phase_folder,
)
from ds_encdec.types import CheckpointError, ConfigError, DsEncDecError, GateError, Preempted

_say = partial(print, flush=True)  # at once: the runs write to the screen, too


def run_phases(config: FullConfig, plans: Sequence[PlannedPhase], *, launcher: str | None = None) -> None:
    """Bring each of `plans` (of `config`, in order) through its gate: start it, go on with it, or pass over it.

    Raises GateError where one does not pass, Preempted after a signal, and an error with the exit code of a run that
    failed. Of what was done nothing is done again by the next call.
    """
    if stray := [launcher.marker for launcher in LAUNCHERS if launcher.marker in os.environ]:
        raise ConfigError(
            f"{', '.join(stray)} is set, as for a rank. `ds-encdec phases` is one plain process that starts the "
            "launcher itself (--launcher): unset it"
        )
    output = Path(config.infra.output_dir).expanduser().absolute()
    try:
        with only_one_pipeline(output), SubprocessRun() as subprocess_run:
            for planned in plans:
                if subprocess_run.signal_name is not None:
                    raise Preempted(f"stopped by {subprocess_run.signal_name} before phase {planned.phase}")
                _run_phase(config, planned, subprocess_run, launcher)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or output}: {error.strerror}. Nothing that was trained is lost: mend this (is the disk "
            "full?) and give the same command again"
        ) from error
    _say(f"every phase asked for has passed: {', '.join(planned.phase for planned in plans)}")


def _run_phase(config: FullConfig, planned: PlannedPhase, subprocess_run: SubprocessRun, launcher: str | None) -> None:
    """Train, judge, hand on: as much of it as has not been done yet."""
    records = PhaseRecords(planned.folder, planned.settings)
    before = _result_before(config, planned.phase)
    weights_sha256 = before.get("checkpoint_sha256")
    changes = records.accepted_changes(planned.config, weights_sha256)
    if records.read_result().get("passed") and records.is_judged_as_now() and records.export.exists():
        _say(f"phase {planned.phase} has passed its gate already: passed over")
        return
    if records.is_completed:
        _say(f"phase {planned.phase} is trained already: judged again")
    else:
        for change in changes:
            _say(f"phase {planned.phase} goes on with another setting: {change}")
        records.begin(planned.config, weights_sha256, changes)
        _train(planned, records, subprocess_run, launcher)
    _judge_and_hand_on(planned, records, before.get("pipeline_initial_loss"))


def _result_before(config: FullConfig, phase: TrainingPhase) -> dict[str, Any]:
    """The result of the phase before; {} for the first.

    Raises ConfigError if it has no result, or one judged by other limits, and GateError where it did not pass: its
    weights are not handed on.
    """
    before = phase_before(phase)
    if before is None:
        return {}
    records = PhaseRecords(phase_folder(config, before), phase_config(config, before))
    result = records.read_result()
    if not result:
        raise ConfigError(
            f"phase {phase} starts from the weights of {before}, which has no result in {records.run.root}: "
            f"run it first (`--from {before}`), or name the infra.output_dir that has it"
        )
    if not result.get("passed"):
        raise GateError(
            f"phase {phase} is not started: {before} did not pass its gate ({records.run.root / 'result.json'}). "
            f"`--from {before}` judges it again, by the limits that phases.{before} has now"
        )
    if not records.is_judged_as_now():
        raise ConfigError(
            f"phase {phase} is not started: {before} has passed its gate, but phases.{before} has other numbers now. "
            f"`--from {before}` judges it again, without training"
        )
    if not records.export.exists():
        raise ConfigError(
            f"phase {phase} starts from {records.export}, which is not there: `--from {before}` writes it again "
            "from the final checkpoint"
        )
    return result


def _train(planned: PlannedPhase, records: PhaseRecords, subprocess_run: SubprocessRun, launcher: str | None) -> None:
    """Run the program to the end of the phase. Raises what the run ended with."""
    for remark in planned.remarks:
        _say(f"phase {planned.phase}: {remark}")
    resume = ["--resume", "auto"] if records.run.is_used() else []  # else its errors belong into run.json
    going = "going on with" if resume else "training"
    what = f"phase {planned.phase} ({planned.settings.description}), {planned.num_steps:,} steps"
    _say(f"{going} {what}, in {planned.folder}")
    status_before = _stamp(records.run)
    command = [*launcher_command(planned.config, launcher), str(TRAIN_PROGRAM), "--config", str(records.phase_yaml)]
    code = subprocess_run.run([*command, *resume])
    if records.is_completed:
        return
    status = records.run.read_status() if _stamp(records.run) != status_before else {}
    if status.get("state") == "preempted" or (subprocess_run.signal_name is not None and not status.get("exit_code")):
        reason = status.get("reason") or f"stopped by {subprocess_run.signal_name}"
        raise Preempted(f"phase {planned.phase}: {reason}. The same command goes on with it.")
    error = DsEncDecError(f"phase {planned.phase}: {_failure(status, code)}")
    error.exit_code = status.get("exit_code") or max(code, 1)
    raise error


def _failure(status: dict[str, Any], launcher_code: int) -> str:
    """Why a run failed, in words. Launchers make 1 of the codes of their ranks, so run.json is asked first."""
    if status.get("state") == "failed":
        return status["reason"]
    what = "was ended from outside" if status else "did not start"
    return f"the run {what} (the launcher's exit code is {launcher_code}); its output above may say why"


def _stamp(run: RunFolder) -> int | None:
    """Changes when the run writes its status: an older one says nothing about this start."""
    return run.run_json.stat().st_mtime_ns if run.run_json.exists() else None


def _judge_and_hand_on(planned: PlannedPhase, records: PhaseRecords, pipeline_initial_loss: float | None) -> None:
    """Write the phase's result, and before it, if the gate is passed, its weights. Raises GateError if it is not."""
    import torch

    from ds_encdec.checkpoint.export import export_checkpoint  # transformers
    from ds_encdec.phase_runs.gate import judge

    verdict = judge(planned, pipeline_initial_loss)
    if verdict.passed and not records.export.exists():
        export_checkpoint(
            planned.folder / "checkpoints" / "final",
            records.export,
            dtype=torch.float32,
        )
    records.write_result(verdict.to_dict())
    _say(f"phase {planned.phase} {'passed its gate' if verdict.passed else 'did not pass its gate'}:")
    for check in verdict.checks:
        _say(f"  {'✓' if check['passed'] else '✗'} {check['name']}: {check['message']}")
    if not verdict.passed:
        failed = "; ".join(check["message"] for check in verdict.checks if not check["passed"])
        raise GateError(
            f"phase {planned.phase} did not pass its gate: {failed}. No later phase was started. Limits that are "
            f"changed (phases.{planned.phase}) are applied to it without training again; to train it again, delete "
            f"{planned.folder}."
        )
