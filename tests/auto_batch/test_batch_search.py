"""Which sizes are tried, and which one is taken."""

from __future__ import annotations

import pytest

from ds_encdec.training.auto_batch.probe import Outcome
from ds_encdec.training.auto_batch.resolve import largest_that_fits

NEEDS = {size: 10 * size for size in (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)}
"""As estimated, of the divisors of 48."""
NO_MEMORY = Outcome(fits=False, message="no memory")


class Machine:
    """On which a micro-batch takes `bytes_each` a sequence, of which there are `capacity`."""

    def __init__(self, capacity: int, bytes_each: int = 10, no_memory: Outcome = NO_MEMORY) -> None:
        self.capacity, self.bytes_each, self.no_memory = capacity, bytes_each, no_memory
        self.tried: list[int] = []

    def run(self, size: int) -> Outcome:
        self.tried.append(size)
        peak_bytes = size * self.bytes_each
        return Outcome(fits=True, peak_bytes=peak_bytes) if peak_bytes <= self.capacity else self.no_memory


@pytest.mark.parametrize(
    ("limit", "bytes_each", "tried", "found"),
    [
        (125, 10, [12], 12),  # as estimated: 16 would take 160
        (480, 10, [48], 48),
        (9, 9, [1], 1),  # the estimate has no room even for this one
        (125, 11, [12, 6], 6),  # of at most half the size, and then no larger one
        (125, 100, [12, 6, 3, 1], 1),
        (125, 6, [12, 16], 16),  # where there is room for 16 (72 + 40), but not then for 24 (96 + 80)
        (125, 2, [12, 16, 24], 24),
        (300, 1, [24, 48], 48),
        (125, 7, [12, 16], 16),
    ],
)
def test_the_largest_that_fits(limit: int, bytes_each: int, tried: list[int], found: int) -> None:
    machine = Machine(limit, bytes_each)
    size, outcome = largest_that_fits(NEEDS, limit, machine.run)
    assert machine.tried == tried
    assert (size, outcome.fits, outcome.peak_bytes) == (found, True, found * bytes_each)


def test_two_larger_ones_at_most() -> None:
    machine = Machine(1000, 1)
    assert largest_that_fits({1: 900, 2: 1001, 3: 1002, 4: 1003}, 1000, machine.run)[0] == 3
    assert machine.tried == [1, 2, 3]


def test_a_larger_one_that_does_not_fit_leaves_what_did() -> None:
    machine = Machine(30, 2)
    assert largest_that_fits(NEEDS, 125, machine.run) == (12, Outcome(fits=True, peak_bytes=24))
    assert machine.tried == [12, 16]


OF_HOST = Outcome(fits=False, message="the host's", smaller_may_fit=False)


@pytest.mark.parametrize(
    ("no_memory", "tried"), [(NO_MEMORY, [12, 6, 3, 1]), (OF_HOST, [12])], ids=["any size", "what all sizes take"]
)
def test_nothing_fits(no_memory: Outcome, tried: list[int]) -> None:
    machine = Machine(0, no_memory=no_memory)
    assert largest_that_fits(NEEDS, 125, machine.run) == (tried[-1], no_memory)
    assert machine.tried == tried
