"""Alerts of the machines at their exact thresholds, how long they must last, and when they are raised again."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_encdec.config.schema import MonitorConfig
from ds_encdec.monitor.machine import MachineWatch, RankStats

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


# Throughput


@pytest.mark.parametrize(("share", "expected"), [(0.5, []), (math.nextafter(0.5, 0), [("throughput_drop", 11)])])
def test_throughput_drop_is_below_its_share_of_the_mean_three_times_in_a_row(
    share: float, expected: list[tuple[str, int]]
) -> None:
    """The window of 2 ranks holds 500 until interval 8; what it is then compared with falls with each low value."""
    means = [500.0, (7 * 500 + 250) / 8, (7 * 500 + 250 + 234.375) / 9]
    speeds = [1000.0] * 8 + [2 * share * mean for mean in means]
    alerts = feed(watch(), [ranks(2)] * 11, speeds=speeds)
    assert kinds(alerts) == expected
    for alert in alerts:
        assert alert["threshold"] == pytest.approx(0.5 * means[2])
        assert alert["value"] < alert["threshold"]
        assert re.search(r"^step 11: [\d,]+ tokens/s over all ranks are below 443, ", alert["message"])
        assert alert["message"].endswith(
            ", monitor.throughput_drop_threshold=0.5 times the mean of the intervals before"
        )


def test_throughput_needs_five_values_without_the_first_interval_and_what_was_not_measured() -> None:
    low = [1.0] * 3
    assert feed(watch(), [ranks()] * 8, speeds=[1000.0] * 5 + low) == []  # the first of them is the fifth value
    assert feed(watch(), [ranks()] * 9, speeds=[1000.0] * 5 + [math.nan, *low]) == []
    assert kinds(feed(watch(), [ranks()] * 9, speeds=[1.0] + [1000.0] * 5 + low)) == [("throughput_drop", 9)]


def test_throughput_drop_is_said_once_and_again_when_it_came_back_in_between() -> None:
    low = [100.0] * 3
    speeds = [1000.0] * 10 + [100.0, 100.0, 1000.0] + [*low, 100.0, 1000.0] + low
    assert kinds(feed(watch(), [ranks()] * 21, speeds=speeds)) == [("throughput_drop", 16), ("throughput_drop", 21)]


def test_a_speed_that_stays_becomes_the_usual_one() -> None:
    speeds = [1000.0] * 11 + [400.0] * 11 + [100.0] * 3
    alerts = feed(watch(window_size=10), [ranks()] * 25, speeds=speeds)
    assert kinds(alerts) == [("throughput_drop", 14), ("throughput_drop", 25)]
    assert alerts[1]["threshold"] == 42.5  # half of the mean of eight times 100 and twice 25, of each rank


def test_throughput_survives_a_resume_on_fewer_ranks() -> None:
    machine, resumed = watch(), watch()
    feed(machine, [ranks(4)] * 7)
    resumed.throughput.load_state_dict(json.loads(json.dumps(machine.throughput.state_dict(), allow_nan=False)))
    speeds = [1.0, 500.0, 200.0, 150.0, 150.0]  # the first interval pays for the start
    assert kinds(feed(resumed, [ranks(2)] * 5, speeds=speeds, first=8)) == [("throughput_drop", 12)]


# Stragglers


def slow(ratio: float, rank: int = 2) -> list[RankStats]:
    return ranks(4, arithmetic_s={rank: ratio * WELL.arithmetic_s})


def late(share: float, rank: int = 1) -> list[RankStats]:
    """`rank` arrives last and the others wait for `share` of the 10 s longer than it."""
    return ranks(4, exchange_wait_s={other: 0.25 + 10.0 * share * (other != rank) for other in range(4)})


def test_a_rank_that_is_slow_three_times_in_a_row_is_a_straggler() -> None:
    (alert,) = feed(watch(), [slow(2.0)] * 8)
    both = ranks(8, arithmetic_s={3: 0.04, 6: 0.02})
    assert [one["message"].split(" is ")[0] for one in feed(watch(), [both] * 4)] == [
        "step 3: rank 3",
        "step 3: rank 6",
    ]
    assert (alert["type"], alert["step"], alert["threshold"]) == ("straggler", 3, 1.5)
    assert alert["value"] == pytest.approx(2.0)
    assert (
        "rank 2 is slow: for the same arithmetic it takes 2.00 times as long as the median rank, "
        "more than monitor.straggler_threshold=1.5 times" in alert["message"]
    )


def test_a_rank_that_is_late_three_times_in_a_row_is_a_straggler() -> None:
    (alert,) = feed(watch(), [late(0.125)] * 8)
    assert (alert["type"], alert["step"], alert["value"], alert["threshold"]) == ("straggler", 3, 0.125, 0.1)
    assert alert["message"] == (
        "step 3: rank 1 is late: others wait for it before the steps for 12.5% of the time, more than the share "
        "monitor.straggler_late_threshold=0.1"
    )


def test_straggler_thresholds_are_exceeded_not_reached() -> None:
    machine = watch(straggler_threshold=2.0, straggler_late_threshold=0.125)
    assert feed(machine, [slow(2.0)] * 4 + [late(0.125)] * 4) == []
    assert kinds(feed(machine, [slow(math.nextafter(2.0, 3.0))] * 3)) == [("straggler", 3)]


@pytest.mark.parametrize(
    "intervals",
    [
        [slow(9.0), slow(9.0), ranks()] * 4,
        [slow(9.0, rank) for rank in (0, 1, 2, 3, 3, 0)],
        [late(0.9, rank) for rank in (0, 0, 1, 1, 2, 3)],
        [slow(9.0, 1), late(0.9, 1)] * 4,
        [ranks()] * 8,
    ],
)
def test_noise_is_no_straggler(intervals: list[list[RankStats]]) -> None:
    assert feed(watch(), intervals) == []


def test_of_two_ranks_the_slow_one_is_compared_with_the_other() -> None:
    machine = watch()
    two = ranks(2, arithmetic_s={0: 1.6 * WELL.arithmetic_s})
    (alert,) = feed(machine, [two] * 3)
    assert alert["value"] == pytest.approx(1.6)
    assert machine.metrics(two)["health/slowest_rank"] == 0


def test_one_rank_has_nobody_to_wait_for_it() -> None:
    alone = [dataclasses.replace(WELL, arithmetic_s=9.0, exchange_wait_s=9.0)]
    machine = watch()
    assert feed(machine, [alone] * 5) == []
    assert set(machine.metrics(alone)) == {"mem/host_bytes", "mem/device_bytes", "mem/peak_bytes"}


# Memory


def host(*gib: float) -> list[RankStats]:
    return [with_memory(host=value * GIB) for value in gib]


@pytest.mark.parametrize(("later", "expected"), [(10.0, []), (10.01, [("memory_growth", 5)])])
def test_memory_growth_is_above_the_largest_of_intervals_two_to_four(
    later: float, expected: list[tuple[str, int]]
) -> None:
    intervals = [host(90.0, 8), host(6.0, 8), host(8.0, 8), host(7.0, 8), host(later, 8)]
    assert kinds(feed(watch(), intervals)) == expected


def test_memory_growth_is_said_again_only_after_as_much_growth() -> None:
    sizes = [8.0] * 4 + [9.9, 10.4, 10.4, 12.9, 10.0, 13.1, 13.1]  # 13.0 is a quarter above 10.4
    alerts = feed(watch(), [host(8.0, size) for size in sizes])
    assert kinds(alerts) == [("memory_growth", 6), ("memory_growth", 10)]
    assert alerts[0]["value"] == pytest.approx(0.3)
    assert alerts[0]["threshold"] == 0.25
    assert alerts[0]["message"].partition(": ")[2] == (
        "host memory of rank 1 has grown from 8 GiB to 10.4 GiB; that of 1 of 2 ranks by more than the share "
        "monitor.memory_growth_threshold=0.25"
    )


def test_ranks_that_grow_together_are_one_alert_of_each_memory() -> None:
    grown = [with_memory(host=20 * GIB, device=(70 + rank) * GIB) for rank in range(4)]
    host_alert, device_alert = feed(watch(), [ranks()] * 4 + [grown] * 3)
    assert "host memory of rank 0" in host_alert["message"]
    assert "device memory of rank 3 has grown from 40 GiB to 73 GiB" in device_alert["message"]


def test_without_an_accelerator_there_is_no_device_memory() -> None:
    on_cpu = [dataclasses.replace(WELL, memory={"host": 8 * GIB, "peak": 9 * GIB})] * 2
    machine = watch()
    assert feed(machine, [on_cpu] * 8) == []
    assert "mem/device_bytes" not in machine.metrics(on_cpu)


def test_what_the_first_save_keeps_is_no_growth_and_what_later_ones_keep_is() -> None:
    machine = watch()
    feed(machine, [host(8.0, 8.0)] * 6)
    machine.note_save()
    assert feed(machine, [host(16.0, 16.0)] * 6) == []
    machine.note_save()
    assert kinds(feed(machine, [host(21.0, 16.0)])) == [("memory_growth", 1)]


# Waiting for data


@pytest.mark.parametrize(("seconds", "expected"), [(2.5, []), (2.51, [("data_wait", 3)])])
def test_data_wait_is_a_share_of_the_time_three_times_in_a_row(seconds: float, expected: list[tuple[str, int]]) -> None:
    turns = [ranks(data_wait_s={rank: 9.0}) for rank in range(4)]
    assert kinds(feed(watch(), [*turns, ranks(), *turns])) == [("data_wait", 3), ("data_wait", 8)]
    machine = watch(data_wait_threshold=0.25)
    alerts = feed(machine, [ranks(data_wait_s={1: seconds})] * 5)
    assert kinds(alerts) == expected
    for alert in alerts:
        assert (alert["value"], alert["threshold"]) == (0.251, 0.25)
        assert alert["message"] == (
            "step 3: rank 1 waits for its next batch for 25.1% of the time, more than the share "
            "monitor.data_wait_threshold=0.25 in 3 logging intervals in a row"
        )


# All together


def test_metrics_name_the_largest_the_slowest_and_the_latest() -> None:
    rank_stats = ranks(4, arithmetic_s={1: 0.006}, exchange_wait_s={0: 0.25})
    rank_stats[2:] = with_memory(host=9 * GIB), with_memory(peak=70 * GIB)
    assert MachineWatch.metrics(rank_stats) == {
        "mem/host_bytes": 9 * GIB,
        "mem/device_bytes": 40 * GIB,
        "mem/peak_bytes": 70 * GIB,
        "health/slowest_rank": 1,
        "health/slowest_rank_ratio": 1.5,
        "health/latest_rank": 0,
        "health/latest_rank_late_frac": 0.025,
    }


def test_what_engines_hold_is_told_by_category_of_the_rank_that_holds_most() -> None:
    held = {0: {"weights": 4, "gradients": 9, "host_states": 0}, 1: {"weights": 6, "gradients": 8, "host_states": 0}}
    rank_stats = [with_memory(**held[rank], reserved=(rank + 1) * GIB) for rank in range(2)]
    metrics = MachineWatch.metrics(rank_stats)
    assert (metrics["mem/weights_bytes"], metrics["mem/gradients_bytes"]) == (6, 9)
    assert metrics["mem/reserved_bytes"] == 2 * GIB
    assert "mem/host_states_bytes" not in metrics


positive = st.floats(1e-4, 1e4)
memory = st.fixed_dictionaries({"host": positive, "device": positive})


@settings(deadline=None, max_examples=50)
@given(
    st.builds(RankStats, *[positive] * 4, memory),
    st.integers(1, 5),
    positive,
    st.integers(2, 9),
)
def test_what_stays_the_same_is_no_alert_but_a_wait_for_data(
    rank_stats: RankStats, count: int, speed: float, window_size: int
) -> None:
    machine = watch(window_size=window_size)
    alerts = feed(machine, [[rank_stats] * count] * 20, speeds=[speed] * 20)
    waits = rank_stats.data_wait_s / rank_stats.training_s > 0.2
    assert kinds(alerts) == [("data_wait", 3)] * waits
    assert len(machine.throughput) == window_size
