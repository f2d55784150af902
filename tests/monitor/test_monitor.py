"""Alerts at their exact thresholds, the summary, the gate, and the state."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_encdec.config.engine_rules import NATIVE_SCHEDULES
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig
from ds_encdec.monitor.monitor import MAX_ALERTS_OF_A_TYPE, MAX_HISTORY, TrainingMonitor, compute_gradient_norm


@dataclass(frozen=True)
class Limits:
    max_loss_after_warmup: float = 5.0
    min_loss_decrease: float = 1.0


def feed(monitor: TrainingMonitor, losses: list[float], *, first_step: int = 1, warmup_steps: int = 0) -> None:
    for step, loss in enumerate(losses, start=first_step):
        monitor.update(step, loss, 1.0, 1e-4, 1000.0, is_warmup=step <= warmup_steps)


@pytest.mark.parametrize(
    ("window_size", "losses", "steps"),
    [
        (100, [1.0, 3.0] * 5 + [4.0], []),  # the limit is twice the mean, 4.0
        (100, [1.0, 3.0] * 5 + [math.nextafter(4.0, 5.0)], [11]),
        (100, [2.0] * 9 + [100.0], []),  # it needs ten values
        (100, [2.0] * 10 + [100.0], [11]),
        (10, [100.0] * 10 + [1.0] * 10 + [2.5], [21]),  # what the window has forgotten does not count
    ],
)
def test_loss_spike_is_above_twice_the_window_mean(window_size: int, losses: list[float], steps: list[int]) -> None:
    monitor = TrainingMonitor(window_size)
    feed(monitor, losses)
    assert [(alert["type"], alert["step"]) for alert in monitor.alerts] == [("loss_spike", step) for step in steps]
    assert all(alert["value"] == losses[-1] for alert in monitor.alerts)


def test_the_messages(golden: Callable[[object], None]) -> None:
    monitor = TrainingMonitor(
        4, loss_plateau_steps=6, loss_plateau_min_decrease=0.5, loss_spike_min_values=4,
        planned_learning_rate=lambda index: 1e-3 * index,
    )  # fmt: skip
    for step, (loss, norm) in enumerate([(8.0, 1.0)] * 10 + [(17.0, 11.0), (math.nan, 1.0)], start=1):
        monitor.update(step, loss, norm, 1e-3 * (step - 1) * (1.002 if step == 5 else 1.0), math.nan)
    golden("\n".join(str(alert) for alert in monitor.alerts))
    gates = [watched.validate_phase(Limits()) for watched in (monitor, TrainingMonitor())]
    golden("\n".join(check["message"] for gate in gates for check in gate["checks"]))


@pytest.mark.parametrize(
    ("loss", "norm", "scaling", "alerts"),
    [
        (2.0, 10.0, False, []),
        (math.nan, 1.0, False, [("non_finite", "nan")]),
        (2.0, math.inf, False, [("non_finite", "inf")]),
        (99.0, math.nan, False, [("non_finite", "nan"), ("loss_spike", "99.0")]),
        (
            -math.inf,
            math.nextafter(10.0, 11.0),
            False,
            [("non_finite", "-inf"), ("grad_explosion", "10.000000000000002")],
        ),
        (2.0, math.inf, True, []),  # the search for a loss scale
        (math.nan, math.inf, True, [("non_finite", "nan")]),
    ],
)
def test_what_one_step_raises_and_what_is_not_finite_stays_out_of_the_statistics(
    loss: float, norm: float, scaling: bool, alerts: list[tuple[str, str]]
) -> None:
    monitor = TrainingMonitor(loss_scaling=scaling)
    feed(monitor, [2.0] * 10)
    seen = monitor.update(11, loss, norm, 1e-4, 0.0)
    assert [(alert["type"], str(alert["value"])) for alert in seen] == alerts
    finite_loss, finite_norm = math.isfinite(loss), math.isfinite(norm)
    assert (len(monitor.loss_window), len(monitor.grad_norm_window)) == (10 + finite_loss, 10 + finite_norm)
    assert monitor.max_loss == (loss if finite_loss else 2.0)


def test_the_first_finite_values_begin_the_statistics() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [math.nan, 2.0])
    assert (monitor.initial_loss, monitor.min_loss, monitor.warmup_complete_loss) == (2.0, 2.0, 2.0)
    for speed in (math.nan, 300.0):
        monitor.update(1, 2.0, 1.0, 1e-4, speed)
    assert list(monitor.throughput_window.values) == [1000.0, 1000.0, 300.0]


def test_a_step_that_was_not_applied_raises_its_alert_and_leaves_no_other_trace() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [2.0] * 10)
    before = monitor.state_dict()
    seen = monitor.update(10, 5.0, 20.0, 1e-4, math.nan, applied=False)
    assert [alert["type"] for alert in seen] == ["loss_spike", "grad_explosion"]
    after = monitor.state_dict()
    assert {name for name in after if after[name] != before[name]} == {"alerts", "steps"}
    assert [observation.applied for observation in monitor.history] == [True] * 10 + [False]


def test_refuses_compares_as_update_does_and_records_nothing() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [2.0] * 10)
    before = monitor.state_dict()
    assert monitor.refuses(4.0, 10.0) == set()
    assert monitor.refuses(4.1, 10.1) == {"loss_spike", "grad_explosion"}
    assert monitor.refuses(math.nan, 1.0) == {"non_finite"}
    assert monitor.state_dict() == before


def test_history_and_alerts_are_bounded_and_no_type_of_alert_pushes_another_out() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [2.0] * 10 + [5.0])
    for step in range(12, MAX_HISTORY + 12):
        monitor.update(step, 2.0, 11.0, 1e-4, math.nan)
    assert (len(monitor.history), monitor.history[-1].step) == (MAX_HISTORY, MAX_HISTORY + 11)
    assert [alert["step"] for alert in monitor.alerts if alert["type"] == "loss_spike"] == [11]
    explosions = [alert["step"] for alert in monitor.alerts if alert["type"] == "grad_explosion"]
    assert explosions == list(range(MAX_HISTORY + 12 - MAX_ALERTS_OF_A_TYPE, MAX_HISTORY + 12))
    resumed = TrainingMonitor()
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.alerts == monitor.alerts


def test_summary() -> None:
    monitor = TrainingMonitor(window_size=2)
    feed(monitor, [8.0, 9.0, 6.0, 5.0], warmup_steps=2)
    summary = monitor.get_summary()
    assert summary["loss"] == {
        "current": 5.5, "initial": 8.0, "after_warmup": 6.0, "min": 5.0, "max": 9.0, "decrease": 2.5
    }  # fmt: skip
    assert summary["grad_norm"] == {"mean": 1.0, "std": 0.0, "max": 1.0}
    assert summary["throughput"] == {"mean_tokens_per_sec": 1000.0}
    assert (summary["alerts"], summary["steps"]) == ([], 4)
    assert [observation.loss for observation in monitor.history] == [8.0, 9.0, 6.0, 5.0]


@pytest.mark.parametrize(
    ("losses", "warmup_steps", "spikes", "failed"),
    [
        ([6.0, 5.0, 4.0], 1, 5, []),  # at its exact limits
        ([6.0, 5.001, 3.9], 1, 0, ["loss_after_warmup"]),
        ([6.0, 5.0, 4.5], 1, 0, ["loss_decrease"]),  # the mean is 5.17
        ([6.0, 5.0, 4.0], 1, 6, ["loss_spikes"]),
        ([6.0, 2.0], 10, 0, ["loss_after_warmup"]),  # the warm-up never ended
        ([], 0, 0, ["loss_after_warmup", "loss_decrease"]),
    ],
)
def test_the_gate_and_the_reasons_for_which_it_fails(
    losses: list[float], warmup_steps: int, spikes: int, failed: list[str]
) -> None:
    monitor = TrainingMonitor()
    feed(monitor, losses, warmup_steps=warmup_steps)
    monitor.alerts += [{"type": "loss_spike"}] * spikes + [{"type": "grad_explosion"}] * 9
    result = monitor.validate_phase(Limits())
    assert result["passed"] == (not failed)
    assert [check["name"] for check in result["checks"] if not check["passed"]] == failed


def plateau_monitor(**changes: Any) -> TrainingMonitor:
    settings = {"window_size": 4, "loss_plateau_steps": 6, "loss_plateau_min_decrease": 0.5}
    return TrainingMonitor(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "losses", "warmup_steps", "steps"),
    [
        # Full at step 4, the window stays at 8 until 6 steps later; by step 34 its mean has stopped falling again.
        ({}, [8.0] * 30 + [4.0] * 30, 0, [10, 40]),
        ({}, [100.0 - 0.5 / 6 * 1.001 * step for step in range(20)], 0, []),  # it falls slowly
        ({}, [100.0 - 0.5 / 7 * 1.001 * step for step in range(20)], 0, [10, 17]),  # slower
        ({"loss_plateau_min_decrease": 0.0}, [2.0 + 0.01 * step for step in range(40)], 0, [10]),  # of the best mean
        ({}, [8.0] * 30, 20, [27]),
        ({"window_size": 100}, [8.0] * 99, 0, []),
    ],
)
def test_plateaus(changes: dict[str, Any], losses: list[float], warmup_steps: int, steps: list[int]) -> None:
    monitor = plateau_monitor(**changes)
    for step, loss in enumerate(losses, start=1):
        monitor.update(step, loss, 1.0, 1e-4, 1000.0, is_warmup=step <= warmup_steps)
        monitor.update(step, 1.0, 1.0, 1e-4, math.nan, applied=False)  # which neither begins nor ends a plateau
    assert [alert["step"] for alert in monitor.alerts if alert["type"] == "loss_plateau"] == steps


@pytest.mark.parametrize("schedule", [*NATIVE_SCHEDULES, "cosine", "linear", "constant", "wsd"])
def test_no_schedule_is_off_itself_and_each_is_that_runs_one_update_late(schedule: str) -> None:
    training = {"lr_scheduler_type": schedule, "num_train_steps": 80, "warmup_steps": 7, "learning_rate": 3e-4}
    config = FullConfig.model_validate({"training": training})
    monitor, late = TrainingMonitor.from_config(config), TrainingMonitor.from_config(config)
    for step in range(1, 81):
        rate = learning_rate(step - 1, config.training)
        if step % 9 == 0:
            monitor.update(step - 1, 2.0, 1.0, rate, math.nan, applied=False)
        monitor.update(step, 2.0, 1.0, rate, math.nan)
        late.update(step + 1, 2.0, 1.0, rate, math.nan)
    assert (monitor.steps, monitor.alerts) == (88, [])
    assert {alert["type"] for alert in late.alerts} == {"learning_rate_off"}


def test_a_wrong_rate_is_said_once_until_it_is_right_again() -> None:
    monitor = TrainingMonitor(planned_learning_rate=lambda index: 1e-3 * index)
    factors = {5: 1.002, 6: 1.01, 7: 0.5, 8: 1.0, 9: 1.0005, 10: 0.998}
    for step in range(1, 13):
        monitor.update(step, 2.0, 1.0, 1e-3 * (step - 1) * factors.get(step, 1.0), math.nan)
    found = [(alert["type"], alert["step"], alert["threshold"]) for alert in monitor.alerts]
    assert found == [("learning_rate_off", 5, 1e-3), ("learning_rate_off", 10, 1e-3)]
    assert monitor.alerts[0]["value"] == pytest.approx(0.002, rel=0.01)


value = st.floats(0.01, 20.0) | st.sampled_from([math.nan, math.inf])
step_values = st.tuples(value, value, st.sampled_from([1e-4, 2e-4]), st.booleans())


@settings(max_examples=60)
@given(st.lists(step_values, max_size=40), st.integers(0, 40))
@example([(2.0, 1.0, 1e-4, True)] * 6, 4)
def test_a_resume_at_any_point_changes_nothing(steps: list[tuple[float, float, float, bool]], cut: int) -> None:
    whole, first, resumed = (
        plateau_monitor(window_size=5, loss_spike_min_values=3, planned_learning_rate=lambda index: 1e-4)
        for _ in range(3)
    )
    for step, (loss, norm, rate, applied) in enumerate(steps):
        if step == cut:
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        for monitor in (whole, first if step < cut else resumed):
            monitor.update(step, loss, norm, rate, loss, is_warmup=step <= 3, applied=applied)
    assert (resumed if cut < len(steps) else first).state_dict() == whole.state_dict()


def test_gradient_norm() -> None:
    model = torch.nn.Linear(3, 2)
    assert compute_gradient_norm(model) == 0.0
    model.weight.grad = torch.full((2, 3), 2.0)
    assert compute_gradient_norm(model) == pytest.approx(math.sqrt(24), rel=1e-6)
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert compute_gradient_norm(model) == pytest.approx(7.0, rel=1e-6)


def test_a_gate_does_not_count_spikes_that_a_rollback_took_back() -> None:
    monitor, limits = TrainingMonitor(), Limits(max_loss_after_warmup=6.0)
    feed(monitor, [5.0] * 20 + [11.0])
    saved = json.loads(json.dumps(monitor.state_dict()))
    feed(monitor, [20.0, 25.0, 40.0, 50.0, 70.0, 90.0, 120.0], first_step=22)
    assert len(monitor.alerts) == 8
    assert not monitor.validate_phase(limits)["checks"][2]["passed"]
    monitor.go_back(saved)
    feed(monitor, [3.0] * 100, first_step=22)
    verdict = monitor.validate_phase(limits)
    assert verdict["passed"]
    assert verdict["checks"][2]["message"] == "1 loss spike, beside 7 that rollbacks took back; at most 5 are allowed"
    again = TrainingMonitor()
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.validate_phase(limits) == verdict
