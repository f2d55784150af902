"""A run of adapters with dropout, stopped and continued under another engine on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks

from ds_encdec.model.parameter_count import is_adapter

pytestmark = pytest.mark.distributed

STEPS, STOPPED = 8, 4
LORA = {
    "model.lora.r": 4,  # and a dropout of 0.1
    "training.activation_checkpointing": "full",  # which draws the same again
    "training.num_train_steps": STEPS,
    "training.learning_rate": 3e-2,
    "training.eval_samples": 8,
    "training.eval_steps": STEPS,
    "training.export_at_end": True,
}


def start(ranks: int, engine: str, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs on rank 0, one after the other in one start of ranks."""
    given = [{"engine": engine, "steps": STEPS, "changes": LORA, **run} for run in runs]
    server: Any = "fsdp" if engine in ("FSDP2", "DDP") else "deepspeed"
    found: list[dict[str, Any]] = run_ranks("portable_runs.py:train_runs", ranks, {"runs": given}, engine=server)[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[dict[int, float]]:
    """By step: of a run that nothing stops, on two ranks, and of its continuation on one."""
    stopped = {"output_dir": str(folder / "stopped"), "stop_after": STOPPED}
    whole, _ = start(2, "ZeRO-3 offload", {"output_dir": str(folder / "whole")}, stopped)
    resume = str(folder / "stopped" / "checkpoints" / "latest")
    (alone,) = start(1, "FSDP2", {"output_dir": str(folder / "alone"), "resume": resume})
    return [whole["losses"], alone["losses"]]


def test_dropout_is_the_same_on_any_ranks(losses: list[dict[int, float]]) -> None:
    whole, continued = losses
    assert whole[STEPS] != pytest.approx(whole[1], abs=0.01)
    assert list(continued) == list(range(STOPPED + 1, STEPS + 1))
    for step, loss in continued.items():
        assert loss == pytest.approx(whole[step], abs=1e-5)


def test_a_run_says_and_saves_what_it_trains(losses: list[dict[int, float]], folder: Path) -> None:
    facts = json.loads((folder / "alone" / "run.json").read_text())
    assert 0 < facts["trainable_parameters"] < 0.2 * facts["parameters"]
    checkpoint = folder / "stopped" / "checkpoints" / "latest"
    groups = json.loads((checkpoint / "engine.json").read_text())["groups"]
    assert all(is_adapter(name) for group in groups for name in group)
    tensors = sum(file.stat().st_size for file in (checkpoint / "zero").iterdir())
    assert tensors < 2 * 12 * facts["trainable_parameters"] + 100_000  # pickles
    assert (folder / "alone" / "export" / "final" / "model.safetensors").exists()  # merged
