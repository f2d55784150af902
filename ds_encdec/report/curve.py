"""A metric over the steps of a run, and what a chart needs of it: fewer points, and a smoothed line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SMOOTHED_PART = 40
"""A smoothed value is the mean of at most this part of the curve's points: the whole divided by it."""
SMOOTHED_FROM = 3 * SMOOTHED_PART
"""Points from which a curve can be smoothed: with fewer, a mean of three would be more than the part."""


@dataclass(frozen=True)
class Curve:
    """Values of one metric: `steps` float64 [n], `values` float64 [n] with NaN where the log has `null`."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The curve through (step, value) points."""
        table = np.array(list(points), dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def known(self) -> np.ndarray:
        """The finite values, in order."""
        return self.values[np.isfinite(self.values)]

    @property
    def gaps(self) -> int:
        """How many values are not finite."""
        return len(self.values) - len(self.known)

    def at(self, steps: np.ndarray) -> Curve:
        """The same values at other abscissae (float64 [n])."""
        return Curve(steps, self.values)

    def smoothed(self) -> Curve:
        """The mean of a fortieth of the points around each, fewer towards both ends, so that nothing lags.

        The number of points is odd and rounded down: below `SMOOTHED_FROM` points the curve stays as it is. Values
        that are not finite leave a gap and do not enter the means.
        """
        finite = np.isfinite(self.values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, self.values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(finite)])
        index = np.arange(len(self))
        reach = np.minimum(np.minimum(index, index[::-1]), max(len(self) // SMOOTHED_PART - 1, 0) // 2)
        first, last = index - reach, index + reach + 1
        means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
        return Curve(self.steps, np.where(finite, means, np.nan))

    def decimated(self, num_buckets: int) -> Curve:
        """At most about three points of each of `num_buckets` runs of points: the lowest, the highest, and a gap.

        The first and the last point stay, and so do all extremes.
        """
        if len(self) <= 3 * num_buckets:
            return self
        kept = {0, len(self) - 1}
        edges = np.linspace(0, len(self), num_buckets + 1).astype(int)
        for start, end in pairwise(edges):
            values = self.values[start:end]
            finite = np.isfinite(values)
            if finite.any():
                kept |= {start + int(np.nanargmin(values)), start + int(np.nanargmax(values))}
            if not finite.all():
                kept.add(start + int(np.argmin(finite)))
        chosen = np.array(sorted(kept))
        return Curve(self.steps[chosen], self.values[chosen])
