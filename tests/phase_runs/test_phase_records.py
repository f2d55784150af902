"""A repeated command passes over a phase, judges it again, or refuses what has changed. Nothing is trained."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from finished_runs import FALLING, QUICKSTART, finish_run

from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError, GateError, OutputLockedError
from ds_encdec.commands.phases.execute import PhaseFolder, only_one_pipeline, run_phases
from ds_encdec.commands.phases.plan import PlannedPhase, TrainingPhase, plan_phase
from ds_encdec.config.schema import FullConfig, load_config


def setup(tmp_path: Path, *overrides: str) -> tuple[FullConfig, PlannedPhase]:
    config = load_config(QUICKSTART, [f"infra.output_dir={tmp_path}", *overrides])
    return config, plan_phase(config, TrainingPhase.SANITY_CHECK, max_steps=40)


def records_of(planned: PlannedPhase) -> PhaseFolder:
    return PhaseFolder(planned.folder, planned.settings)


def began(planned: PlannedPhase, weights_sha256: str | None = None, *, saved_at: int | None) -> PhaseFolder:
    """A phase that was started, and stopped after it had saved, if it had."""
    records = records_of(planned)
    records.begin(planned.config, weights_sha256)
    if saved_at is not None:
        checkpoint = records.checkpoints / f"step-{saved_at:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    return records


def completed(tmp_path: Path, *, passed: bool) -> None:
    """A first phase that has run and was judged."""
    _, planned = setup(tmp_path)
    records = records_of(planned)
    records.begin(planned.config, None)
    finish_run(planned, FALLING)
    records.write_status("completed", exit_code=0)
    result = {"passed": passed, "pipeline_initial_loss": 8.3, "checkpoint_sha256": "0" * 64}
    records.write_result(result)
    if passed:
        records.export.mkdir(parents=True)


@pytest.mark.parametrize(
    "override", ["", "training.eval_samples=3", "infra.sharding_stage=zero2", "monitor.window_size=50"]
)
def test_a_phase_that_has_passed_is_passed_over(
    tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not decide what is learned may change."""
    completed(tmp_path, passed=True)
    config, planned = setup(tmp_path, *filter(None, [override]))
    run_phases(config, [planned], launcher="false")
    assert "phase sanity_check has passed its gate already" in capsys.readouterr().out


def test_a_changed_gate_is_applied_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]
) -> None:
    completed(tmp_path, passed=True)
    config, planned = setup(tmp_path, "phases.sanity_check.max_loss_after_warmup=0.1")
    with pytest.raises(GateError, match=r"loss after warm-up 8\.0600, at most 0\.1000 allowed"):
        run_phases(config, [planned], launcher="false")
    golden(capsys.readouterr().out)
    result = records_of(planned).read_result()
    assert (result["passed"], result["phase_config"]["max_loss_after_warmup"]) == (False, 0.1)
    assert {check["name"]: check["passed"] for check in result["checks"]}["loss_decrease"]
    assert result["started"] <= result["ended"]

    config, planned = setup(tmp_path)  # and passes again with the old one; its weights are there
    run_phases(config, [planned], launcher="false")
    assert records_of(planned).read_result()["passed"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate was 0.003 and is 0.0001"),
        ("data.max_encoder_length=128", "data.max_encoder_length was 256 and is 128"),
        ("model.architecture.hidden_size=64", "model.architecture was"),
        ("phases.sanity_check.num_train_steps=30", "training.num_train_steps was 40 and is 30"),
    ],
)
def test_changed_training_is_refused(tmp_path: Path, override: str, named: str) -> None:
    completed(tmp_path, passed=True)
    config, planned = setup(tmp_path, override)
    with pytest.raises(ConfigError) as caught:
        run_phases(config, [planned], launcher="false")
    assert named in str(caught.value)
    assert "delete (or rename) that folder" in str(caught.value)


@pytest.mark.parametrize("saved_at", [None, 10])
def test_a_phase_that_saved_nothing_may_be_mended(tmp_path: Path, saved_at: int | None) -> None:
    """A path of the data that was wrong, a batch that did not fit: there is nothing to lose yet."""
    began(setup(tmp_path)[1], saved_at=saved_at)
    config, planned = setup(tmp_path, "data.max_encoder_length=128")
    with pytest.raises(DsEncDecError) as caught:
        run_phases(config, [planned], launcher="false")
    assert ("has begun with other settings" in str(caught.value)) == (saved_at is not None)
    assert FullConfig.from_yaml(records_of(planned).phase_yaml).data.max_encoder_length == (256 if saved_at else 128)


def test_a_lower_learning_rate_in_the_middle_is_taken_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has diverged advises this."""
    began(setup(tmp_path)[1], saved_at=10)
    config, planned = setup(tmp_path, "training.learning_rate=1e-4")
    with pytest.raises(DsEncDecError, match="did not start"):
        run_phases(config, [planned], launcher="false")
    said = "phase sanity_check continues with another setting: training.learning_rate was 0.003 and is 0.0001"
    assert said in capsys.readouterr().out


def test_the_same_lanes_on_other_ranks(tmp_path: Path) -> None:
    began(setup(tmp_path, "data.num_lanes=null", "infra.num_gpus=4")[1], saved_at=10)
    fewer = ("infra.num_gpus=2", "training.gradient_accumulation_steps=4")
    _, planned = setup(tmp_path, "data.num_lanes=null", *fewer)
    with pytest.raises(ConfigError, match=r"On other ranks it continues with data\.num_lanes=32\."):
        records_of(planned).accepted_changes(planned.config, None)
    _, planned = setup(tmp_path, "data.num_lanes=32", *fewer)
    assert records_of(planned).accepted_changes(planned.config, None) == []


@pytest.mark.parametrize(
    ("passed", "override", "error", "problem"),
    [
        (None, (), ConfigError, "starts from the weights of sanity_check, but there is no result in"),
        (False, (), GateError, "sanity_check did not pass its gate"),
        (
            True,
            ("phases.sanity_check.min_loss_decrease=3.0",),
            ConfigError,
            r"phases\.sanity_check has other numbers now.*`--from sanity_check`",
        ),
    ],
)
def test_a_later_phase_needs_that_the_one_before_has_passed(
    tmp_path: Path, passed: bool | None, override: tuple[str, ...], error: type[DsEncDecError], problem: str
) -> None:
    if passed is not None:
        completed(tmp_path, passed=passed)
    config, _ = setup(tmp_path, *override)
    with pytest.raises(error, match=problem):
        run_phases(config, [plan_phase(config, TrainingPhase.VALIDATION)], launcher="false")


def test_a_later_phase_notices_that_the_one_before_was_trained_anew(tmp_path: Path) -> None:
    completed(tmp_path, passed=True)
    config, _ = setup(tmp_path)
    planned = plan_phase(config, TrainingPhase.VALIDATION)
    began(planned, "1" * 64, saved_at=10)
    with pytest.raises(ConfigError, match="the phase before it has been trained again since"):
        run_phases(config, [planned], launcher="false")


def test_a_moved_output_folder_is_no_change(tmp_path: Path) -> None:
    completed(tmp_path / "a", passed=True)
    config, _ = setup(tmp_path / "a")
    began(plan_phase(config, TrainingPhase.VALIDATION), "0" * 64, saved_at=10)
    shutil.move(tmp_path / "a", tmp_path / "b")
    config, _ = setup(tmp_path / "b")
    later = plan_phase(config, TrainingPhase.VALIDATION)
    assert records_of(later).accepted_changes(later.config, "0" * 64) == []


@pytest.mark.parametrize(("launcher", "code"), [(f"{sys.executable} /nowhere.py", 2), ("false", 1)])
def test_a_run_that_did_not_start_is_told(tmp_path: Path, launcher: str, code: int) -> None:
    """An older status does not speak for this start."""
    config, planned = setup(tmp_path)
    began(planned, saved_at=None).write_status("preempted", reason="stopped at step 3", exit_code=75)
    problem = rf"the run did not start \(the launcher's exit code is {code}\)"
    with pytest.raises(DsEncDecError, match=problem) as caught:
        run_phases(config, [planned], launcher=launcher)
    assert caught.value.exit_code == code


def test_the_code_of_the_run_is_the_pipelines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Launchers make 1 of every code; run.json has the run's own. What it prints is shown."""
    config, planned = setup(tmp_path)
    code = (
        "from ds_encdec.launch.run_folder import RunFolder;"
        "print('its own line');"
        f"RunFolder({str(planned.folder)!r}).write_status('failed', reason='diverged', exit_code=7);"
        "raise SystemExit(1)"
    )
    program = tmp_path / "launcher"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    with pytest.raises(DsEncDecError, match="phase sanity_check: diverged") as caught:
        run_phases(config, [planned], launcher=str(program))
    assert caught.value.exit_code == 7
    assert "\nits own line\n" in capfd.readouterr().out


def test_it_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    config, planned = setup(tmp_path)
    with pytest.raises(ConfigError, match="RANK is set, as for a rank"):
        run_phases(config, [planned])


def test_only_one_process_runs_the_phases_of_a_folder(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from ds_encdec.commands.phases.execute import only_one_pipeline\n"
        f"with only_one_pipeline(Path({str(tmp_path)!r})): pass"
    )
    with only_one_pipeline(tmp_path):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
        assert OutputLockedError.__name__ in other.stderr
    with only_one_pipeline(tmp_path):
        pass


@pytest.mark.parametrize("largest_file", [300, 1000])
def test_a_disk_that_is_full_leaves_the_records_as_they_were(tmp_path: Path, largest_file: int) -> None:
    """At 300 bytes result.json does not fit, at 1,000 phase.yaml."""
    if largest_file == 300:
        completed(tmp_path, passed=False)
        change = "phases.sanity_check.min_loss_decrease=0.2"
    else:
        began(setup(tmp_path)[1], saved_at=10)
        change = "training.eval_samples=3"
    config, planned = setup(tmp_path, change)
    before = {path: path.read_bytes() for path in planned.folder.glob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (planned.folder / "export" / "final").mkdir(parents=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="is the disk full"):
            run_phases(config, [planned], launcher="false")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in planned.folder.glob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("damage", "error", "problem"),
    [
        (lambda run: (run / "result.json").write_text("{"), ConfigError, r"result\.json: cannot be read"),
        (lambda run: shutil.rmtree(run / "checkpoints"), CheckpointError, "its final checkpoint cannot be read"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    tmp_path: Path, damage: Callable[[Path], object], error: type[DsEncDecError], problem: str
) -> None:
    completed(tmp_path, passed=error is ConfigError)
    config, planned = setup(tmp_path)
    damage(planned.folder)
    with pytest.raises(error, match=problem):
        run_phases(config, [planned], launcher="false")
    assert json.loads((planned.folder / "started.json").read_text())["weights_sha256"] is None
