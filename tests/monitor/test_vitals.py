"""What a rank measures of itself, and a rank that really is slow."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.machine import MachineWatch
from ds_encdec.monitor.vitals import RankVitals, measure_arithmetic, take_vitals

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]

RANK = """
import sys, torch
from ds_encdec.monitor.vitals import measure_arithmetic
print(measure_arithmetic(torch.device("cpu")), flush=True)
for line in sys.stdin:
    print(measure_arithmetic(torch.device("cpu")), flush=True)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_vitals_are_floats_in_one_row(device: str) -> None:
    vitals = take_vitals(torch.device(device), training_s=3.0, data_wait_s=2.0, exchange_wait_s=1.0)
    assert (vitals.training_s, vitals.data_wait_s, vitals.exchange_wait_s) == (3.0, 2.0, 1.0)
    assert 0 < vitals.arithmetic_s < 1
    assert 2**26 < vitals.host_bytes < 2**36
    assert (vitals.device_bytes > 0) == (device == "cuda")
    # The kernel brings its peak up to date a little later.
    assert vitals.peak_bytes >= (vitals.device_bytes or 0.9 * vitals.host_bytes)


def test_host_memory_is_that_of_now() -> None:
    def host_bytes() -> float:
        device = torch.device("cpu")
        return take_vitals(device, training_s=0.0, data_wait_s=0.0, exchange_wait_s=0.0).host_bytes

    before = host_bytes()
    ballast = torch.ones(2**24)
    held = host_bytes()
    del ballast
    assert held - before == pytest.approx(2**26, rel=0.1)
    assert host_bytes() - before < 2**24


@pytest.mark.parametrize("device", DEVICES)
def test_measuring_leaves_the_generators_alone_and_allocates_once(device: str) -> None:
    measure_arithmetic(torch.device(device))
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    measure_arithmetic(torch.device(device))
    after = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
    assert all(torch.equal(one, other) for one, other in zip(states, after, strict=True))
    assert (torch.cuda.memory_allocated() if device == "cuda" else 0) == allocated


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_queued_on_a_gpu_is_not_measured() -> None:
    device = torch.device("cuda")
    alone = statistics.median(measure_arithmetic(device) for _ in range(9))
    torch.cuda._sleep(2**31)  # about a second
    assert measure_arithmetic(device) < 2 * alone


@contextmanager
def two_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that answer each line with their `measure_arithmetic`; both have measured once."""
    command = [sys.executable, "-c", RANK]
    # Without threads: a priority is a thread's own.
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    }
    ranks = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@contextmanager
def crowded_out(rank: subprocess.Popen[str]) -> Iterator[None]:
    """Puts `rank` on one core with a busy program that goes first (it gets some 3 % of the core)."""
    core = {max(os.sched_getaffinity(0))}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, core)
    os.sched_setaffinity(rank.pid, core)
    os.setpriority(os.PRIO_PROCESS, rank.pid, 15)
    try:
        ask(rank)  # who has slept may go first for once
        yield
    finally:
        busy.kill()
        busy.wait()


def ask(rank: subprocess.Popen[str]) -> float:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    return float(rank.stdout.readline())


def test_a_rank_whose_core_is_taken_away_is_the_straggler() -> None:
    """Other tests share the cores: their noise only adds, and is small beside the wait of a rank that has no core.

    So rank 0 counts with the least of five measurements, and rank 1 with their mean: one of them may pass before the
    scheduler takes the core away.
    """
    with two_ranks() as ranks:
        usual: list[list[float]] = [[], []]
        for _ in range(20):
            for _ in range(5):
                for seconds, rank in zip(usual, ranks, strict=True):
                    seconds.append(ask(rank))
            if 1 / 1.5 < min(usual[1]) / min(usual[0]) < 1.5:
                break
        else:
            pytest.fail(f"two like ranks are not alike: {[min(seconds) for seconds in usual]}")
        with crowded_out(ranks[1]):
            intervals = [
                [min(ask(ranks[0]) for _ in range(5)), statistics.fmean(ask(ranks[1]) for _ in range(5))]
                for _ in range(3)
            ]
    machine = MachineWatch(MonitorConfig())
    alerts = []
    for step, seconds in enumerate(intervals, start=1):
        vitals = [RankVitals(1.0, 0.0, 0.0, arithmetic_s, 1e9, 0.0, 1e9) for arithmetic_s in seconds]
        alerts += machine.update(step, vitals, tokens_per_second=1.0)
    assert [(alert["type"], alert["step"]) for alert in alerts] == [("straggler", 3)]
    assert "rank 1 is slow" in alerts[0]["message"]
