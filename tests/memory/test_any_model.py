"""Functions for any model: reported memory, the textbook's estimate, and the batch size that really fits."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from ds_encdec.base.types import ConfigError, OutOfMemoryError
from ds_encdec.memory.library import (
    _control_groups,
    auto_find_batch_size,
    clear_memory,
    estimate_model_memory,
    get_memory_stats,
    log_memory_stats,
)

BALLAST_FLOATS = 2**25


def test_the_process_holds_what_it_has_taken() -> None:
    before = get_memory_stats("cpu")
    ballast = torch.ones(BALLAST_FLOATS)
    held = get_memory_stats(torch.device("cpu"))
    del ballast
    after = get_memory_stats("cpu")
    assert set(held) == {"allocated_gb", "reserved_gb", "max_allocated_gb", "free_gb", "total_gb"}
    taken_gb = BALLAST_FLOATS * 4 / 1e9
    assert held["allocated_gb"] - before["allocated_gb"] == pytest.approx(taken_gb, rel=0.1)
    assert after["allocated_gb"] - before["allocated_gb"] < 0.1 * taken_gb
    # The kernel brings its peak up to date a little later.
    assert after["max_allocated_gb"] >= 0.9 * held["allocated_gb"]
    assert 0 < held["free_gb"] < held["total_gb"] <= psutil.virtual_memory().total / 1e9


def test_memory_is_logged_behind_a_prefix(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_memory_stats("after the first step", "cpu")
    words, *figures = caplog.messages[0].replace(": ", ", ").split(", ")
    assert words == "after the first step"
    kinds = ["allocated", "reserved", "max allocated", "free", "total"]
    assert [figure.rsplit(" ", 2)[0] for figure in figures] == kinds


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match=f"device={device}: "):
        get_memory_stats(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_holds_what_it_was_given() -> None:
    clear_memory()
    before = get_memory_stats()
    ballast = torch.ones(BALLAST_FLOATS, device="cuda")
    held = get_memory_stats(0)
    del ballast
    freed = get_memory_stats("cuda")
    clear_memory()
    cleared = get_memory_stats()
    taken_gb = BALLAST_FLOATS * 4 / 1e9
    assert held["allocated_gb"] - before["allocated_gb"] == pytest.approx(taken_gb)
    assert freed["allocated_gb"] == before["allocated_gb"]
    assert freed["reserved_gb"] >= taken_gb
    assert freed["max_allocated_gb"] == held["max_allocated_gb"] > cleared["max_allocated_gb"]
    assert cleared["reserved_gb"] < freed["reserved_gb"]
    assert held["allocated_gb"] <= held["reserved_gb"] <= held["total_gb"] - held["free_gb"]


def test_clearing_lets_go_of_what_only_a_cycle_holds() -> None:
    node = nn.Identity()
    node.itself, gone = node, weakref.ref(node)
    del node
    clear_memory()
    assert gone() is None


def test_limits_of_all_control_groups_around_the_process_are_read(tmp_path: Path) -> None:
    membership, mounted = tmp_path / "membership", tmp_path / "mounted"
    membership.write_text("4:cpu,cpuacct:/elsewhere\n3:memory:/job\n0::/batch/job\n")
    for name, text in {
        "batch/job/memory.max": "max",
        "batch/job/memory.current": "400",
        "batch/job/memory.stat": "anon 300\ninactive_file 90",
        "batch/memory.max": "1000",
        "batch/memory.current": "500",
        "batch/memory.stat": "anon 400\ninactive_file 80",
        "memory/job/memory.limit_in_bytes": "2000",
        "memory/job/memory.usage_in_bytes": "600",
        "memory/job/memory.stat": "total_inactive_file 50",
    }.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(f"{text}\n")
    assert list(_control_groups(membership, mounted)) == [(2000, 550), (1000, 420)]
    assert list(_control_groups(tmp_path / "no Linux", mounted)) == []


SEVEN_BILLION: dict[str, Any] = {"num_params": 7e9, "batch_size": 1, "seq_length": 2048, "hidden_size": 4096}
SEVEN_BILLION |= {"num_layers": 32, "optimizer": "adam"}


@pytest.mark.parametrize(
    ("dtype", "optimizer", "model", "gradients", "states"),
    [
        ("torch.bfloat16", "sgd_momentum", 14, 14, 28),
        ("FP32", "adamw", 28, 28, 56),
        ("bf16_mixed", "adam", 14, 14, 28 + 28 + 28),  # float32 master weights, and both moments
        ("bf16", "adam8bit", 14, 14, 14.22),
        ("bf16", "lion", 14, 14, 28),
        ("bf16", "sgd", 14, 14, 0),
        ("bf16", "adafactor", 14, 14, 0.014),
    ],
)
def test_states_of_seven_billion_parameters(
    dtype: str, optimizer: str, model: float, gradients: float, states: float
) -> None:
    memory = estimate_model_memory(**SEVEN_BILLION | {"optimizer": optimizer}, dtype=dtype)
    parts = [memory[f"{part}_gb"] for part in ("model", "gradient", "optimizer")]
    assert parts == [model, gradients, pytest.approx(states, rel=0.03)]
    assert memory["total_gb"] == pytest.approx(sum(value for key, value in memory.items() if key != "total_gb"))


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
    ("argument", "value", "allowed"),
    [
        ("num_params", 0, "positive"),
        ("batch_size", float("nan"), "positive"),
        ("seq_length", "2048", "positive"),
        ("hidden_size", True, "positive"),
        ("dtype", "int8", "bf16_mixed"),
        ("optimizer", "adamx", "adafactor"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        estimate_model_memory(**SEVEN_BILLION | {argument: value})
    assert f"{argument}={value!r}" in str(refused.value)
    assert allowed in str(refused.value)


class Greedy(nn.Module):
    """Allocates more than any address space holds where a batch has more than `fits` rows, as a chosen kind does."""

    def __init__(self, fits: int, kind: str = "one") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fits, self.kind, self.tried = fits, kind, list[int]()

    def forward(self, x: Tensor) -> Any:
        self.tried.append(len(x))
        y = self.linear(x)
        self._allocate(y) if self.kind == "one" else y.register_hook(self._allocate)
        return SimpleNamespace(loss=y.mean()) if self.kind == "mapping" else y

    def _allocate(self, x: Tensor) -> None:
        if len(x) > self.fits:
            torch.empty(2**60, dtype=torch.uint8, device=x.device)


def batch(size: int) -> Tensor:
    return torch.ones(size, 4)


@pytest.mark.parametrize(
    ("kind", "make"),
    [("one", batch), ("mapping", lambda size: {"x": batch(size)}), ("tuple", lambda size: (batch(size),))],
)
def test_it_halves_until_it_fits(kind: str, make: Any) -> None:
    model = Greedy(fits=6, kind=kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert auto_find_batch_size(model, make, start_batch_size=40) == 5
    assert model.tried == [40, 20, 10, 5]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_smallest_size_is_tried_last() -> None:
    model = Greedy(fits=3)
    assert auto_find_batch_size(model, batch, start_batch_size=10, min_batch_size=3) == 3
    assert model.tried == [10, 5, 3]


@pytest.mark.parametrize(
    ("start", "smallest", "width", "error", "message"),
    [
        (16, 4, 4, OutOfMemoryError, "not even a batch of 4 fits"),
        (8, 1, 5, RuntimeError, "shapes cannot be multiplied"),  # no reason to halve
        (0, 1, 4, ValueError, "1 <= min_batch_size <= start_batch_size"),
        (4, 0, 4, ValueError, "1 <= min_batch_size <= start_batch_size"),
        (2, 3, 4, ValueError, "1 <= min_batch_size <= start_batch_size"),
    ],
)
def test_no_size_is_found(start: int, smallest: int, width: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto_find_batch_size(Greedy(fits=3), lambda size: torch.ones(size, width), start, smallest)
