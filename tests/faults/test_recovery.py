"""Runs that meet trouble on two real ranks: steps that are left out, rollbacks, a slow rank, an early end."""

import json
import signal
from pathlib import Path
from typing import Any

import forked_runs
import pytest
from forked_runs import ENGINES, QUIET, ForkedRuns, status
from tiny_run import REPOSITORY, metrics, overrides

from ds_encdec.checkpoint.folder import committed_steps, verify_checkpoints
from ds_encdec.config.schema import load_saved
from ds_encdec.monitor.token_digests import read_digests

pytestmark = [pytest.mark.distributed]

STEPS = 16
# A loss has not far to fall in so few steps: nor has it far to jump.
SPIKES = {"monitor__window_size": 4, "monitor__loss_spike_min_values": 4, "monitor__loss_spike_threshold": 1.02}
ROLLBACK = SPIKES | {"monitor__on_loss_spike": "rollback", "monitor__rollback_min_steps": 2}


def arguments(folder: Path, engine: str, *options: str, **changes: Any) -> list[str]:
    settings = {
        "data__num_lanes": 4,  # two micro-batches a step on each of two ranks
        "training__num_train_steps": STEPS,
        "training__save_steps": 4,
        "training__logging_steps": 1,
        "training__save_total_limit": 10,
    }
    return forked_runs.arguments(folder, engine, *options, **settings | changes)


def trained(folder: Path) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and rate of every step that was applied and counts, in their order."""
    names = ("step", "train/loss", "train/grad_norm", "train/learning_rate")
    return [tuple(line[name] for name in names) for line in metrics(folder) if "train/loss" in line]


def ledger(folder: Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def test_steps_that_are_left_out_and_evaluations_leave_no_trace(runs: ForkedRuns, tmp_path: Path) -> None:
    """Losses of one rank that are not finite, exploding gradients, a spike: all skipped, to the bit, on both ranks."""
    engine = "deepspeed"
    once = {"training__save_steps": STEPS}  # at the end
    skips = SPIKES | {"monitor__on_loss_spike": "skip_step", "monitor__on_grad_explosion": "skip_step"} | once
    skips["training__max_consecutive_skipped_steps"] = 2  # no two of the four steps follow each other
    faults = [
        {"kind": "nan_loss", "at": 6, "on_rank": 1},
        {"kind": "infinite_loss", "at": 8, "on_rank": 1},
        {"kind": "gradient_spike", "at": 10, "factor": 1000.0},
        {"kind": "bad_data", "at": 17, "until": 17},
    ]
    generates = {
        "training__eval_samples": 5,
        "training__eval_steps": 5,
        "training__eval_generate_samples": 3,
        "training__generation_max_new_tokens": 5,
    }
    runs.run(arguments(tmp_path / "met", engine, **skips, **generates), ranks=2, faults=faults).ended_with(0)
    never = [{"kind": "skip_data", "steps": [6, 8, 10, 17]}]
    runs.run(arguments(tmp_path / "never", engine, **once), ranks=2, faults=never).ended_with(0)

    # The line after a skipped step has its count, and the rate and norm of its own step.
    assert trained(tmp_path / "met") == trained(tmp_path / "never")
    assert [line["data_step"] for line in metrics(tmp_path / "met")][-1] == STEPS + 4
    figures = [(line["step"], line["eval/chrf"] >= 0) for line in metrics(tmp_path / "met") if "eval/loss" in line]
    assert figures == [(step, True) for step in (5, 10, 15, 16)]
    alerts = [entry for entry in ledger(tmp_path / "met", "alert") if entry["action"] == "skip_step"]
    types = {6: "non_finite", 8: "non_finite", 10: "grad_explosion", 17: "loss_spike"}
    assert [(entry["data_step"], entry["type"]) for entry in alerts] == [*types.items()]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_with_an_infinite_loss_is_skipped_by_the_engine_itself(
    runs: ForkedRuns, tmp_path: Path, engine: str
) -> None:
    """Its gradients are finite, and no alert is answered with `skip_step`: nobody else would leave it out."""
    short = {"training__num_train_steps": 4, "training__warmup_steps": 1}
    infinite = [{"kind": "infinite_loss", "at": 3, "on_rank": 1}]
    runs.run(arguments(tmp_path, engine, **short), ranks=2, faults=infinite).ended_with(0)
    state = json.loads((tmp_path / "checkpoints" / "final" / "trainer.json").read_text())["state"]
    assert (state["global_step"], state["data_step"], state["skipped_steps"]) == (4, 5, 1)


@pytest.fixture(scope="module")
def never_seen(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float, float]]:
    """What is trained where data steps 13 to 15 do not exist; float32, in which all engines agree."""
    folder = tmp_path_factory.mktemp("never") / "run"
    never = [{"kind": "skip_data", "steps": [13, 14, 15]}]
    runs.run(arguments(folder, "fsdp", training__bf16="false"), ranks=2, faults=never).ended_with(0)
    return trained(folder)


def test_after_a_rollback_the_run_is_one_that_never_saw_that_data(
    runs: ForkedRuns, never_seen: list[tuple[int, float, float, float]], tmp_path: Path
) -> None:
    bad = [{"kind": "bad_data", "at": 15, "until": 15}]
    settings = ROLLBACK | {"training__bf16": "false", "infra__offload_optimizer": "cpu"}
    result = runs.run(arguments(tmp_path, "deepspeed", **settings), ranks=2, faults=bad).ended_with(0)
    assert "Rollback 1 of at most 5: back to step 12; data steps 13 to 15 are not trained on again." in result.output

    assert [step for step, *_ in trained(tmp_path)] == list(range(1, STEPS + 1))
    for values, others in zip(trained(tmp_path), never_seen, strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    abandoned = (tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()
    taken_back = [(json.loads(line)["step"], json.loads(line)["rollback"]) for line in abandoned]
    assert taken_back == [(13, 1), (14, 1), (15, 1)]
    (entry,) = ledger(tmp_path, "rollback")
    assert (entry["step"], entry["to_step"], entry["to_data_step"], entry["number"]) == (15, 12, 12, 1)
    assert sorted(saved.manifest.step for saved in verify_checkpoints(tmp_path)) == [4, 8, 12, 16]
    state = json.loads((tmp_path / "checkpoints" / "final" / "trainer.json").read_text())["state"]
    assert (state["global_step"], state["data_step"], state["skipped_steps"], state["rollbacks"]) == (16, 19, 3, 1)


def test_a_run_killed_behind_its_rollback_does_not_meet_that_data_again(
    runs: ForkedRuns, never_seen: list[tuple[int, float, float, float]], tmp_path: Path
) -> None:
    """In the step after it, where saves take long. With worker processes, which are ahead of the run."""
    faults: list[dict[str, Any]] = [{"kind": "bad_data", "at": 15, "until": 15}, {"kind": "slow_saves", "seconds": 0.5}]
    faults += [{"kind": "killed_rank", "at": 16, "on_rank": rank} for rank in (0, 1)]
    settings = ROLLBACK | {"training__bf16": "false", "data__preprocessing_num_workers": 1}
    command = arguments(tmp_path, "fsdp", **settings)
    runs.run(command, ranks=2, faults=faults).ended_with(-signal.SIGKILL)
    assert sorted(committed_steps(tmp_path / "checkpoints"))[-1] == 12
    runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
    assert len(ledger(tmp_path, "rollback")) == 1
    data_steps = read_digests(ledger(tmp_path, "start") + ledger(tmp_path, "tokens"))
    assert sorted(data_steps) == [*range(1, STEPS + 4)]  # three of them were taken back
    for values, others in zip(trained(tmp_path), never_seen, strict=True):
        assert values == pytest.approx(others, abs=1e-5)


def test_a_run_that_goes_on_spiking_stops_once_its_rollbacks_are_used_up(runs: ForkedRuns, tmp_path: Path) -> None:
    bad = [{"kind": "bad_data", "at": 17, "until": 1000}]
    settings = ROLLBACK | {"monitor__max_rollbacks": 2, "training__num_train_steps": 20}
    result = runs.run(arguments(tmp_path, "fsdp", **settings), ranks=2, faults=bad).ended_with(7)
    assert "All monitor.max_rollbacks=2 rollbacks are used" in result.output
    # The second spike comes a step after the first rollback's checkpoint, so it goes further back.
    assert [entry["to_step"] for entry in ledger(tmp_path, "rollback")] == [12, 8]
    assert status(tmp_path)["exit_code"] == 7


def test_a_slow_rank_is_named_and_can_end_the_run_to_go_on_elsewhere(runs: ForkedRuns, tmp_path: Path) -> None:
    slow = [{"kind": "slow_data", "on_rank": 1, "seconds": 0.4}]
    # On a busy machine any rank may be slow at arithmetic.
    settings = {"monitor__on_straggler": "stop", "monitor__straggler_threshold": 1000.0}
    command = arguments(tmp_path, "fsdp", training__logging_steps=2, **settings)
    runs.run(command, ranks=2, faults=slow).ended_with(75)
    stragglers = [entry for entry in ledger(tmp_path, "alert") if entry["type"] == "straggler"]
    assert "rank 1 is late" in stragglers[-1]["message"]
    assert "rank 1 is late" in status(tmp_path)["reason"]
    runs.run([*command, "--resume", "auto"], ranks=2).ended_with(0)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(2, STEPS + 1, 2))


TUNED = {
    "training__eval_samples": 8,
    "data__dataset_name": "json",
    "data__max_decoder_length": 32,
    "data__on_bad_row": "skip",
    "training__num_train_steps": "null",
    "training__num_train_epochs": 2,
    "training__save_steps": 4,
    "training__async_save": "false",  # or step 4 may not be there when the rank is killed at 7
    "training__eval_generate_samples": 0,
    "training__metric_for_best_model": "loss",
    "training__logging_steps": 1,
    "training__bf16": "false",
    "infra__sharding_stage": "zero3",
}


def test_a_killed_fine_tuning_goes_on_alike_on_another_number_of_ranks(runs: ForkedRuns, tmp_path: Path) -> None:
    rows = [{"instruction": f"add {i}", "input": i, "output": f"{i} and {i + 1}"} for i in range(80)]
    rows[7] = {**rows[7], "output": None}
    rows[8] = {**rows[8], "output": "long " * 40}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = str(REPOSITORY / "ds_configs" / "quickstart_sft.yaml")
    settings = QUIET | TUNED | ENGINES["fsdp"] | {"data__data_files": tmp_path / "rows.jsonl"}
    whole, command = (["--config", config, *overrides(tmp_path / name, **settings)] for name in ("whole", "cut"))
    finished = runs.run(whole, ranks=2).ended_with(0)
    killed = [{"kind": "killed_rank", "at": 7, "on_rank": 1}]
    assert runs.run(command, ranks=2, faults=killed).codes != [0, 0]
    second = runs.run([*command, "--resume", "auto"]).ended_with(0)
    assert "optimizer steps" in finished.output
    assert finished.output.count("and left out (data.on_long_row") == 2  # when it was counted, and at the end
    assert finished.output.count("1 row was not readable and left out (data.on_bad_row=skip)") == 1
    assert "optimizer steps" not in second.output  # it keeps those that were counted at the first start

    steps = load_saved(tmp_path / "whole/config.yaml").training.num_train_steps
    assert 10 < steps == len(trained(tmp_path / "whole")) < 100
    last_of_each = {values[0]: values for values in trained(tmp_path / "cut")}  # steps behind the save are there twice
    for values, others in zip(last_of_each.values(), trained(tmp_path / "whole"), strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    for name in ("whole", "cut"):
        *_, last = (line for line in metrics(tmp_path / name) if "train/loss" in line)
        assert (last["data/bad_rows"], last["data/long_rows"]) == (1, 1)
        assert last["train/epoch"] == 2  # of all ranks the lowest, and not a sum
