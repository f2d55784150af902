"""auto_find_batch_size on a model whose memory really runs out: no machine has that much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_encdec.memory.library import auto_find_batch_size
from ds_encdec.types import OutOfMemoryError


class Greedy(nn.Module):
    """Allocates more than any address space holds where a batch has more than `fits` rows."""

    def __init__(self, fits: int, *, in_backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fits = fits
        self.in_backward = in_backward
        self.tried: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.tried.append(len(x))
        y = self.linear(x)
        if self.in_backward:
            y.register_hook(lambda gradient: self._allocate(gradient))
        else:
            self._allocate(y)
        return y

    def _allocate(self, x: Tensor) -> None:
        if len(x) > self.fits:
            torch.empty(2**60, dtype=torch.uint8, device=x.device)


class WithLoss(Greedy):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(x).mean())


def batch(size: int) -> Tensor:
    return torch.ones(size, 4)


@pytest.mark.parametrize(
    ("kind", "make", "in_backward"),
    [
        pytest.param(Greedy, batch, False, id="one"),
        pytest.param(WithLoss, lambda size: {"x": batch(size)}, True, id="mapping"),
        pytest.param(Greedy, lambda size: (batch(size),), True, id="tuple"),
    ],
)
def test_it_halves_until_it_fits(kind: type[Greedy], make: Any, in_backward: bool) -> None:
    model = kind(fits=6, in_backward=in_backward)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert auto_find_batch_size(model, make, start_batch_size=40) == 5
    assert model.tried == [40, 20, 10, 5]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_smallest_size_is_tried_last() -> None:
    model = Greedy(fits=3)
    assert auto_find_batch_size(model, batch, start_batch_size=10, min_batch_size=3) == 3
    assert model.tried == [10, 5, 3]


def test_a_size_that_does_not_fit_and_may_not_be_smaller() -> None:
    with pytest.raises(OutOfMemoryError, match="not even a batch of 4 fits"):
        auto_find_batch_size(Greedy(fits=2), batch, start_batch_size=16, min_batch_size=4)


def test_other_errors_are_no_reason_to_halve() -> None:
    model = Greedy(fits=100)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        auto_find_batch_size(model, lambda size: torch.ones(size, 5), start_batch_size=8)
    assert model.tried == [8]


@pytest.mark.parametrize(("start", "smallest"), [(0, 1), (4, 0), (2, 3)])
def test_sizes_that_make_no_sense(start: int, smallest: int) -> None:
    with pytest.raises(ValueError, match="1 <= min_batch_size <= start_batch_size"):
        auto_find_batch_size(Greedy(fits=1), batch, start_batch_size=start, min_batch_size=smallest)
