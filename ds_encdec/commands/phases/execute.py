"""Run the phases one after the other: train, judge, export the weights, and write records beside each run
(docs/phases.md lists the files)."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_encdec.base.quantities import count
from ds_encdec.base.terminal import print_text, verbosity
from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError, GateError, Preempted, TrainingState
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.commands.phases.plan import PhaseConfig, PlannedPhase, phase_before, phase_config, phase_folder
from ds_encdec.commands.phases.subprocess_run import TRAIN_PROGRAM, SubprocessRun, launcher_command
from ds_encdec.config.schema import FullConfig, Mark, load_saved, marked
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.launch.disk import write_atomically
from ds_encdec.launch.run_folder import RunFolder, take_folder
from ds_encdec.launch.world import LAUNCHERS
from ds_encdec.monitor.metrics_file import is_number, read_step_lines, strict_json


class PhaseFolder(RunFolder):
    """The folder of a phase's run, with the phase's records beside it. `settings` are the phase's current numbers."""

    def __init__(self, folder: Path, settings: PhaseConfig) -> None:
        super().__init__(str(folder))
        self.settings = settings
        self.export = folder / "export" / "final"
        self.phase_yaml = folder / "phase.yaml"
        self.started, self.result = folder / "started.json", folder / "result.json"

    @property
    def is_completed(self) -> bool:
        """Return whether its run is complete."""
        return self.read_status().get("state") == "completed"

    def begin(self, config: FullConfig, weights_sha256: str | None) -> None:
        """Record the start of training; `weights_sha256` is of the checkpoint that it starts from, if any."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.phase_yaml, config.dump_yaml())
        # The first start counts, and the latest weights.
        _write(self.started, {"started": _now()} | _read(self.started) | {"weights_sha256": weights_sha256})

    def accepted_changes(self, config: FullConfig, weights_sha256: str | None) -> list[str]:
        """Return sentences about the settings that have changed since this phase began: all may until something is
        saved, `Mark.TUNABLE` until the phase is complete. Raises ConfigError for others, and for other weights."""
        if not self.is_completed and not committed_steps(self.checkpoints):
            return []
        began, ignored = load_saved(self.phase_yaml), {*marked(Mark.UNTRAINED)}
        if phase_before(self.settings.phase) is not None:
            ignored.add("model.model_name_or_path")  # the previous phase's export, which moves with the output folder
        now = _trained_settings(config)
        changed = {
            name: f"{name} was {value!r} and is {now[name]!r}"
            for name, value in _trained_settings(began).items()
            if value != now[name] and name not in ignored
        }
        accepted = [] if self.is_completed else marked(Mark.TUNABLE)
        refused = [words for name, words in changed.items() if name not in accepted]
        if _read(self.started).get("weights_sha256") != weights_sha256:
            refused.append("the phase before it has been trained again since")
        if not refused:
            return list(changed.values())
        lanes = f"On other ranks it continues with data.num_lanes={began.data.num_lanes}. "
        raise ConfigError(
            f"phase {self.settings.phase} in {self.root} has begun with other settings: {'; '.join(refused)}. "
            f"{lanes if 'data.num_lanes' in changed else ''}Give the earlier values, or delete (or rename) that folder "
            "and those of the phases after it to train them again."
        )


def run_phases(config: FullConfig, plans: Sequence[PlannedPhase], *, launcher: str | None = None) -> None:
    """Run and judge each of `plans` (of `config`, in order), without repeating finished work. Raises GateError if one
    does not pass, Preempted after a signal, and an error with the exit code of a run that failed."""
    if stray := [row.marker for row in LAUNCHERS if row.has_started(os.environ)]:
        raise ConfigError(
            f"{', '.join(stray)} is set, as for a rank. `ds-encdec phases` is one plain process that starts the "
            "launcher itself (--launcher): unset it"
        )
    output = Path(config.infra.output_dir).expanduser().absolute()
    try:
        with take_folder(output / "phases", "infra.output_dir"), SubprocessRun() as subprocess_run:
            for planned in plans:
                if subprocess_run.signal_name is not None:
                    raise Preempted(f"stopped by {subprocess_run.signal_name} before phase {planned.phase}")
                _run_phase(config, planned, subprocess_run, launcher)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or output}: {error.strerror}. Nothing that was trained is lost: mend this (is the disk "
            "full?) and give the same command again"
        ) from error
    print_text(f"every phase of this command has passed: {', '.join(planned.phase for planned in plans)}")


def _run_phase(config: FullConfig, planned: PlannedPhase, subprocess_run: SubprocessRun, launcher: str | None) -> None:
    folder = PhaseFolder(planned.folder, planned.settings)
    before = _result_before(config, planned)
    weights_sha256 = before.get("checkpoint_sha256")
    changes = folder.accepted_changes(planned.config, weights_sha256)
    result = _read(folder.result)
    if result.get("passed") and result.get("phase_config") == asdict(planned.settings) and folder.export.exists():
        print_text(f"phase {planned.phase} has passed its gate already")
        return
    if folder.is_completed:
        print_text(f"phase {planned.phase} is trained already, and is judged again")
    else:
        for change in changes:
            print_text(f"phase {planned.phase} continues with another setting: {change}")
        if differences := planned.differences(config):
            print_text(differences)
        folder.begin(planned.config, weights_sha256)
        _train(planned, folder, subprocess_run, launcher)
    _judge_and_export(planned, folder, before.get("pipeline_initial_loss"))


def _result_before(config: FullConfig, planned: PlannedPhase) -> dict[str, Any]:
    if (before := phase_before(planned.phase)) is None:
        return {}
    settings = phase_config(config, before)
    folder = PhaseFolder(phase_folder(config, before), settings)
    result = _read(folder.result)
    if result and not result.get("passed"):
        raise GateError(
            f"phase {planned.phase} cannot start: {before} did not pass its gate ({folder.root / 'result.json'}). "
            f"`--from {before}` judges it again, by the limits that phases.{before} has now"
        )
    problems = (
        (not result, f"there is no result in {folder.root}"),
        (result.get("phase_config") != asdict(settings), f"phases.{before} has other numbers now than its gate had"),
        (not folder.export.exists(), f"{folder.export} is missing"),
    )
    if wrong := [problem for is_wrong, problem in problems if is_wrong]:
        raise ConfigError(
            f"phase {planned.phase} starts from the weights of {before}, but {wrong[0]}: add `--from {before}`, which "
            "repeats no finished training"
        )
    return result


def _train(planned: PlannedPhase, folder: PhaseFolder, subprocess_run: SubprocessRun, launcher: str | None) -> None:
    resume = ["--resume", "auto"] if folder.is_used() else []  # else its errors belong into run.json
    print_text(
        f"{'continuing' if resume else 'training'} phase {planned.phase} ({planned.settings.description}), "
        f"{planned.config.training.num_train_steps:,} steps, in {planned.folder}"
    )
    before = folder.read_status()
    program = [str(TRAIN_PROGRAM), "--config", str(folder.phase_yaml), *resume, *verbosity()]
    code = subprocess_run.run([*launcher_command(planned.config, launcher), *program])
    if folder.is_completed:
        return
    now = folder.read_status()
    status = {} if now == before else now
    if status.get("state") == "preempted" or (subprocess_run.signal_name is not None and not status.get("exit_code")):
        reason = (status.get("reason") or f"stopped by {subprocess_run.signal_name}").partition("; go on with")[0]
        raise Preempted(f"phase {planned.phase}: {reason}. The same command continues it.")
    reason = (
        f"the run {'was ended from outside' if status else 'did not start'} (the launcher's exit code is {code}); its "
        "output above ends with the cause"
    )
    error = DsEncDecError(f"phase {planned.phase}: {status['reason'] if status.get('state') == 'failed' else reason}")
    error.exit_code = status.get("exit_code") or max(code, 1)  # launchers replace the codes of their ranks by 1
    raise error


def _judge_and_export(planned: PlannedPhase, folder: PhaseFolder, pipeline_initial_loss: float | None) -> None:
    from ds_encdec.exports.hugging_face import export_checkpoint  # imports transformers

    verdict = judge(planned, pipeline_initial_loss)
    passed, summary = verdict["passed"], verdict["summary"]
    if passed and not folder.export.exists():
        export_checkpoint(planned.folder / "checkpoints" / "final", folder.export)
    times = {"started": _read(folder.started).get("started"), "ended": _now()}
    _write(folder.result, {"phase": planned.phase, **verdict, **times, "phase_config": asdict(planned.settings)})
    print_text(f"phase {planned.phase} {'passed its gate' if passed else 'did not pass its gate'}:")
    for check in verdict["checks"]:
        print_text(f"  {'✓' if check['passed'] else '✗'} {check['name']}: {check['message']}")
    losses = (summary["loss"]["initial"], summary["loss"]["current"], verdict["eval"].get("eval/loss"))
    first, last, held_out = (f"{loss:.4f}" if is_number(loss) else "none" for loss in losses)
    print_text(
        f"  {verdict['steps']:,} steps, {verdict['tokens_seen']:,} tokens; loss {first} at the first step of all "
        f"phases, {last} in the mean of the last ones, {held_out} held out; gradient norm "
        f"{summary['grad_norm']['mean'] or 0:.3f} in their mean; {count(summary['alerts'], 'alert')}"
    )
    if not passed:
        failed = "; ".join(check["message"] for check in verdict["checks"] if not check["passed"])
        raise GateError(
            f"phase {planned.phase} did not pass its gate: {failed}. No later phase was started. Change its limits "
            f"(phases.{planned.phase}) to have it judged again; to train it again, delete {planned.folder}."
        )


def judge(planned: PlannedPhase, pipeline_initial_loss: float | None) -> dict[str, Any]:
    """Compare the final checkpoint and the metrics of a completed run with its phase's limits; return the content of
    result.json (docs/phases.md). The decrease is measured from `pipeline_initial_loss`, the first phase's first loss;
    None if this is that phase. Raises CheckpointError if the final checkpoint cannot be read."""
    from ds_encdec.monitor.monitor import TrainingMonitor  # imports torch

    final = planned.folder / "checkpoints" / "final"
    monitor = TrainingMonitor(window_size=planned.config.monitor.window_size)
    try:
        saved = read_json(final / "trainer.json", None)
        state = TrainingState.from_dict(saved["state"])
        monitor.load_state_dict(saved["recorder"]["monitor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{final}: the phase is complete, but its final checkpoint cannot be read to judge it: {error}. "
            "Restore it, or delete the phase's folder to train it again."
        ) from error
    if pipeline_initial_loss is not None:
        monitor.initial_loss = pipeline_initial_loss
    metrics_check, evaluation = _look_at_metrics(planned.folder / "metrics.jsonl")
    checks = [*monitor.validate_phase(planned.settings)["checks"], metrics_check]
    return {
        "passed": all(check["passed"] for check in checks),
        "checks": checks,
        "summary": strict_json(monitor.get_summary()),
        "eval": evaluation,
        "pipeline_initial_loss": monitor.initial_loss,
        "steps": state.global_step,
        "tokens_seen": state.total_tokens_seen,
        "checkpoint_sha256": hashlib.sha256((final / "manifest.json").read_bytes()).hexdigest(),
    }


def _look_at_metrics(path: Path) -> tuple[dict[str, Any], dict[str, float | None]]:
    lines, problem, _ = read_step_lines(path)
    losses = [(name, line) for line in lines for name in ("train/loss", "eval/loss") if name in line]
    bad = [f"{name} is not finite at step {line['step']}" for name, line in losses if not is_number(line[name])]
    evaluations = [line for name, line in losses if name == "eval/loss"]
    logged = len(losses) - len(evaluations)
    if bad:
        problem = problem or f"{bad[0]} ({len(bad)} such values)"
    elif not logged:
        problem = problem or f"{path}: no line has train/loss"
    message = problem or f"{count(logged, 'logged loss')} and {count(evaluations, 'evaluation')}, all finite"
    return (
        {"name": "logged_losses", "passed": not problem, "message": message},
        {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval/")},
    )


def _trained_settings(config: FullConfig) -> dict[str, Any]:
    values = {section: getattr(config, section).model_dump() for section in ("model", "data", "training")}
    return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        if isinstance(content := json.loads(path.read_text()), dict):
            return content
        raise ValueError("it holds no mapping")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); restore it, or delete it") from error
