"""Throughput and its clock."""

from __future__ import annotations

import time

import pytest

from ds_encdec.monitor.machine import IntervalClock, Lap, performance_metrics


def test_performance_of_an_interval() -> None:
    metrics = performance_metrics(
        Lap(training_s=5.0, data_wait_s=0.5, exchange_wait_s=0.0),
        num_steps=10,
        tokens=40_000,
        num_devices=4,
        flops=8e15,
        peak_flops_per_device=989e12,
    )
    assert metrics == {
        "perf/tokens_per_sec": 8000.0,
        "perf/tokens_per_sec_per_gpu": 2000.0,
        "perf/step_time_s": 0.5,
        "perf/data_wait_frac": 0.1,
        "perf/mfu": pytest.approx(1.6e15 / (4 * 989e12), rel=1e-12),
    }


def test_no_mfu_where_the_peak_is_not_known() -> None:
    metrics = performance_metrics(Lap(1.0, 0.0, 0.0), num_steps=1, tokens=1, num_devices=1, flops=1e12)
    assert "perf/mfu" not in metrics


def test_clock_leaves_out_pauses_and_counts_waits_and_starts_anew() -> None:
    clock = IntervalClock()
    time.sleep(0.3)  # set-up, before the first batch
    with clock.spent_on("data"):
        time.sleep(0.05)
    with clock.spent_on("pause"):
        time.sleep(0.3)
    lap = clock.lap()
    assert 0.05 <= lap.data_wait_s <= lap.training_s < 0.3
    second = clock.lap()
    assert second.data_wait_s == 0.0
    assert second.training_s < lap.training_s
