"""A repeated command passes over a phase, judges it again, or refuses what has changed. Nothing is trained."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from finished_runs import FALLING, QUICKSTART, finish_run

from ds_encdec.base.types import ConfigError, DsEncDecError, GateError, OutputLockedError
from ds_encdec.commands.phases.execute import PhaseFolder, run_phases
from ds_encdec.commands.phases.plan import PlannedPhase, TrainingPhase, plan_phase
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.launch.run_folder import take_folder

IMPASSABLE = "phases.sanity_check.max_loss_after_warmup=0.1"
SHA256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of the manifest that `finish_run` writes


def first_phase(tmp_path: Path, *overrides: str) -> tuple[FullConfig, PlannedPhase]:
    config = load_config(QUICKSTART, [f"infra.output_dir={tmp_path}", *overrides])
    return config, plan_phase(config, TrainingPhase.SANITY_CHECK, max_steps=40)


def later_phase(tmp_path: Path, *overrides: str) -> tuple[FullConfig, PlannedPhase]:
    config, _ = first_phase(tmp_path, *overrides)
    return config, plan_phase(config, TrainingPhase.VALIDATION)


def run(config: FullConfig, planned: PlannedPhase, launcher: str = "false") -> None:
    run_phases(config, [planned], launcher=launcher)


def records_of(planned: PlannedPhase) -> PhaseFolder:
    return PhaseFolder(planned.folder, planned.settings)


def began(planned: PlannedPhase, weights_sha256: str | None = None, *, saved_at: int | None) -> PhaseFolder:
    records = records_of(planned)
    records.begin(planned.config, weights_sha256)
    if saved_at is not None:
        checkpoint = records.checkpoints / f"step-{saved_at:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    return records


def completed(tmp_path: Path, *overrides: str) -> tuple[FullConfig, PlannedPhase]:
    """A first phase that has run, was judged and exported; a gate that nobody passes (`IMPASSABLE`) fails it."""
    config, planned = first_phase(tmp_path, *overrides)
    records = began(planned, saved_at=None)
    finish_run(planned, FALLING)
    records.write_status("completed", exit_code=0)
    records.export.mkdir(parents=True)
    if IMPASSABLE in overrides:
        with pytest.raises(GateError):
            run(config, planned)
    else:
        run(config, planned)
    return config, planned


@pytest.mark.parametrize(
    ("before", "now"),
    [
        # Settings that do not decide what is learned may change.
        ("passed", "training.eval_samples=3 infra.sharding_stage=zero2 monitor.window_size=50"),
        ("passed", "training.learning_rate=1e-4"),
        ("passed", "phases.sanity_check.num_train_steps=30"),
        ("begun", "data.max_encoder_length=128"),  # a wrong path, or a batch that did not fit: nothing is lost yet
        ("saved", "data.max_encoder_length=128"),
        ("saved", "training.learning_rate=1e-4"),  # a run that has diverged advises this
    ],
)
def test_a_changed_setting_is_taken_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None], before: str, now: str
) -> None:
    if before == "passed":
        completed(tmp_path)
    else:
        began(first_phase(tmp_path)[1], saved_at=10 if before == "saved" else None)
    capsys.readouterr()
    config, planned = first_phase(tmp_path, *now.split())
    golden(outcome(lambda: run(config, planned), capsys))
    kept = FullConfig.from_yaml(records_of(planned).phase_yaml).data.max_encoder_length
    assert kept == (128 if before == "begun" else 256)


def outcome(action: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    error = ""
    try:
        action()
    except DsEncDecError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return f"{capsys.readouterr().out}{error}"


@pytest.mark.parametrize("before", ["nothing", "failed", "passed with other numbers", "trained again"])
def test_a_later_phase_needs_that_the_one_before_has_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None], before: str
) -> None:
    if before != "nothing":
        completed(tmp_path, *[IMPASSABLE] * (before == "failed"))
    now = ["phases.sanity_check.min_loss_decrease=3.0"] * (before == "passed with other numbers")
    config, planned = later_phase(tmp_path, *now)
    if before == "trained again":
        began(planned, "1" * 64, saved_at=10)
    capsys.readouterr()
    golden(outcome(lambda: run(config, planned), capsys))


def test_a_changed_gate_is_applied_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[object], None]
) -> None:
    completed(tmp_path)
    capsys.readouterr()
    config, planned = first_phase(tmp_path, IMPASSABLE)
    with pytest.raises(GateError, match=r"the loss was 8\.0600 after the warm-up; at most 0\.1000 is"):
        run(config, planned)
    golden(capsys.readouterr().out)
    result = json.loads(records_of(planned).result.read_text())
    assert (result["passed"], result["phase_config"]["max_loss_after_warmup"]) == (False, 0.1)
    assert {check["name"]: check["passed"] for check in result["checks"]}["loss_decrease"]
    assert result["checkpoint_sha256"] == SHA256
    assert result["started"] <= result["ended"]

    config, planned = first_phase(tmp_path)  # and passes again with the old one; its weights are there
    run(config, planned)
    assert json.loads(records_of(planned).result.read_text())["passed"]


def test_a_moved_output_folder_is_no_change(tmp_path: Path) -> None:
    completed(tmp_path / "a")
    began(later_phase(tmp_path / "a")[1], SHA256, saved_at=10)
    shutil.move(tmp_path / "a", tmp_path / "b")
    _, later = later_phase(tmp_path / "b")
    assert records_of(later).accepted_changes(later.config, SHA256) == []


@pytest.mark.parametrize(("launcher", "code"), [(f"{sys.executable} /nowhere.py", 2), ("false", 1)])
def test_a_run_that_did_not_start_is_reported(tmp_path: Path, launcher: str, code: int) -> None:
    config, planned = first_phase(tmp_path)
    began(planned, saved_at=None).write_status("preempted", reason="stopped at step 3", exit_code=75)
    problem = rf"the run did not start \(the launcher's exit code is {code}\)"
    with pytest.raises(DsEncDecError, match=problem) as caught:
        run(config, planned, launcher)
    assert caught.value.exit_code == code


def test_the_code_of_the_run_is_the_pipelines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, planned = first_phase(tmp_path)
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
        run(config, planned, str(program))
    assert caught.value.exit_code == 7
    assert "\nits own line\n" in capfd.readouterr().out


def test_it_is_no_rank_and_alone_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, planned = first_phase(tmp_path)
    with take_folder(tmp_path / "phases", ""), pytest.raises(OutputLockedError):
        run(config, planned)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="RANK is set, as for a rank"):
        run(config, planned)
