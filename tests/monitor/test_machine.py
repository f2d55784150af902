"""Alerts of the machines at their exact thresholds, how long they must last, and when they are raised again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
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


def slow(ratio: float, rank: int = 2) -> list[RankStats]:
    return ranks(4, arithmetic_s={rank: ratio * WELL.arithmetic_s})


def late(share: float, rank: int = 1) -> list[RankStats]:
    """`rank` arrives last and the others wait for `share` of the 10 s longer than it."""
    return ranks(4, exchange_wait_s={other: 0.25 + 10.0 * share * (other != rank) for other in range(4)})


def host(*gib: float) -> list[RankStats]:
    return [with_memory(host=value * GIB) for value in gib]


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


def dropped(speeds: list[float], **fields: float) -> list[int]:
    """The intervals with an alert of the throughput."""
    alerts = feed(watch(**fields), [ranks()] * len(speeds), speeds=speeds)
    assert {alert["type"] for alert in alerts} <= {"throughput_drop"}
    return [alert["step"] for alert in alerts]


@pytest.mark.parametrize("share", [0.5, math.nextafter(0.5, 0)])
def test_throughput_drop_is_below_its_share_of_the_mean_three_times_in_a_row(share: float) -> None:
    """The window of 2 ranks holds 500 until interval 8; what it is then compared with falls with each low value."""
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
        ([1000.0] * 5 + [math.nan, *LOW], []),  # nor is what was not measured
        ([1.0] + [1000.0] * 5 + LOW, [9]),
        # once, and again when it came back in between
        ([1000.0] * 10 + [100.0, 100.0, 1000.0, 100.0, 100.0, 100.0, 100.0, 1000.0, 100.0, 100.0, 100.0], [16, 21]),
    ],
)
def test_when_a_throughput_drop_is_said(speeds: list[float], steps: list[int]) -> None:
    assert dropped(speeds) == steps


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
def test_what_lasts_for_three_intervals_is_one_alert(
    intervals: list[list[RankStats]], fields: dict[str, float], value: float, threshold: float
) -> None:
    (alert,) = feed(watch(**fields), (intervals * 8)[:8])
    assert (alert["step"], alert["threshold"]) == (3, threshold)
    assert alert["value"] == pytest.approx(value)


def test_data_wait_is_said_again_when_it_came_back() -> None:
    waits = [ranks(data_wait_s={0: 9.0})] * 4
    assert kinds(feed(watch(), [*waits, ranks(), *waits])) == [("data_wait", 3), ("data_wait", 8)]


def test_each_slow_rank_is_named() -> None:
    alerts = feed(watch(), [ranks(8, arithmetic_s={3: 0.04, 6: 0.02})] * 4)
    assert [one["message"].split(" is ")[0] for one in alerts] == ["step 3: rank 3", "step 3: rank 6"]


@pytest.mark.parametrize(
    "intervals",
    [
        [slow(9.0), slow(9.0), ranks()] * 4,
        [slow(9.0, rank) for rank in (0, 1, 2, 3, 3, 0)],
        [late(0.9, rank) for rank in (0, 0, 1, 1, 2, 3)],
        [slow(9.0, 1), late(0.9, 1)] * 4,
        [ranks(data_wait_s={1: 2.0})] * 4,
        [ranks()] * 8,
        [[dataclasses.replace(WELL, arithmetic_s=9.0, exchange_wait_s=9.0)]] * 5,  # nobody waits for a single rank
        [[dataclasses.replace(WELL, memory={"host": 8 * GIB, "peak": 9 * GIB})] * 2] * 8,  # without an accelerator
    ],
)
def test_noise_is_no_alert(intervals: list[list[RankStats]]) -> None:
    assert feed(watch(), intervals) == []


def test_thresholds_of_stragglers_are_exceeded_not_reached() -> None:
    machine = watch(straggler_threshold=2.0, straggler_late_threshold=0.125)
    assert feed(machine, [slow(2.0)] * 4 + [late(0.125)] * 4) == []
    assert kinds(feed(machine, [slow(math.nextafter(2.0, 3.0))] * 3)) == [("straggler", 3)]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([90.0, 6.0, 8.0, 7.0, 10.0], []),  # a quarter above the largest of intervals two to four is reached
        ([90.0, 6.0, 8.0, 7.0, 10.01], [5]),
        ([8.0] * 4 + [9.9, 10.4, 10.4, 12.9, 10.0, 13.1, 13.1], [6, 10]),  # 13.0 is a quarter above 10.4
    ],
)
def test_memory_growth(sizes: list[float], steps: list[int]) -> None:
    assert kinds(feed(watch(), [host(size, 8) for size in sizes])) == [("memory_growth", step) for step in steps]


def test_ranks_that_grow_together_are_one_alert_of_each_memory() -> None:
    grown = [with_memory(host=20 * GIB, device=(70 + rank) * GIB) for rank in range(4)]
    host_alert, device_alert = feed(watch(), [ranks()] * 4 + [grown] * 3)
    assert "host memory of rank 0" in host_alert["message"]
    assert "device memory of rank 3 has grown from 40 GiB to 73 GiB" in device_alert["message"]


def test_what_the_first_save_keeps_is_no_growth_and_what_later_ones_keep_is() -> None:
    machine = watch()
    feed(machine, [host(8.0, 8.0)] * 6)
    machine.note_save()
    assert feed(machine, [host(16.0, 16.0)] * 6) == []
    machine.note_save()
    assert kinds(feed(machine, [host(21.0, 16.0)])) == [("memory_growth", 1)]


def test_the_messages(golden: Callable[[object], None]) -> None:
    slower = feed(watch(), [ranks(2)] * 11, speeds=[1000.0] * 8 + [1.0] * 3)
    grown = feed(watch(), [host(8, 8)] * 4 + [host(8, 10.4)])
    lasting = [feed(watch(), [bad] * 3)[0] for bad in (slow(2.0), late(0.125), ranks(data_wait_s={1: 2.51}))]
    golden("\n".join(alert["message"] for alert in [*slower, *grown, *lasting]))


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
    assert MachineWatch.metrics([dataclasses.replace(WELL, memory={"host": 8.0, "peak": 9.0})]) == {
        "mem/host_bytes": 8.0,
        "mem/peak_bytes": 9.0,
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
@given(st.builds(RankStats, *[positive] * 4, memory), st.integers(1, 5), positive, st.integers(2, 9))
def test_what_stays_the_same_is_no_alert_but_a_wait_for_data(
    rank_stats: RankStats, count: int, speed: float, window_size: int
) -> None:
    machine = watch(window_size=window_size)
    alerts = feed(machine, [[rank_stats] * count] * 20, speeds=[speed] * 20)
    waits = rank_stats.data_wait_s / rank_stats.training_s > 0.2
    assert kinds(alerts) == [("data_wait", 3)] * waits
    assert len(machine.throughput) == window_size
