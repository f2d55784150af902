"""What two real ranks ask of each other's hosts in a step and in a save: a thousand would pay for each of it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRuns, arguments

pytestmark = [pytest.mark.distributed]

SAVE = {"all_reduce": 7, "broadcast_object_list": 4, "gather": 2}  # at most, and nothing of another kind


@pytest.mark.parametrize(
    ("engine", "stage", "answer"),
    [("fsdp", "zero3", "warn"), ("deepspeed", "zero3", "skip_step"), ("fsdp", "zero0", "warn")],
)
def test_a_step_costs_two_sums_an_answered_alert_one_more_and_a_save_what_is_listed(
    runs: ForkedRuns, tmp_path: Path, engine: str, stage: str, answer: str
) -> None:
    changes: dict[str, Any] = {
        "training__num_train_steps": 8,
        "training__save_steps": 5,
        "training__logging_steps": 100,
    }
    changes |= {"training__async_save": "false", "monitor__on_loss_spike": answer}
    changes |= {"infra__sharding_stage": stage, "infra__replica_check_steps": 1}
    fault = {"kind": "count_collectives", "path": str(tmp_path)}
    runs.run(arguments(tmp_path / "run", engine, **changes), ranks=2, faults=[fault]).ended_with(0)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    a_step = {"all_reduce": 2 + (answer == "skip_step")}
    assert [first[str(step)] for step in (3, 4, 5, 7)] == [a_step] * 4
    replicas = Counter(all_reduce=stage == "zero0")  # compared before the save
    assert Counter(first["6"]) <= Counter(a_step) + Counter(SAVE) + replicas, first["6"]
