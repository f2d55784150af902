"""Which sizes are tried, and which one is taken."""

from __future__ import annotations

import pytest

from ds_encdec.training.auto_batch.probe import Outcome
from ds_encdec.training.auto_batch.resolve import largest_that_fits

NEEDS = {size: 10 * size for size in (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)}
"""As estimated, of the divisors of 48."""
FEW = {1: 900, 2: 1001, 3: 1002, 4: 1003}


@pytest.mark.parametrize(
    ("needs", "limit", "capacity", "bytes_each", "tried", "found"),
    [
        (NEEDS, 125, 125, 10, [12], 12),  # as estimated: 16 would take 160
        (NEEDS, 480, 480, 10, [48], 48),
        (NEEDS, 9, 9, 9, [1], 1),  # the estimate has no room even for this one
        (NEEDS, 125, 125, 11, [12, 6], 6),  # of at most half the size, and then no larger one
        (NEEDS, 125, 125, 100, [12, 6, 3, 1], 1),
        (NEEDS, 125, 125, 6, [12, 16], 16),  # where there is room for 16 (72 + 40), but not then for 24 (96 + 80)
        (NEEDS, 125, 125, 2, [12, 16, 24], 24),
        (NEEDS, 300, 300, 1, [24, 48], 48),
        (NEEDS, 125, 30, 2, [12, 16], 12),  # a larger one that does not fit leaves what did
        (FEW, 1000, 1000, 1, [1, 2, 3], 3),  # two larger ones at most
        (NEEDS, 125, 0, 10, [12, 6, 3, 1], None),
        (NEEDS, 125, 0, 0, [12], None),  # all sizes take it
    ],
)
def test_the_largest_that_fits(
    needs: dict[int, int], limit: int, capacity: int, bytes_each: int, tried: list[int], found: int | None
) -> None:
    """On a machine with `capacity`, where a micro-batch takes `bytes_each` a sequence (0: something else is full)."""
    no_memory, sizes = Outcome(fits=False, message="no memory", smaller_may_fit=bytes_each > 0), list[int]()

    def run(size: int) -> Outcome:
        sizes.append(size)
        peak_bytes = size * bytes_each
        return Outcome(fits=True, peak_bytes=peak_bytes) if 0 < peak_bytes <= capacity else no_memory

    expected = (tried[-1], no_memory) if found is None else (found, Outcome(fits=True, peak_bytes=found * bytes_each))
    assert largest_that_fits(needs, limit, run) == expected
    assert sizes == tried
