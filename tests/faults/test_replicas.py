"""Ranks that no longer hold what they must hold alike, on real ranks: noticed, named, never saved, healed."""

from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRuns, status
from test_recovery import arguments, ledger, trained

from ds_encdec.checkpoint.folder import committed_steps

pytestmark = [pytest.mark.distributed]

DDP = {"infra__sharding_stage": "zero0", "infra__offload_optimizer": "none"}
SHORT = {"training__num_train_steps": 9, "training__save_steps": 4, "data__num_lanes": 6}


def damage(tensor: str = "weight", *, after: int = 5, **more: Any) -> dict[str, Any]:
    """Rank 1 has another weight, by 0.5, behind its step `after`."""
    return {"kind": "damaged_state", "tensor": tensor, "value": 0.5, "adds": True, "after": after, "on_rank": 1} | more


def differences(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in ledger(folder, "alert") if entry["type"] == "replicas_differ"]


@pytest.mark.parametrize(
    ("engine", "stage", "tensor", "ranks"),
    [
        ("fsdp", "zero0", "weight", 3),
        ("fsdp", "zero0", "exp_avg_sq", 2),
        ("deepspeed", "zero0", "weight", 2),
        ("deepspeed", "zero0", "computing", 2),
        ("deepspeed", "zero1", "computing", 2),
        ("deepspeed", "zero2", "computing", 2),
    ],
)
def test_a_rank_that_differs_is_named_and_the_run_ends(
    runs: ForkedRuns, tmp_path: Path, engine: str, stage: str, tensor: str, ranks: int
) -> None:
    """At the next comparison, though no later step shows it: under ZeRO 1 and 2 the next one makes the weights anew."""
    settings = SHORT | DDP | {"infra__sharding_stage": stage, "infra__replica_check_steps": 5}
    faults = [{"kind": "own_machine"}, damage(tensor)]
    ended = runs.run(arguments(tmp_path, engine, **settings), ranks=ranks, faults=faults).ended_with(11)
    who = "rank 1 (machine 1) differs from the others" if ranks > 2 else "ranks 0 (machine 0), 1 (machine 1) differ"
    assert f"replicas_differ: step 5: {who} in weights or optimizer states" in ended.output
    assert "at step 4 all were equal (monitor.on_replicas_differ=stop). Checkpoints are untouched" in ended.output
    assert [*committed_steps(tmp_path / "checkpoints")] == [4]
    assert (status(tmp_path)["exit_code"], status(tmp_path)["state"]) == (11, "failed")
    (alert,) = differences(tmp_path)
    assert (alert["type"], alert["step"], alert["action"]) == ("replicas_differ", 5, "stop")
    assert alert["value"] == (1 if ranks > 2 else 2)


def test_a_difference_is_not_saved(runs: ForkedRuns, tmp_path: Path) -> None:
    """Where only saves compare, and the last step is the one that differs."""
    settings = SHORT | DDP | {"infra__replica_check_steps": 0}
    ended = runs.run(arguments(tmp_path, "fsdp", **settings), ranks=2, faults=[damage(after=9)]).ended_with(11)
    assert "at step 8 all were equal" in ended.output
    assert sorted(committed_steps(tmp_path / "checkpoints")) == [4, 8]
    assert not (tmp_path / "checkpoints" / "final").exists()


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("after", [5, 8])
def test_a_rollback_makes_ranks_equal_again(runs: ForkedRuns, tmp_path: Path, engine: str, after: int) -> None:
    """Noticed by the comparison in the step behind it, or by the save: the run is one that never saw the data since."""
    settings = SHORT | DDP | {"monitor__on_replicas_differ": "rollback", "infra__replica_check_steps": 5}
    met, never = tmp_path / "met", tmp_path / "never"
    ended = runs.run(arguments(met, engine, **settings), ranks=2, faults=[damage(after=after)]).ended_with(0)
    skipped = [5, 6] if after == 5 else [5, 6, 7, 8]
    assert f"back to step 4; data steps 5 to {skipped[-1]} are not trained on again" in ended.output
    runs.run(arguments(never, engine, **SHORT, **DDP), ranks=2, faults=[{"kind": "skip_data", "steps": skipped}])
    assert trained(met) == trained(never)
    assert [one["to_step"] for one in ledger(met, "rollback")] == [4]


def test_what_no_checkpoint_holds_is_not_healed_by_a_rollback(runs: ForkedRuns, tmp_path: Path) -> None:
    settings = SHORT | DDP | {"infra__sharding_stage": "zero1", "model__lora": "{r: 2}"}
    settings |= {"monitor__on_replicas_differ": "rollback", "infra__replica_check_steps": 5}
    fault = damage("computing", parameter="q_proj.base_layer")
    ended = runs.run(arguments(tmp_path, "deepspeed", **settings), ranks=2, faults=[fault]).ended_with(11)
    assert "still after the rollback to step 4" in ended.output


def test_a_resume_on_more_ranks_raises_no_alert(runs: ForkedRuns, tmp_path: Path) -> None:
    command = arguments(tmp_path, "fsdp", **SHORT | DDP | {"infra__replica_check_steps": 1})
    runs.run([*command, "training.num_train_steps=4"], ranks=2).ended_with(0)
    runs.run([*command, "--resume", "auto"], ranks=3).ended_with(0)
    assert not differences(tmp_path)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("bf16", ["true", "false"])
def test_replicas_clip_by_one_norm_however_each_adds_up_its_own(
    runs: ForkedRuns, tmp_path: Path, engine: str, bf16: str
) -> None:
    settings = SHORT | DDP | {"infra__replica_check_steps": 1, "training__max_grad_norm": 0.01, "training__bf16": bf16}
    runs.run(arguments(tmp_path, engine, **settings), ranks=2, faults=[{"kind": "other_order", "on_rank": 1}])
    assert not differences(tmp_path)
    assert status(tmp_path)["state"] == "completed"
