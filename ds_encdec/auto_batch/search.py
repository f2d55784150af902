"""The search for the largest micro-batch that fits, by what is estimated and what tries find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

LARGER_TRIES = 2
"""Candidates above the estimate's that are tried, where a try has left room for them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a try went, on one rank or on all.

    `peak_bytes`: of the device, libraries included; of all ranks the highest. Where it did not fit: `message` says what
    ran out; `of_device` whether that is an accelerator's memory, and not the host's; `smaller_may_fit` whether smaller
    micro-batches take less of it.
    """

    fits: bool
    peak_bytes: int = 0
    message: str = ""
    of_device: bool = False
    smaller_may_fit: bool = True


def largest_that_fits(
    needed_bytes: Mapping[int, int], limit_bytes: int, try_size: Callable[[int], Outcome]
) -> tuple[int, Outcome]:
    """The size to take, and how its try went; the last size tried, and what ran out, where none fits.

    `needed_bytes`: of each candidate, as estimated. The first to be tried is the largest that should take no more than
    `limit_bytes`; the smallest where none should, for the estimate may be wrong.
    """
    candidates = sorted(needed_bytes, reverse=True)
    first = next((size for size in candidates if needed_bytes[size] <= limit_bytes), candidates[-1])
    size, outcome = first, try_size(first)
    while not outcome.fits and outcome.smaller_may_fit:
        smaller = [candidate for candidate in candidates if candidate <= size // 2]
        if not smaller:
            break
        size, outcome = smaller[0], try_size(smaller[0])
    if not outcome.fits or size != first:
        return size, outcome
    for candidate in [candidate for candidate in reversed(candidates) if candidate > first][:LARGER_TRIES]:
        if outcome.peak_bytes + needed_bytes[candidate] - needed_bytes[size] > limit_bytes:
            break
        larger = try_size(candidate)
        if not larger.fits:
            break
        size, outcome = candidate, larger
    return size, outcome
