"""Alerts at their exact thresholds, the summary, the gate, and the state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch

from ds_encdec.monitor.monitor import TrainingMonitor, compute_gradient_norm


@dataclass(frozen=True)
class Limits:
    max_loss_after_warmup: float = 5.0
    min_loss_decrease: float = 1.0


def feed(monitor: TrainingMonitor, losses: list[float], *, first_step: int = 1, warmup_steps: int = 0) -> None:
    for step, loss in enumerate(losses, start=first_step):
        monitor.update(step, loss, 1.0, 1e-4, 1000.0, is_warmup=step <= warmup_steps)


@pytest.mark.parametrize(("loss", "expected"), [(4.0, 0), (math.nextafter(4.0, 5.0), 1)])
def test_loss_spike_is_above_twice_the_window_mean(loss: float, expected: int) -> None:
    monitor = TrainingMonitor()
    feed(monitor, [1.0, 3.0] * 5)
    new = monitor.update(11, loss, 1.0, 1e-4, 0.0, False)
    assert len(new) == len(monitor.alerts) == expected
    if expected:
        alert = monitor.alerts[0]
        assert set(alert) == {"type", "step", "value", "threshold", "message"}
        assert (alert["type"], alert["step"], alert["value"], alert["threshold"]) == ("loss_spike", 11, loss, 4.0)


@pytest.mark.parametrize(("values_before", "expected"), [(9, 0), (10, 1)])
def test_loss_spike_needs_ten_values(values_before: int, expected: int) -> None:
    monitor = TrainingMonitor()
    feed(monitor, [2.0] * values_before + [100.0])
    assert len(monitor.alerts) == expected


def test_spike_is_measured_against_the_window_only() -> None:
    monitor = TrainingMonitor(window_size=10)
    feed(monitor, [100.0] * 10 + [1.0] * 10 + [2.5])
    assert [alert["step"] for alert in monitor.alerts] == [21]


@pytest.mark.parametrize(("norm", "expected"), [(10.0, 0), (math.nextafter(10.0, 11.0), 1)])
def test_grad_explosion_is_above_ten(norm: float, expected: int) -> None:
    monitor = TrainingMonitor()
    monitor.update(1, 2.0, norm, 1e-4, 0.0)
    assert [alert["type"] for alert in monitor.alerts] == ["grad_explosion"] * expected


def test_thresholds_can_be_set() -> None:
    monitor = TrainingMonitor(loss_spike_threshold=3.0, grad_norm_threshold=1.0)
    feed(monitor, [1.0] * 10 + [2.9])
    monitor.update(12, 1.0, 1.1, 1e-4, 0.0)
    assert [alert["type"] for alert in monitor.alerts] == ["grad_explosion"]


def test_non_finite_values_alert_and_stay_out_of_the_windows() -> None:
    monitor = TrainingMonitor()
    monitor.update(1, math.nan, math.inf, 1e-4, 0.0)
    feed(monitor, [2.0], first_step=2)
    assert [alert["type"] for alert in monitor.alerts] == ["loss_spike", "grad_explosion"]
    assert (monitor.loss_window.mean, monitor.grad_norm_window.mean) == (2.0, 1.0)
    assert monitor.initial_loss == 2.0


def test_summary() -> None:
    monitor = TrainingMonitor(window_size=2)
    feed(monitor, [8.0, 9.0, 6.0, 5.0], warmup_steps=2)
    summary = monitor.get_summary()
    assert summary["loss"] == {
        "current": 5.0, "initial": 8.0, "after_warmup": 6.0, "min": 5.0, "max": 9.0, "decrease": 3.0
    }  # fmt: skip
    assert summary["grad_norm"] == {"mean": 1.0, "std": 0.0, "max": 1.0}
    assert summary["throughput"] == {"mean_tokens_per_sec": 1000.0}
    assert (summary["alerts"], summary["steps"]) == ([], 4)
    assert [observation.loss for observation in monitor.history] == [8.0, 9.0, 6.0, 5.0]


def test_gate_passes_at_its_exact_limits() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [6.0, 5.0], warmup_steps=1)
    result = monitor.validate_phase(Limits(5.0, 1.0))
    assert result["passed"]
    assert [check["passed"] for check in result["checks"]] == [True, True, True]


@pytest.mark.parametrize(
    ("losses", "spikes", "failed"),
    [
        ([6.0, 5.001, 4.0], 0, "loss_after_warmup"),
        ([6.0, 5.0, 5.5], 0, "loss_decrease"),
        ([6.0, 5.0, 4.0], 6, "loss_spikes"),
    ],
)
def test_gate_fails_for_each_reason(losses: list[float], spikes: int, failed: str) -> None:
    monitor = TrainingMonitor()
    feed(monitor, losses, warmup_steps=1)
    monitor.alerts += [{"type": "loss_spike"}] * spikes
    result = monitor.validate_phase(Limits())
    assert not result["passed"]
    assert [check["name"] for check in result["checks"] if not check["passed"]] == [failed]


def test_five_spikes_are_allowed_and_other_alerts_do_not_count() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [6.0, 5.0, 4.0], warmup_steps=1)
    monitor.alerts += [{"type": "loss_spike"}] * 5 + [{"type": "grad_explosion"}] * 9
    assert monitor.validate_phase(Limits())["passed"]


def test_gate_fails_when_the_warmup_never_ended() -> None:
    monitor = TrainingMonitor()
    feed(monitor, [6.0, 2.0], warmup_steps=10)
    checks = {check["name"]: check for check in monitor.validate_phase(Limits())["checks"]}
    assert not checks["loss_after_warmup"]["passed"]
    assert "not measured" in checks["loss_after_warmup"]["message"]


def test_state_continues_exactly_through_strict_json() -> None:
    losses = [math.nan] + [3.0 / (step + 1) + 1.0 for step in range(30)]
    whole, first, resumed = TrainingMonitor(7), TrainingMonitor(7), TrainingMonitor(7)
    feed(whole, [*losses, 50.0], warmup_steps=4)
    feed(first, losses[:12], warmup_steps=4)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    feed(resumed, [*losses[12:], 50.0], first_step=13, warmup_steps=4)
    assert resumed.state_dict() == whole.state_dict()
    assert str(resumed.get_summary()) == str(whole.get_summary())
    assert [alert["step"] for alert in resumed.alerts] == [1, 32]


def test_gradient_norm() -> None:
    model = torch.nn.Linear(3, 2)
    assert compute_gradient_norm(model) == 0.0
    model.weight.grad = torch.full((2, 3), 2.0)
    assert compute_gradient_norm(model) == pytest.approx(math.sqrt(24), rel=1e-6)
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert compute_gradient_norm(model) == pytest.approx(7.0, rel=1e-6)
