"""Functions for any model: reported memory, the textbook's estimate, and the batch size that really fits."""

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
    estimate_model_memory,
    get_memory_stats,
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
        ("FP32", "adamw", 28, 28, 56),
        ("bf16_mixed", "adam", 14, 14, 28 + 28 + 28),  # float32 master weights, and both moments
        ("torch.bfloat16", "adafactor", 14, 14, 0.014),
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
    gpt3 = SEVEN_BILLION | {"num_params": 175e9, "hidden_size": 12288, "num_layers": 96}
    layer = 2048 * 12288 / 1e9
    kept, recomputed = (
        estimate_model_memory(**gpt3, dtype="bf16", gradient_checkpointing=full)["activation_gb"]
        for full in (False, True)
    )
    assert (kept, recomputed) == (pytest.approx(96 * 34 * layer), pytest.approx(96 * 2 * layer))
    assert estimate_model_memory(**gpt3 | {"batch_size": 3})["activation_gb"] == pytest.approx(3 * recomputed)


def test_bad_values_are_named_with_what_is_allowed() -> None:
    for argument, value, allowed in (("num_params", 0, "positive"), ("optimizer", "adamx", "adafactor")):
        with pytest.raises(ConfigError, match=f"{argument}={value!r}.*{allowed}"):
            estimate_model_memory(**SEVEN_BILLION | {argument: value})


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


@pytest.mark.parametrize(
    ("start", "smallest", "width", "error", "message"),
    [
        (16, 5, 4, OutOfMemoryError, "not even a batch of 5 fits"),
        (8, 1, 5, RuntimeError, "shapes cannot be multiplied"),  # no reason to halve
        (2, 3, 4, ValueError, "1 <= min_batch_size <= start_batch_size"),
    ],
)
def test_no_size_is_found(start: int, smallest: int, width: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto_find_batch_size(Greedy(fits=3), lambda size: torch.ones(size, width), start, smallest)
