"""Runs in which weights, moments or evaluations stop being finite: no such state is saved, and none completes a run."""

from pathlib import Path
from typing import Any

import forked_runs
import pytest
from forked_runs import ENGINES, ForkedRuns, status
from test_recovery import ledger, trained

from ds_encdec.checkpoint.folder import committed_steps, verify_checkpoints

pytestmark = [pytest.mark.distributed]

STEPS = 10
NAN, INFINITY = float("nan"), float("inf")
Trained = list[tuple[int, float, float, float]]


def arguments(folder: Path, engine: str, *options: str, **changes: Any) -> list[str]:
    settings = {
        "data__num_lanes": 4,
        "training__num_train_steps": STEPS,
        "training__save_steps": 3,
        "training__logging_steps": 1,
        "training__bf16": "false",
        "training__save_total_limit": 10,
        "training__max_consecutive_skipped_steps": 3,
        "training__export_at_end": "true",
    }
    return forked_runs.arguments(folder, engine, *options, **settings | changes)


def damage(tensor: str, after: int, value: float = NAN, on_rank: int = 1) -> list[dict[str, Any]]:
    return [{"kind": "damaged_state", "tensor": tensor, "value": value, "after": after, "on_rank": on_rank}]


def alerts(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in ledger(folder, "alert") if entry["type"] == kind]


def ended_without_a_model(folder: Path, steps: list[int]) -> None:
    """Only the checkpoints of `steps` are there, all whole, and nothing says that the run is complete."""
    assert sorted(saved.manifest.step for saved in verify_checkpoints(folder)) == steps
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert not [name for name in names if name == "final" or name.endswith(".tmp")]
    assert not list(folder.glob("export/*"))
    assert status(folder)["exit_code"] == 7
    assert f"`--resume auto` goes on from step {steps[-1]};" in status(folder)["reason"]


@pytest.fixture(scope="module")
def undisturbed(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.run(arguments(folder, "fsdp"), ranks=2).ended_with(0)
    return trained(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_moment_that_is_nan_is_never_saved_and_a_resume_goes_on_from_before_it(
    runs: ForkedRuns, undisturbed: Trained, tmp_path: Path, engine: str
) -> None:
    command = arguments(tmp_path, engine)
    result = runs.run(command, ranks=2, faults=damage("exp_avg", after=6)).ended_with(7)
    assert "3 steps in a row were skipped" in status(tmp_path)["reason"]
    assert sorted(committed_steps(tmp_path / "checkpoints")) == [3]
    (alert,) = alerts(tmp_path, "non_finite_state")
    damaged = next(line for line in result.output.splitlines() if line.startswith("rank 1: exp_avg of"))
    assert (alert["step"], alert["action"]) == (6, "skip_step")
    assert "rank 1 (" in alert["message"]
    assert alert["message"].endswith(damaged.removeprefix("rank 1: ").replace("is now", "is"))

    runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
    assert (tmp_path / "checkpoints" / "final").exists()
    last_of_each = {values[0]: values for values in trained(tmp_path)}
    for values, others in zip(last_of_each.values(), undisturbed, strict=True):
        assert values == pytest.approx(others, abs=1e-5)


def test_a_last_step_that_spoils_the_weights_ends_no_run(runs: ForkedRuns, tmp_path: Path) -> None:
    command = arguments(tmp_path, "deepspeed", training__save_steps=4)
    runs.run(command, ranks=2, faults=damage("exp_avg", after=9)).ended_with(7)
    ended_without_a_model(tmp_path, [4, 8])
    assert "non_finite_state: step 10: " in status(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("engine", "stage"),
    [("deepspeed", "zero0"), ("deepspeed", "zero1"), ("deepspeed", "zero2"), ("fsdp", "zero0")],
)
def test_an_infinite_second_moment_which_no_loss_shows_is_named(
    runs: ForkedRuns, tmp_path: Path, engine: str, stage: str
) -> None:
    changes = {"infra__sharding_stage": stage, "infra__offload_optimizer": "none", "infra__offload_params": "none"}
    command = arguments(tmp_path, engine, training__save_steps=4, **changes)
    result = runs.run(command, faults=damage("exp_avg_sq", 5, INFINITY, on_rank=0)).ended_with(7)
    assert len(trained(tmp_path)) == STEPS  # with finite losses
    ended_without_a_model(tmp_path, [4])
    named = next(line for line in result.output.splitlines() if line.startswith("rank 0: exp_avg_sq of"))
    assert named.removeprefix("rank 0: ").replace("is now", "is") in status(tmp_path)["reason"]


def test_a_rollback_takes_the_newest_checkpoint_and_the_run_is_one_without_that_data(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """At a save in the run's midst, written at once, and again at its last one."""
    rollback = {"monitor__on_non_finite": "rollback", "monitor__rollback_min_steps": 6, "training__save_steps": 3}
    met, never = (tmp_path / name for name in ("met", "never"))
    command = arguments(met, "fsdp", training__async_save="false", **rollback)
    # Data steps 4 to 6 are lost, so that step 10 follows data step 13.
    faults = damage("weight", after=6) + damage("exp_avg", 13, -INFINITY, on_rank=0)
    runs.run(command, ranks=2, faults=faults).ended_with(0)
    assert [(one["step"], one["to_step"]) for one in ledger(met, "rollback")] == [(6, 3), (10, 9)]
    runs.run(arguments(never, "fsdp"), ranks=2, faults=[{"kind": "skip_data", "steps": [4, 5, 6, 13]}]).ended_with(0)
    for values, others in zip(trained(met), trained(never), strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    assert sorted(saved.manifest.step for saved in verify_checkpoints(met)) == [3, 6, 9, 10]


EVALUATES = {"training__eval_samples": 5, "training__eval_steps": 5, "training__save_steps": 5}


def test_a_last_evaluation_that_is_not_finite_completes_no_run_and_the_last_step_is_saved(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """A resume evaluates again, and completes the run only if that is finite."""
    command, fault = arguments(tmp_path, "fsdp", **EVALUATES), {"kind": "nan_evaluation", "on_rank": 1, "last": 100}
    for options, first in (([], 10), (["--resume", "auto"], 0)):
        runs.run([*command, *options], ranks=2, faults=[fault | {"first": first}]).ended_with(7)
        ended_without_a_model(tmp_path, [5, 10])
        assert "non_finite_evaluation: step 10: eval/loss is nan" in status(tmp_path)["reason"]
    told = [(alert["step"], alert["action"]) for alert in alerts(tmp_path, "non_finite_evaluation")]
    assert told == [(10, "skip_step")] * 2
    runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
    assert (tmp_path / "checkpoints" / "final").resolve().name == "step-00000010"
    assert (tmp_path / "export" / "final").exists()


def test_an_earlier_end_of_the_run_does_not_complete_a_later_one(runs: ForkedRuns, tmp_path: Path) -> None:
    final, command = tmp_path / "checkpoints" / "final", arguments(tmp_path, "fsdp", **EVALUATES)
    runs.run(arguments(tmp_path, "fsdp", **EVALUATES | {"training__num_train_steps": 5}), ranks=2).ended_with(0)
    fault = {"kind": "nan_evaluation", "on_rank": 1, "last": 100}
    for first in (5, 0):  # steps that the start has read
        runs.run([*command, "--resume", "auto"], ranks=2, faults=[fault | {"first": first}]).ended_with(7)
        assert final.resolve().name == "step-00000005"
    runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
    assert final.resolve().name == "step-00000010"


def test_a_rollback_that_ends_behind_the_last_step_is_evaluated_too(runs: ForkedRuns, tmp_path: Path) -> None:
    often = EVALUATES | {"training__save_steps": 2}
    runs.run(arguments(tmp_path, "fsdp", **often), ranks=2, faults=[{"kind": "asked_to_stop", "at": 8}])
    changes = {"training__num_train_steps": 4, "monitor__on_non_finite": "rollback", "monitor__rollback_min_steps": 1}
    command = arguments(tmp_path, "fsdp", "--resume", "auto", **often | changes)
    fault = {"kind": "nan_evaluation", "on_rank": 1, "first": 0, "last": 0}  # until a step is trained
    runs.run(command, ranks=2, faults=[fault]).ended_with(0)
    assert [alert["step"] for alert in alerts(tmp_path, "non_finite_evaluation")] == [8, 6, 4]
    assert (tmp_path / "checkpoints" / "final").resolve().name == "step-00000004"


@pytest.mark.parametrize(("answer", "code"), [("skip_step", 75), ("stop", 7)])
def test_a_run_that_is_stopped_with_a_state_that_is_not_finite_is_to_be_started_again(
    runs: ForkedRuns, tmp_path: Path, answer: str, code: int
) -> None:
    command = arguments(tmp_path, "fsdp", monitor__on_non_finite=answer)
    faults = [*damage("exp_avg", after=5), {"kind": "asked_to_stop", "at": 5}]
    result = runs.run(command, ranks=2, faults=faults).ended_with(code)
    assert sorted(committed_steps(tmp_path / "checkpoints")) == [3]
    assert "state saved" not in result.output
    if code == 75:
        assert status(tmp_path)["state"] == "preempted"
        assert "its state is not finite, and not saved: --resume auto goes on from step 3" in status(tmp_path)["reason"]
        runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)


def test_a_run_without_a_checkpoint_is_told_to_begin_again(runs: ForkedRuns, tmp_path: Path) -> None:
    command = arguments(tmp_path, "fsdp", training__save_steps=100)
    runs.run(command, ranks=2, faults=damage("exp_avg", after=STEPS)).ended_with(7)
    assert "`--resume auto` goes on from step 0;" in status(tmp_path)["reason"]


def test_an_evaluation_that_is_not_finite_rolls_back(runs: ForkedRuns, tmp_path: Path) -> None:
    rollback = {"monitor__on_non_finite": "rollback", "monitor__rollback_min_steps": 1}
    fault = [{"kind": "nan_evaluation", "on_rank": 1, "first": 10, "last": 10}]
    runs.run(arguments(tmp_path, "deepspeed", **EVALUATES | rollback), ranks=2, faults=fault).ended_with(0)
    assert [(one["type"], one["to_step"]) for one in ledger(tmp_path, "rollback")] == [("non_finite_evaluation", 5)]
    assert (tmp_path / "checkpoints" / "final").exists()
