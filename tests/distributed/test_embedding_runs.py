"""The contrastive loss over all micro-batches of all ranks: as plain torch computes it from single texts, whatever
divides the step, and in runs that go on elsewhere."""

import functools
import json
from pathlib import Path
from typing import Any

import embedding_cases
import pytest
import torch
from embedding_cases import SETTINGS
from gloo_ranks import run_ranks
from portable_runs import TESTED_STEPS, Side, continue_all, save_all, uninterrupted

from ds_encdec.registry.engines import EngineName

pytestmark = pytest.mark.distributed

ENGINES: dict[str, tuple[EngineName, dict[str, Any]]] = {
    "zero3": ("deepspeed", {"distributed_type": "deepspeed", "sharding_stage": "zero3"}),
    "zero1": ("deepspeed", {"distributed_type": "deepspeed", "sharding_stage": "zero1"}),
    "fsdp": ("fsdp", {"distributed_type": "fsdp", "sharding_stage": "zero3"}),
}
CASES = [(engine, ranks) for engine in ENGINES for ranks in (1, 2, 4) if engine != "zero1" or ranks == 2]


def run(engine: str, ranks: int, settings: str, **how: Any) -> list[dict[str, Any]]:
    kind, infra = ENGINES[engine]
    arguments = {"settings": settings, **infra, **how}
    return run_ranks("embedding_cases.py:steps", ranks, arguments, kind)


@functools.cache
def expected(settings: str) -> dict[str, Any]:
    return embedding_cases.reference(settings)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("engine", "ranks"), CASES)
def test_the_loss_is_plain_torchs_of_single_texts(engine: str, ranks: int, settings: str) -> None:
    wanted = expected(settings)
    for found in run(engine, ranks, settings):
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
        for name in ("steps", "evaluation"):
            theirs, ours = wanted[name], found[name]
            for one, other in zip(theirs, ours, strict=True) if name == "steps" else [(theirs, ours)]:
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, wanted["weights"][name].detach(), rtol=1e-4, atol=2e-5)


def test_dropout_draws_the_same_masks_in_both_passes_on_any_number_of_ranks() -> None:
    alone, *others = (run("fsdp", ranks, "plain", dropout=0.2)[0] for ranks in (1, 2, 4))
    assert alone["norms"] != pytest.approx(expected("plain")["norms"], rel=1e-3)
    for found in others:
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        torch.testing.assert_close(torch.stack(found["steps"]), torch.stack(alone["steps"]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("objective", ["contrastive", "mntp"])
def test_a_run_goes_on_under_another_engine_on_other_ranks(tmp_path: Path, objective: str) -> None:
    changes: dict[str, Any] = {"data.objective": objective, "data.max_decoder_length": 2048}
    if objective == "contrastive":
        pairs = {"data.dataset_name": "builtin_functions", "data.on_long_row": "truncate"}
        changes |= pairs | {"data.eval_fraction": 0.005}
    saver, loader = Side("ZeRO-3 offload", 2), Side("HSDP", 4)
    reference = uninterrupted(tmp_path, TESTED_STEPS, changes)
    saved = save_all([saver], tmp_path, TESTED_STEPS, changes)
    (found,) = continue_all([(saver, loader)], saved, reference, tmp_path, TESTED_STEPS, changes).values()
    assert found.same_samples
    assert found.loss_difference < 1e-5
    config = json.loads((saved[saver] / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 0
