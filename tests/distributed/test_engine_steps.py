"""Skipped steps, resumed runs, decay, and what ZeRO-3 holds: properties that are exact, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Results
from engine_plan import RESUMES, SKIPS
from small_run import run_config, weights

pytestmark = pytest.mark.distributed


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize("case", SKIPS)
def test_a_skipped_step_leaves_no_trace(engine_results: Results, case: str) -> None:
    for rank in engine_results(2, f"skip {case}"):
        skipped, clean = rank["skipped"], rank["clean"]
        refused = skipped["steps"].pop(2)
        assert not refused["applied"]
        assert refused["learning_rate"] == skipped["steps"][2]["learning_rate"]  # the schedule did not move
        assert skipped["steps"] == clean["steps"]  # losses, norms, rates: equal to the bit, before and after
        assert_identical(skipped["weights"], clean["weights"])
        if SKIPS[case]["how"] == "veto":
            assert 0 < refused["grad_norm"] < 100
        else:
            assert refused["grad_norm"] == float("inf")


@pytest.mark.parametrize("case", RESUMES)
def test_resume_is_exact_to_the_bit(engine_results: Results, case: str) -> None:
    for rank in engine_results(2, f"resume {case}"):
        straight_steps, straight_weights = rank["straight"]
        resumed_steps, resumed_weights = rank["resumed"]
        assert resumed_steps == straight_steps
        assert_identical(resumed_weights, straight_weights)


@pytest.mark.parametrize("case", RESUMES)
def test_every_file_is_returned_by_one_rank(engine_results: Results, checkpoints: Path, case: str) -> None:
    returned = [name for rank in engine_results(2, f"resume {case}") for name in rank["files"]]
    written = [str(path.relative_to(checkpoints / case)) for path in (checkpoints / case).rglob("*") if path.is_file()]
    assert sorted(returned) == sorted(written)
    optimizer_files = [name for name in returned if name.endswith("optim_states.pt")]
    assert len(optimizer_files) == (0 if case == "zero0" else 2)


@pytest.mark.parametrize("case", ["zero2", "zero3-offload-bf16"])
def test_zero_to_fp32_yields_the_weights(engine_results: Results, checkpoints: Path, tmp_path: Path, case: str) -> None:
    expected = engine_results(2, f"resume {case}")[0]["saved"]
    checkpoint = checkpoints / case
    command = [sys.executable, str(checkpoint / "zero_to_fp32.py"), str(checkpoint), str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found.pop("lm_head.weight"), found["shared.weight"])
    assert_identical({name: tensor.float() for name, tensor in found.items()}, expected)


def test_unusable_checkpoints_are_refused(engine_results: Results, checkpoints: Path) -> None:
    for messages in engine_results(2, "refused"):
        assert str(checkpoints / "refused") in messages["missing"]
        assert "world size 64" in messages["world size"]
        assert "world size 2" in messages["world size"]


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_only_matrices_decay(engine_results: Results, stage: str) -> None:
    training = run_config().training
    for rank in engine_results(2, f"decay {stage}"):
        assert rank["grad_norm"] == 0.0
        kept = 1 - rank["learning_rate"] * training.weight_decay
        for name, moved in rank["weights"].items():
            if name.endswith("norm.weight"):
                assert torch.equal(moved, weights(name)), name
            else:
                torch.testing.assert_close(moved, weights(name) * kept, rtol=1e-6, atol=0)
                assert not torch.equal(moved, weights(name)), name


def test_no_rank_holds_the_whole_model(engine_results: Results) -> None:
    ranks: list[dict[str, Any]] = engine_results(2, "shards")
    for held in ranks:
        assert held["tied"]
        assert set(held["resident"].values()) == {0}
        for name, shard in held["shards"].items():
            assert shard == -(-held["full"][name] // 2), name
        assert held["full"]["shared.weight"] == weights("shared.weight").numel()
