"""The smoothed line of a curve does not lag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_encdec.report.read_run import SMOOTHED_FROM, SMOOTHED_PART, Curve

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400)


def curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values), dtype=np.float64), np.array(values))


@given(VALUES)
def test_smoothing_stays_inside_the_values_and_keeps_gaps(values: list[float]) -> None:
    whole = curve(values)
    smooth = whole.smoothed()
    np.testing.assert_array_equal(np.isnan(smooth.values), np.isnan(whole.values))
    if len(whole.known):
        slack = 1e-6 * (1 + np.abs(whole.known).max())
        assert whole.known.min() - slack <= smooth.known.min()
        assert smooth.known.max() <= whole.known.max() + slack


@pytest.mark.parametrize("num_points", [SMOOTHED_FROM, 400, 1000, 4321])
def test_one_value_is_spread_over_a_fortieth_of_the_points(num_points: int) -> None:
    spike = curve([10.0 if step == num_points // 2 else 0.0 for step in range(num_points)]).smoothed()
    touched = np.count_nonzero(spike.values > 1e-9)
    assert num_points / SMOOTHED_PART - 2 < touched <= num_points / SMOOTHED_PART
    assert touched >= 3


@pytest.mark.parametrize("num_points", [1, 6, 30, SMOOTHED_FROM - 1])
def test_few_points_stay_as_they_are(num_points: int) -> None:
    raw = curve(list(np.random.default_rng(0).normal(size=num_points)))
    np.testing.assert_allclose(raw.smoothed().values, raw.values, atol=1e-12)
