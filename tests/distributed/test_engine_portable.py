"""Checkpoints that another ZeRO stage on another number of ranks goes on from."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan import ARRIVING, LEAVING, SAVED_STEP, SUB_GROUPS, portable_cases
from gloo_ranks import run_ranks

from ds_encdec.base.types import StateKind
from ds_encdec.checkpoint.zero_state import ZeroState

pytestmark = pytest.mark.distributed

KINDS: tuple[StateKind, ...] = ("weight", "exp_avg", "exp_avg_sq")
SOURCES = {name: source for _, name, source, _ in ARRIVING}
SETTINGS = LEAVING | {name: given for _, name, _, given in ARRIVING}
IN_FLOAT32 = [name for name in SOURCES if not SETTINGS[name].get("bf16")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("portable")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[Any]]:
    """Every case's result on every rank."""
    found: dict[str, list[Any]] = {}
    for world_size, cases in portable_cases(folder):
        ranks = run_ranks("deepspeed_cases.py:run_cases", world_size, {"cases": cases})
        found |= {name: [rank[name] for rank in ranks] for name, _, _ in cases}
        for name, _, _ in cases:
            for result in found[name]:
                assert not isinstance(result, str), f"{name}: {result}"
    return found


def uninterrupted(results: dict[str, list[Any]], name: str) -> dict[str, Any]:
    while name in SOURCES:
        name = SOURCES[name]
    found: dict[str, Any] = results[name][0]
    return found


@pytest.mark.parametrize("case", SOURCES)
def test_a_state_arrives_to_the_bit(results: dict[str, list[Any]], folder: Path, case: str) -> None:
    """Each group has its own decay, every tensor the step, and each rank reads what it holds."""
    left, arrived = ZeroState(folder / SOURCES[case]), ZeroState(folder / case)
    assert list(arrived.shapes.items()) == list(left.shapes.items())
    assert (arrived.applied_steps, left.applied_steps) == (SAVED_STEP, SAVED_STEP)
    for name in left.shapes:
        for kind in KINDS:
            assert torch.equal(arrived.read(kind, name), left.read(kind, name)), (kind, name)
        assert left.read("exp_avg_sq", name).any()  # or equal moments would prove nothing
    for rank in results[case]:
        assert rank["weight decays"] == [0.1, 0.0]
        assert set(rank["adam steps"]) == {SAVED_STEP}
        assert len(rank["adam steps"]) > 4 or SUB_GROUPS["deepspeed_extra"] != SETTINGS[case].get("deepspeed_extra")
    sizes = [prod(shape) for shape in arrived.shapes.values()]
    copies = len(results[case]) if SETTINGS[case]["sharding_stage"] == "zero0" else 1
    for kind in KINDS:
        assert sum(rank["elements read"][kind] for rank in results[case]) == copies * sum(sizes)
    assert all(rank["longest read"] <= max(sizes) for rank in results[case])


@pytest.mark.parametrize("case", IN_FLOAT32)
def test_training_goes_on_like_the_uninterrupted_run(results: dict[str, list[Any]], case: str) -> None:
    expected = uninterrupted(results, case)
    for rank in results[case]:
        for mine, theirs in zip(rank["steps"], expected["steps"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-9)
        for name, weight in expected["weights"].items():
            # A thirtieth of what a step moves a weight by; decay of the norms would cost a tenth of it per step.
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("case", LEAVING)
def test_the_state_in_the_files_is_that_of_the_engine(results: dict[str, list[Any]], folder: Path, case: str) -> None:
    saved = ZeroState(folder / case)
    for name, weight in results[case][0]["saved"].items():
        assert torch.equal(saved.read("weight", name).view(saved.shapes[name]), weight), name
        start, stop = weight.numel() // 3, weight.numel() // 3 + 5
        assert torch.equal(saved.read("weight", name, start, stop), weight.view(-1)[start:stop]), name


def test_files_are_read_where_deepspeed_is_not_installed(results: dict[str, list[Any]], folder: Path) -> None:
    cases = ("zero0", "zero1-bf16", "zero2", "zero0 to zero3")
    assert results.keys() >= set(cases)
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from pathlib import Path; from ds_encdec.checkpoint.zero_state import ZeroState\n"
        "for folder in sys.argv[1:]:\n"
        "    saved = ZeroState(Path(folder))\n"
        "    print(*(saved.read(kind, name).double().sum().item() for name in saved.shapes for kind in "
        f"{KINDS!r}))"
    )
    command = [sys.executable, "-c", code, *(str(folder / case) for case in cases)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    for case, line in zip(cases, output.stdout.splitlines(), strict=True):
        saved = ZeroState(folder / case)
        sums = [saved.read(kind, name).double().sum().item() for name in saved.shapes for kind in KINDS]
        assert [float(value) for value in line.split()] == sums, case
