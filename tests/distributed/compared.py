"""What the tests of both engines compare their ranks with: plain torch in one process, and runs that must be equal."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from small_run import MODEL, REGULARIZED, lane_batches, random_batch, run_config, train_on, weights
from torch_oracle import TorchOracle

from ds_encdec.model.parameter_count import parameter_shapes

ORACLE_FIELDS = "optimizer", "optimizer_args", "lr_scheduler_type", "wsd_decay_fraction", "lora", "freeze", *REGULARIZED


@functools.cache
def _oracle_trajectory(world_size: int, given: str) -> dict[str, Any]:
    settings = json.loads(given)
    steps = settings.pop("steps")
    oracle = TorchOracle(run_config(distributed_type="ddp", sharding_stage="zero0", **settings), MODEL, weights)
    held_out = random_batch(10_000, MODEL.vocab_size)
    before = float(oracle.evaluate(held_out).total)
    trained = []
    for step in range(steps):
        lanes = lane_batches(step, world_size)
        target_tokens = sum(batch.target_tokens for batch in lanes)
        total, result = train_on(oracle, lanes, target_tokens)
        trained.append((total / target_tokens, float(result.grad_norm), result.learning_rate))
    after = oracle.evaluate(held_out)
    return {
        "steps": trained,
        "eval": [before, float(after.total)],
        "after": after,
        "weights": {name: p.detach() for name, p in oracle.named.items()},
    }


def oracle_trajectory(world_size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    asked = {field: given[field] for field in ("steps", *ORACLE_FIELDS) if field in given}
    return _oracle_trajectory(world_size, json.dumps(asked))


def assert_trained_like(found: dict[str, Any], oracle: dict[str, Any], norm: float = 1e-5) -> None:
    """The steps of a rank are the oracle's. `norm`: the relative tolerance of gradient norms."""
    max_grad_norm = run_config().training.max_grad_norm
    for mine, (loss, grad_norm, learning_rate) in zip(found["steps"], oracle["steps"], strict=True):
        assert mine["applied"]
        assert mine["loss"] == pytest.approx(loss, abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(grad_norm, rel=norm)
        assert mine["grad_norm"] > 10 * max_grad_norm  # or clipping would not be tested
        assert mine["grad_norm_dtype"] == "torch.float32"
        assert mine["learning_rate"] == pytest.approx(learning_rate, rel=1e-9, abs=1e-15)


def assert_evaluated_like(found: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert found["eval"] == pytest.approx(oracle["eval"], rel=1e-5)
    torch.testing.assert_close(found["by_denoiser"], oracle["after"].by_denoiser, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["tokens_by_denoiser"], oracle["after"].tokens_by_denoiser)
    assert float(found["by_denoiser"].sum()) == pytest.approx(found["eval"][1], rel=1e-6)


def assert_weights_of(found: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert found["weights"].keys() == oracle["weights"].keys()
    for name, expected in oracle["weights"].items():
        # Adam divides by tiny second moments: 1e-7 in a gradient is more in a weight.
        torch.testing.assert_close(found["weights"][name], expected, rtol=0, atol=1e-4, msg=name)
    assert_merged(found["merged"], found["weights"])


def assert_merged(merged: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """The `merged` parameters are the trained ones, with 8 (alpha 32, rank 4) times the product of each adapter."""
    assert list(merged) == list(parameter_shapes(MODEL))
    for name, found in merged.items():
        a, b = (weights.get(name.replace(".weight", f".lora_{half}.weight")) for half in "AB")
        expected = weights[name] if a is None or b is None else weights[name] + 8 * b @ a
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=name)
        assert (a is not None) == (not torch.equal(found, weights[name])), name


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def assert_skips_leave_no_trace(skipped: list[dict[str, Any]], clean: list[dict[str, Any]]) -> None:
    """The steps of `engine_cases.skipping`, beside those of a run that never saw the third and the fifth."""
    first, second, vetoed, third, not_finite, fourth = skipped
    assert [first, second, third, fourth] == clean  # losses, norms, rates: equal to the bit
    for refused, following in ((vetoed, third), (not_finite, fourth)):
        assert not refused["applied"]
        assert refused["learning_rate"] == following["learning_rate"]  # the schedule did not move
    assert 0 < vetoed["grad_norm"] < 100
    assert not_finite["grad_norm"] == float("inf")
