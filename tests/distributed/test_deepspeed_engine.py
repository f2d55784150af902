"""DeepSpeed at every stage: it trains like plain torch in one process, and what must be exact is exact to the bit.

Like plain torch: float32, three micro-batches per rank with unequal target tokens and one of them empty, clipping
active in every step (without it Adam would hide a gradient that is wrong by a factor).
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import (
    assert_evaluated_like,
    assert_identical,
    assert_only_matrices_decay,
    assert_skips_leave_no_trace,
    assert_trained_like,
    assert_weights_of,
    oracle_trajectory,
)
from engine_plan import (
    CHANGED_RESUMES,
    LOSSLESS,
    PARITY,
    RESUMES,
    SKIPS,
    STAGING,
    SUMMED,
    UNREADABLE,
    UNTRAINED,
    cases,
)
from gloo_ranks import RankFailure, run_ranks
from packaging.version import Version
from small_run import SHORT_ACCUMULATION, SHORT_MODEL, generating_weights, lane_batches, run_config, weights
from torch_oracle import TorchOracle

from ds_encdec.base.types import StepResult
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.model.parameter_count import is_adapter, parameter_shapes

pytestmark = pytest.mark.distributed

Results = Callable[..., Any]
CASES = [(world_size, name) for world_size, cases in PARITY.items() for name in cases]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the resume cases leave their checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def engine_results(checkpoints: Path) -> Results:
    """`engine_results(world_size, case)` → the case's result on every rank."""

    @functools.cache
    def run(world_size: int) -> list[dict[str, Any]] | RankFailure:
        plan = cases(world_size, checkpoints)
        try:
            return run_ranks("engine_cases.py:run_cases", world_size, {"cases": plan})
        except RankFailure as failure:
            return failure  # cached like a result: every test would wait for it again

    def result(world_size: int, case: str) -> list[Any]:
        ranks = run(world_size)
        if isinstance(ranks, RankFailure):
            raise ranks
        found = [rank[case] for rank in ranks]
        for traceback in found:
            assert not isinstance(traceback, str), traceback
        return found

    return result


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_trains_and_evaluates_like_the_oracle(engine_results: Results, world_size: int, case: str) -> None:
    oracle = oracle_trajectory(world_size, PARITY[world_size][case])
    for found in engine_results(world_size, f"parity {case}"):
        assert_trained_like(found, oracle)
        assert_evaluated_like(found, oracle)
        assert_weights_of(found, oracle)


def test_recomputation_changes_nothing_to_the_bit(engine_results: Results) -> None:
    plain, *_ = engine_results(2, "parity zero3")
    found, *_ = engine_results(2, "parity zero3-activation-offload")
    assert found["steps"] == plain["steps"]


def test_zero3_compiles_layers_between_its_hooks(engine_results: Results) -> None:
    """One graph for each kind of layer (torch 2.11: two), which keeps no gathered weights for the backward pass."""
    graphs = 4 if Version(torch.__version__) < Version("2.12") else 2
    for plain, found in zip(engine_results(2, "compiled False"), engine_results(2, "compiled True"), strict=True):
        assert (plain["graphs"], found["graphs"], found["breaks"], found["kept"]) == (0, graphs, {}, 0)
        for mine, expected in zip(found["steps"], plain["steps"], strict=True):
            assert mine["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
        torch.testing.assert_close(found["weights"], plain["weights"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", SKIPS)
def test_skipped_steps_leave_no_trace(engine_results: Results, case: str) -> None:
    for rank, clean in zip(engine_results(2, f"skip {case}"), engine_results(2, f"resume {case}"), strict=True):
        steps, weights = clean["straight"]
        assert_skips_leave_no_trace(rank["steps"], [*clean["begun"], *steps])
        assert_identical(rank["weights"], weights)
        assert rank["kept"] == 0 or "offload" not in case  # gradients that the parameters still know


@pytest.mark.parametrize("case", RESUMES)
def test_resume_is_exact_to_the_bit(engine_results: Results, case: str) -> None:
    for rank in engine_results(2, f"resume {case}"):
        straight_steps, straight_weights = rank["straight"]
        resumed_steps, resumed_weights = rank["resumed"]
        assert resumed_steps == straight_steps
        assert_identical(resumed_weights, straight_weights)
        assert set(rank["adam steps"]) == {2}


@pytest.mark.parametrize("case", RESUMES)
def test_going_back_is_exact_to_the_bit(engine_results: Results, case: str) -> None:
    """The engine that saved has trained on, and loads what it saved."""
    for rank in engine_results(2, f"resume {case}"):
        straight_steps, straight_weights = rank["straight"]
        repeated_steps, repeated_weights = rank["repeated"]
        assert_identical(rank["rolled back"], rank["saved"])
        assert repeated_steps == straight_steps
        assert_identical(repeated_weights, straight_weights)


@pytest.mark.parametrize("case", RESUMES)
def test_a_copy_to_generate_with_has_the_weights_and_training_goes_on_as_it_would_have(
    engine_results: Results, case: str
) -> None:
    """The run that is copied in its midst is the one that all others here are compared with, to the bit."""
    for rank in engine_results(2, f"resume {case}"):
        assert_identical(rank["copied"], generating_weights(rank["saved"], **RESUMES[case]))


@pytest.mark.parametrize("case", CHANGED_RESUMES)
def test_a_resumed_run_follows_its_own_settings(engine_results: Results, case: str) -> None:
    """Against the oracle, whose settings are exchanged in mid-run: rates, decay, betas, epsilon, clipping, schedule."""
    before = {key: value for key, value in CHANGED_RESUMES[case].items() if key == "lr_scheduler_type"}
    oracle = TorchOracle(run_config(**before), SHORT_MODEL, weights)
    steps = [oracle_step(oracle, step) for step in (0, 1)]
    oracle.use(run_config(**before | CHANGED_RESUMES[case]["then"]).training)
    steps = [oracle_step(oracle, step) for step in (2, 3)]
    for rank in engine_results(2, f"changed {case}"):
        for mine, expected in zip(rank["steps"], steps, strict=True):
            assert mine["learning_rate"] == pytest.approx(expected.learning_rate, rel=1e-9)
            assert mine["grad_norm"] == pytest.approx(float(expected.grad_norm), rel=1e-5)
        for name, parameter in oracle.model.named_parameters():
            # A thirtieth of what a step moves a weight by.
            torch.testing.assert_close(rank["weights"][name], parameter.detach(), rtol=0, atol=1e-4, msg=name)


def oracle_step(oracle: TorchOracle, step: int) -> StepResult:
    lanes = lane_batches(step, 2, SHORT_ACCUMULATION)
    target_tokens = sum(batch.target_tokens for batch in lanes)
    for index, batch in enumerate(lanes):
        oracle.backward(oracle.forward(batch), target_tokens=target_tokens, last=index == len(lanes) - 1)
    return oracle.step()


@pytest.mark.parametrize(
    ("case", "source"), [*((case, "float32") for case in UNTRAINED), *((case, "bf16") for case in LOSSLESS)]
)
def test_training_starts_from_the_source_to_the_bit(engine_results: Results, case: str, source: str) -> None:
    names = list(parameter_shapes(SHORT_MODEL))
    dtype = torch.bfloat16 if source == "bf16" else torch.float32
    for number, rank in enumerate(engine_results(2, f"untrained {case} {source}")):
        assert_identical(rank["weights"], {name: weights(name).to(dtype).float() for name in names})
        assert rank["asked"] == ([] if number else names)  # rank 0 reads each once, nobody else any


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_source_that_rank_zero_cannot_read_fails_on_all_ranks(engine_results: Results, case: str) -> None:
    wanted = "the source has shape [3, 5], the model [16, 32]" if case.endswith("shape") else "is damaged"
    for rank in engine_results(2, f"unreadable {case}"):
        assert wanted in rank["message"]


@pytest.mark.parametrize("case", RESUMES)
def test_every_file_is_returned_by_one_rank(engine_results: Results, checkpoints: Path, case: str) -> None:
    returned = [name for rank in engine_results(2, f"resume {case}") for name in rank["files"]]
    written = [str(path.relative_to(checkpoints / case)) for path in (checkpoints / case).rglob("*") if path.is_file()]
    assert sorted(returned) == sorted(written)
    optimizer_files = [name for name in returned if name.endswith("optim_states.pt")]
    assert len(optimizer_files) == (0 if case.startswith("zero0") else 2)


@pytest.mark.parametrize("case", STAGING)
def test_a_copy_is_what_was_staged_whenever_it_is_written(
    engine_results: Results, checkpoints: Path, case: str
) -> None:
    for rank in engine_results(2, f"staging {case}"):
        at_once, later, again = rank["bytes"]
        assert at_once == later == again
        assert at_once <= rank["written"] <= at_once + 200_000  # pickles, and rank 0's scripts
        assert rank["repeated"] == rank["first"]
    folder = checkpoints / f"staging-{case}"
    written = [path.relative_to(folder / "at once") for path in (folder / "at once").rglob("*") if path.is_file()]
    assert len(written) == (2 if case == "zero0" else 8 if case.startswith("zero3") else 7)
    for path in written:
        expected = (folder / "at once" / path).read_bytes()
        assert (folder / "later" / path).read_bytes() == expected, path
        assert (folder / "again" / path).read_bytes() == expected, path


def test_a_rank_whose_disk_is_full_says_so_and_holds_nobody_up(engine_results: Results) -> None:
    ranks = engine_results(2, "unwritable")
    assert [rank["errno"] for rank in ranks] == [None, ENOSPC]
    assert [rank["steps"] for rank in ranks] == [[True], [True]]


CONVERTED = (
    "zero1-bf16",
    "zero2",
    "zero3-offload-bf16",
    "zero3-sub-groups",
    *(name for name in RESUMES if ("lora" in name or "freeze" in name) and not name.startswith("zero0")),
)
CONVERT = """
import runpy, sys
for checkpoint, output in zip(sys.argv[1::2], sys.argv[2::2]):
    script = f"{checkpoint}/zero_to_fp32.py"
    sys.argv = [script, checkpoint, output]
    runpy.run_path(script, run_name="__main__")
"""
"""Runs the script of each checkpoint. One process for all: importing deepspeed takes longer than they do."""


@pytest.fixture(scope="module")
def converted(engine_results: Results, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the output of every checkpoint's own zero_to_fp32.py."""
    folder = tmp_path_factory.mktemp("converted")
    for case in CONVERTED:
        engine_results(2, f"resume {case}")  # must be there
    arguments = [str(path / case) for case in CONVERTED for path in (checkpoints, folder)]
    subprocess.run([sys.executable, "-c", CONVERT, *arguments], check=True, capture_output=True, timeout=600)
    return folder


@pytest.mark.parametrize("case", CONVERTED)
def test_zero_to_fp32_yields_the_weights(
    engine_results: Results, checkpoints: Path, converted: Path, case: str
) -> None:
    """Of a run of adapters these alone."""
    expected = engine_results(2, f"resume {case}")[0]["saved"]
    checkpoint = checkpoints / case
    found = torch.load(converted / case / "pytorch_model.bin", weights_only=True)
    if "lora" in RESUMES[case]:
        expected = {name: weight for name, weight in expected.items() if is_adapter(name)}
    else:
        assert torch.equal(found.pop("lm_head.weight"), found["shared.weight"])
    found = {name: tensor.float() for name, tensor in found.items()}
    assert_identical(found, expected)
    saved = ZeroState(checkpoint)
    assert_identical(found, {name: saved.read("weight", name).view(shape) for name, shape in saved.shapes.items()})


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_unusable_checkpoints_are_refused_by_all_ranks(engine_results: Results, stage: str) -> None:
    for messages in engine_results(2, f"refused {stage}"):
        assert (
            "another model: encoder.norm.weight has no counterpart there and shape [32] in" in messages["other model"]
        )
        assert messages["damaged on rank 1"].endswith("is damaged")
        assert messages["whole"] == "loaded"


@pytest.mark.parametrize("case", SUMMED)
def test_a_sum_over_ranks_is_as_exact_as_one_over_micro_batches(engine_results: Results, case: str) -> None:
    """Both are float32 sums of the same bfloat16 gradients; a sum in bfloat16 would be 2e-3 off."""
    alone, of_two = engine_results(1, f"summed {case}")[0], engine_results(2, f"summed {case}")[0]
    for name, expected in alone.items():
        assert (of_two[name] - expected).norm() <= 1e-6 * expected.norm(), name


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_only_matrices_decay(engine_results: Results, stage: str) -> None:
    assert_only_matrices_decay(engine_results(2, f"decay {stage}"))


def test_no_rank_holds_the_whole_model(engine_results: Results) -> None:
    ranks: list[dict[str, Any]] = engine_results(2, "shards")
    for held in ranks:
        assert held["tied"]
        assert set(held["resident"].values()) == {0}
        for name, shard in held["shards"].items():
            assert shard == -(-held["full"][name] // 2), name
        assert held["full"]["shared.weight"] == weights("shared.weight").numel()
