"""What a rank measures of itself: memory, arithmetic, throughput and its clock."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from ds_encdec.monitor import machine
from ds_encdec.monitor.machine import (
    IntervalClock,
    Lap,
    measure_arithmetic,
    measure_rank_stats,
    performance_metrics,
)

LAP = Lap(3.0, 2.0, 1.0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_vitals_are_floats_in_one_row(device: str) -> None:
    taken = measure_rank_stats(torch.device(device), LAP, {})
    assert (taken.training_s, taken.data_wait_s, taken.exchange_wait_s) == (3.0, 2.0, 1.0)
    assert 0 < taken.arithmetic_s < 10
    assert 2**26 < taken.memory["host"] < 2**36
    assert set(taken.memory) - {"host", "peak"} == ({"device", "reserved"} if device == "cuda" else set())
    # The kernel brings its peak up to date a little later.
    assert taken.memory["peak"] >= taken.memory.get("device", 0.9 * taken.memory["host"])


def test_host_memory_is_that_of_now() -> None:
    def wait_until(reached: Callable[[float], bool]) -> None:
        """Kernels with many CPUs add a process's pages up later, some virtual machines only now and then."""
        deadline = time.monotonic() + 600
        while not reached(measure_rank_stats(torch.device("cpu"), LAP, {}).memory["host"] - before):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    before = measure_rank_stats(torch.device("cpu"), LAP, {}).memory["host"]
    ballast = torch.ones(2**27)  # far above what such a count is late by
    wait_until(lambda grown: grown > 2**28)
    del ballast
    wait_until(lambda grown: grown < 2**28)


@pytest.mark.parametrize("device", DEVICES)
def test_measuring_leaves_the_generators_alone_and_allocates_once(device: str) -> None:
    def state() -> tuple[list[int], list[int], int]:
        measure_arithmetic(torch.device(device))
        of_gpu = (torch.cuda.get_rng_state().tolist(), torch.cuda.memory_allocated()) if device == "cuda" else ([], 0)
        return torch.get_rng_state().tolist(), *of_gpu

    assert state() == state()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_queued_on_a_gpu_is_not_measured() -> None:
    device = torch.device("cuda")
    alone = statistics.median(measure_arithmetic(device) for _ in range(9))
    torch.cuda._sleep(2**31)  # about a second
    assert measure_arithmetic(device) < 2 * alone


def test_a_rank_without_a_core_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits, here asleep, it takes no CPU time. What MachineWatch makes of it: test_machine.py."""
    monkeypatch.setattr(machine, "_multiply", lambda device, times: time.sleep(0.02))
    used = time.thread_time()
    measured = measure_arithmetic(torch.device("cpu"))
    assert measured >= 0.02 > time.thread_time() - used


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    """Launchers and test runners may hold more than a small run does."""
    read = "m.peak_host_bytes() / psutil.Process().memory_info().rss"
    child = f"import psutil, ds_encdec.monitor.machine as m; print({read})"
    parent = (
        f"import subprocess, sys\nheld = b'1' * 2**30\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    printed = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True).stdout
    assert 0.9 < float(printed) < 2


def test_performance_of_an_interval() -> None:
    lap, figures = Lap(5.0, 0.5, 0.0), {"num_steps": 10, "tokens": 40_000, "num_devices": 4, "flops": 8e15}
    assert performance_metrics(lap, **figures, peak_flops_per_device=989e12) == {
        "perf/tokens_per_sec": 8000.0,
        "perf/tokens_per_sec_per_gpu": 2000.0,
        "perf/step_time_s": 0.5,
        "perf/data_wait_frac": 0.1,
        "perf/mfu": pytest.approx(1.6e15 / (4 * 989e12), rel=1e-12),
    }
    assert "perf/mfu" not in performance_metrics(lap, **figures)


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
