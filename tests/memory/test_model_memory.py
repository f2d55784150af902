"""The textbook estimate against the figures that the literature gives."""

from __future__ import annotations

from typing import Any

import pytest

from ds_encdec.memory.library import estimate_model_memory
from ds_encdec.types import ConfigError

SEVEN_BILLION: dict[str, Any] = {
    "num_params": 7e9,
    "batch_size": 1,
    "seq_length": 2048,
    "hidden_size": 4096,
    "num_layers": 32,
    "optimizer": "adam",
}


@pytest.mark.parametrize(
    ("dtype", "model", "gradients", "optimizer"),
    [
        ("bf16", 14, 14, 56),
        ("bf16_mixed", 14, 14, 28 + 28 + 28),  # float32 master weights, and both moments
        ("fp32", 28, 28, 56),
    ],
)
def test_states_of_seven_billion_parameters(dtype: str, model: float, gradients: float, optimizer: float) -> None:
    memory = estimate_model_memory(**SEVEN_BILLION, dtype=dtype)
    assert [memory[f"{part}_gb"] for part in ("model", "gradient", "optimizer")] == [model, gradients, optimizer]
    assert memory["total_gb"] == pytest.approx(sum(value for key, value in memory.items() if key != "total_gb"))


def test_states_of_the_zero_paper() -> None:
    """Arxiv 1910.02054, figure 1: 7.5 billion parameters take 120 GB without sharding."""
    memory = estimate_model_memory(**SEVEN_BILLION | {"num_params": 7.5e9}, dtype="fp16_mixed")
    assert memory["total_gb"] - memory["activation_gb"] == 120


def test_activations_of_a_large_model() -> None:
    """Arxiv 2205.05198 for GPT-3's shape, s = 2048, h = 12288, 96 layers: 34 s b h each, and 2 s b h recomputed."""
    gpt3 = SEVEN_BILLION | {"num_params": 175e9, "hidden_size": 12288, "num_layers": 96}
    layer = 2048 * 12288 / 1e9
    kept, recomputed = (
        estimate_model_memory(**gpt3, dtype="bf16", gradient_checkpointing=full)["activation_gb"]
        for full in (False, True)
    )
    assert (kept, recomputed) == (pytest.approx(96 * 34 * layer), pytest.approx(96 * 2 * layer))
    in_float32 = estimate_model_memory(**gpt3, dtype="float32", gradient_checkpointing=False)["activation_gb"]
    assert in_float32 == pytest.approx(96 * 66 * layer), "but for dropout's masks, twice as much"
    assert estimate_model_memory(**gpt3 | {"batch_size": 3})["activation_gb"] == pytest.approx(3 * recomputed)


@pytest.mark.parametrize(
    ("optimizer", "gigabytes"),
    [("adamw", 56), ("adam8bit", 14.22), ("lion", 28), ("sgd", 0), ("sgd_momentum", 28), ("adafactor", 0.014)],
)
def test_optimizers(optimizer: str, gigabytes: float) -> None:
    memory = estimate_model_memory(**SEVEN_BILLION | {"optimizer": optimizer}, dtype="bf16")
    assert memory["optimizer_gb"] == pytest.approx(gigabytes, rel=0.03)


def test_names_of_torch_are_understood() -> None:
    one, other = (estimate_model_memory(**SEVEN_BILLION, dtype=name) for name in ("torch.bfloat16", "BF16"))
    assert one == other == estimate_model_memory(**SEVEN_BILLION, dtype="bf16")


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("num_params", 0, "positive"),
        ("num_params", float("nan"), "positive"),
        ("batch_size", -1, "positive"),
        ("seq_length", "2048", "positive"),
        ("hidden_size", True, "positive"),
        ("num_layers", float("inf"), "positive"),
        ("dtype", "int8", "bf16_mixed"),
        ("optimizer", "adamx", "adafactor"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        estimate_model_memory(**SEVEN_BILLION | {argument: value})
    assert f"{argument}={value!r}" in str(refused.value)
    assert allowed in str(refused.value)
