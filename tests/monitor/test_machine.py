"""Alerts of the machines at their exact thresholds, how long they must last, and when they are raised again."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor import machine
from ds_encdec.monitor.machine import (
    IntervalClock,
    Lap,
    MachineWatch,
    RankStats,
    measure_arithmetic,
    measure_rank_stats,
)

GIB = 2.0**30
WELL = RankStats(
    training_s=10.0,
    data_wait_s=0.1,
    exchange_wait_s=0.5,
    arithmetic_s=0.004,
    memory={"host": 8 * GIB, "device": 40 * GIB, "peak": 60 * GIB},
)


def with_memory(**memory: float) -> RankStats:
    return dataclasses.replace(WELL, memory={**WELL.memory, **memory})


def ranks(count: int = 4, **changed: dict[int, float]) -> list[RankStats]:
    """Ranks that are well but for `field={rank: value}`."""
    changes = [{name: values[rank] for name, values in changed.items() if rank in values} for rank in range(count)]
    return [dataclasses.replace(WELL, **change) for change in changes]


def slow(ratio: float, rank: int = 2) -> list[RankStats]:
    return ranks(4, arithmetic_s={rank: ratio * WELL.arithmetic_s})


def late(share: float, rank: int = 1) -> list[RankStats]:
    """`rank` arrives last and the others wait for `share` of the 10 s longer than it."""
    return ranks(4, exchange_wait_s={other: 0.25 + 10.0 * share * (other != rank) for other in range(4)})


def watch(**fields: float) -> MachineWatch:
    return MachineWatch(MonitorConfig.model_validate(fields))


def feed(
    machine: MachineWatch, intervals: list[list[RankStats]], *, speeds: list[float] | None = None, first: int = 1
) -> list[dict[str, Any]]:
    """The alerts of intervals 1, 2, …; their number is the step."""
    speeds = speeds or [1000.0] * len(intervals)
    return [
        alert
        for step, (rank_stats, speed) in enumerate(zip(intervals, speeds, strict=True), start=first)
        for alert in machine.update(step, rank_stats, tokens_per_second=speed)
    ]


def kinds(alerts: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(alert["type"], alert["step"]) for alert in alerts]


@pytest.mark.parametrize("share", [0.5, math.nextafter(0.5, 0)])
def test_throughput_drop_is_below_its_share_of_the_mean_three_times_in_a_row(share: float) -> None:
    means = [500.0, (7 * 500 + 250) / 8, (7 * 500 + 250 + 234.375) / 9]
    speeds = [1000.0] * 8 + [2 * share * mean for mean in means]
    alerts = feed(watch(), [ranks(2)] * 11, speeds=speeds)
    assert kinds(alerts) == [("throughput_drop", 11)] * (share < 0.5)
    for alert in alerts:
        assert alert["threshold"] == pytest.approx(0.5 * means[2])
        assert alert["value"] < alert["threshold"]


LOW = [1.0] * 3


@pytest.mark.parametrize(
    ("speeds", "steps"),
    [
        ([1000.0] * 5 + LOW, []),  # it needs five values, and the first interval is none
        ([1.0, math.nan] + [1000.0] * 5 + LOW, [10]),
        # once, and again when it came back in between
        ([1000.0] * 10 + [100.0, 100.0, 1000.0, 100.0, 100.0, 100.0, 100.0, 1000.0, 100.0, 100.0, 100.0], [16, 21]),
        ([1000.0] * 11 + [400.0] * 11 + [100.0] * 3, [14, 25]),  # a speed that stays becomes the usual one
    ],
)
def test_when_the_throughput_has_dropped(speeds: list[float], steps: list[int]) -> None:
    alerts = feed(watch(window_size=10), [ranks()] * len(speeds), speeds=speeds)
    assert kinds(alerts) == [("throughput_drop", step) for step in steps]


def test_throughput_survives_a_resume_on_fewer_ranks() -> None:
    machine, resumed = watch(), watch()
    feed(machine, [ranks(4)] * 7)
    resumed.throughput.load_state_dict(json.loads(json.dumps(machine.throughput.state_dict(), allow_nan=False)))
    speeds = [1.0, 500.0, 200.0, 150.0, 150.0]  # the first interval pays for the start
    assert kinds(feed(resumed, [ranks(2)] * 5, speeds=speeds, first=8)) == [("throughput_drop", 12)]


@pytest.mark.parametrize(
    ("intervals", "fields", "value", "threshold"),
    [
        ([slow(2.0)], {}, 2.0, 1.5),
        ([ranks(2, arithmetic_s={0: 1.6 * WELL.arithmetic_s})], {}, 1.6, 1.5),  # of two, compared with the other
        ([late(0.125)], {}, 0.125, 0.1),
        ([ranks(data_wait_s={1: 2.51})], {"data_wait_threshold": 0.25}, 0.251, 0.25),
        ([ranks(data_wait_s={rank: 9.0}) for rank in range(3)], {}, 0.9, 0.2),  # whichever rank it is
    ],
)
def test_a_fault_that_lasts_for_three_intervals_is_one_alert(
    intervals: list[list[RankStats]], fields: dict[str, float], value: float, threshold: float
) -> None:
    machine = watch(**fields)
    (alert,) = feed(machine, (intervals * 8)[:8])
    assert (alert["step"], alert["threshold"]) == (3, threshold)
    assert alert["value"] == pytest.approx(value)
    (again,) = feed(machine, [ranks(len(intervals[0])), *(intervals * 4)[:4]])  # when it came back
    assert again["step"] == 4


@pytest.mark.parametrize(
    "intervals",
    [
        [slow(9.0), slow(9.0), ranks()] * 4,
        [late(0.9, rank) for rank in (0, 0, 1, 1, 2, 3)],
        [slow(9.0, 1), late(0.9, 1)] * 4,
        [slow(1.5)] * 4 + [late(0.1)] * 4,  # at the thresholds
        [[dataclasses.replace(WELL, arithmetic_s=9.0, exchange_wait_s=9.0)]] * 5,  # nobody waits for a single rank
        [[dataclasses.replace(WELL, memory={"host": 8 * GIB, "peak": 9 * GIB})] * 2] * 8,  # without an accelerator
    ],
)
def test_noise_is_no_alert(intervals: list[list[RankStats]]) -> None:
    assert feed(watch(), intervals) == []


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([90.0, 6.0, 8.0, 7.0, 10.0], []),  # a quarter above the largest of intervals two to four is reached
        ([90.0, 6.0, 8.0, 7.0, 10.01], [5]),
        ([8.0] * 4 + [9.9, 10.4, 10.4, 12.9, 10.0, 13.1, 13.1], [6, 10]),  # 13.0 is a quarter above 10.4
    ],
)
def test_memory_growth(sizes: list[float], steps: list[int]) -> None:
    alerts = feed(watch(), [[with_memory(host=size * GIB), WELL] for size in sizes])
    assert kinds(alerts) == [("memory_growth", step) for step in steps]


def test_what_the_first_save_keeps_is_no_growth_and_what_later_ones_keep_is() -> None:
    machine, more, much = watch(), with_memory(host=16 * GIB), with_memory(host=21 * GIB)
    feed(machine, [ranks()] * 6)
    machine.note_save()
    assert feed(machine, [[more, more]] * 6) == []
    machine.note_save()
    assert kinds(feed(machine, [[much, more]])) == [("memory_growth", 1)]


def test_the_messages(golden: Callable[[object], None]) -> None:
    slower = feed(watch(), [ranks(2)] * 11, speeds=[1000.0] * 8 + [1.0] * 3)
    grown = [with_memory(host=20 * GIB, device=(70 + rank) * GIB) for rank in range(4)]
    bigger = feed(watch(), [ranks()] * 4 + [grown] * 3)
    two_slow = ranks(8, arithmetic_s={3: 0.04, 6: 0.02})
    lasting = [
        alert for bad in (two_slow, late(0.125), ranks(data_wait_s={1: 2.51})) for alert in feed(watch(), [bad] * 4)
    ]
    golden("\n".join(alert["message"] for alert in [*slower, *bigger, *lasting]))


def test_metrics_name_the_largest_the_slowest_and_the_latest() -> None:
    rank_stats = ranks(4, arithmetic_s={1: 0.006}, exchange_wait_s={0: 0.25})
    rank_stats[2:] = with_memory(host=9 * GIB), with_memory(peak=70 * GIB)
    held = {"weights": 6, "host_states": 0}  # of the engine
    sizes = [{**one.memory, **held, "reserved": rank * GIB} for rank, one in enumerate(rank_stats)]
    rank_stats = [dataclasses.replace(one, memory=memory) for one, memory in zip(rank_stats, sizes, strict=True)]
    assert MachineWatch.metrics(rank_stats) == {
        "mem/host_bytes": 9 * GIB,
        "mem/device_bytes": 40 * GIB,
        "mem/peak_bytes": 70 * GIB,
        "mem/weights_bytes": 6,
        "mem/reserved_bytes": 3 * GIB,
        "health/slowest_rank": 1,
        "health/slowest_rank_ratio": 1.5,
        "health/latest_rank": 0,
        "health/latest_rank_late_frac": 0.025,
    }
    alone = MachineWatch.metrics([dataclasses.replace(WELL, memory={"host": 8.0, "peak": 9.0})])
    assert alone == {"mem/host_bytes": 8.0, "mem/peak_bytes": 9.0}


LAP = Lap(3.0, 2.0, 1.0)
CPU = torch.device("cpu")


def test_vitals_are_floats_in_one_row() -> None:
    taken = measure_rank_stats(CPU, LAP, {})
    assert (taken.training_s, taken.data_wait_s, taken.exchange_wait_s) == (3.0, 2.0, 1.0)
    assert 0 < taken.arithmetic_s < 10
    assert 2**26 < taken.memory["host"] < 2**36
    # The kernel brings its peak up to date a little later.
    assert taken.memory["peak"] >= 0.9 * taken.memory["host"]


def test_measuring_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    measure_arithmetic(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_without_a_core_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_multiply", lambda device, times: time.sleep(0.02))
    used = time.thread_time()
    measured = measure_arithmetic(CPU)
    assert measured >= 0.02 > time.thread_time() - used


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    read = "m.peak_host_bytes() / psutil.Process().memory_info().rss"
    child = f"import psutil, ds_encdec.monitor.machine as m; print({read})"
    parent = (
        f"import subprocess, sys\nheld = b'1' * 2**30\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    printed = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True).stdout
    assert 0.9 < float(printed) < 2


def test_the_peak_is_known_where_proc_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Path, "read_text", Mock(side_effect=OSError))
    assert machine.peak_host_bytes() > 2**26


def test_clock_leaves_out_pauses_and_counts_waits_and_starts_again() -> None:
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
