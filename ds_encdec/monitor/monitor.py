"""Watches a run: sliding windows, alerts, and the summary that a phase's gate is decided on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ds_encdec.monitor.metrics import MetricWindow, encode_float

MIN_VALUES_FOR_SPIKE = 10
"""Losses that must be in the window (or fill a smaller one) before one can be called a spike."""
MAX_LOSS_SPIKES = 5
"""Loss spikes that a phase may have and still pass."""


MAX_SAVED_ALERTS = 1000
"""Alerts that a checkpoint keeps, the newest ones."""


class PhaseLimits(Protocol):
    """What `validate_phase` reads of a phase's configuration; losses in nats per target token."""

    @property
    def max_loss_after_warmup(self) -> float:
        """Largest loss allowed at the end of the warm-up."""
        ...

    @property
    def min_loss_decrease(self) -> float:
        """Least that the loss must have fallen since the first step."""
        ...


class Observation(NamedTuple):
    """One call of `TrainingMonitor.update`."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float


class TrainingMonitor:
    """Windows of loss, gradient norm and throughput; alerts when one leaves its bounds.

    Alerts are dicts with `type` (`loss_spike` or `grad_explosion`), `step`, `value`, `threshold` and `message`.
    Non-finite values raise an alert and stay out of the windows, whose means they would destroy. `history` holds
    the observations of this process; a resumed run's earlier ones are in metrics.jsonl.
    """

    def __init__(
        self, window_size: int = 100, loss_spike_threshold: float = 2.0, grad_norm_threshold: float = 10.0
    ) -> None:
        self.loss_spike_threshold = loss_spike_threshold
        self.grad_norm_threshold = grad_norm_threshold
        self.loss_window = MetricWindow(window_size)
        self.grad_norm_window = MetricWindow(window_size)
        self.throughput_window = MetricWindow(window_size)
        self.history: list[Observation] = []
        self.alerts: list[dict[str, Any]] = []
        self.initial_loss: float | None = None
        self.warmup_complete_loss: float | None = None
        self.current_loss: float | None = None
        self.min_loss: float | None = None
        self.max_loss: float | None = None
        self.steps = 0

    def update(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens_per_second: float,
        is_warmup: bool = False,
    ) -> list[dict[str, Any]]:
        """Take in one optimizer step (loss in nats per target token, norm before clipping); its new alerts."""
        first_alert = len(self.alerts)
        self._check_loss(step, loss)
        self._check_grad_norm(step, grad_norm)
        self.history.append(Observation(step, loss, grad_norm, learning_rate, tokens_per_second))
        self.steps += 1
        if math.isfinite(loss):
            self._record_loss(loss, is_warmup)
        if math.isfinite(grad_norm):
            self.grad_norm_window.add(grad_norm)
        self.throughput_window.add(tokens_per_second)
        return self.alerts[first_alert:]

    def get_summary(self) -> dict[str, Any]:
        """The run in numbers: `loss`, `grad_norm`, `throughput`, `alerts` and `steps`.

        Losses are over the whole run and None before the first one; norms and throughput over their windows.
        """
        known = self.initial_loss is not None and self.current_loss is not None
        return {
            "loss": {
                "current": self.current_loss,
                "initial": self.initial_loss,
                "after_warmup": self.warmup_complete_loss,
                "min": self.min_loss,
                "max": self.max_loss,
                "decrease": self.initial_loss - self.current_loss if known else None,  # type: ignore[operator]
            },
            "grad_norm": {
                "mean": self.grad_norm_window.mean,
                "std": self.grad_norm_window.std,
                "max": self.grad_norm_window.max,
            },
            "throughput": {"mean_tokens_per_sec": self.throughput_window.mean},
            "alerts": list(self.alerts),
            "steps": self.steps,
        }

    def validate_phase(self, phase_config: PhaseLimits) -> dict[str, Any]:
        """Whether the run passes the phase's gate: `passed`, and `checks` of `name`, `passed`, `message`.

        A loss that was never measured fails its check.
        """
        after_warmup, decrease = self.warmup_complete_loss, self.get_summary()["loss"]["decrease"]
        spikes = sum(alert["type"] == "loss_spike" for alert in self.alerts)
        limit, least = phase_config.max_loss_after_warmup, phase_config.min_loss_decrease
        checks = [
            _check("loss_after_warmup", after_warmup is not None and after_warmup <= limit,
                   f"loss after warm-up {_number(after_warmup)}, at most {limit:.4f} allowed"),
            _check("loss_decrease", decrease is not None and decrease >= least,
                   f"loss fell by {_number(decrease)}, at least {least:.4f} asked for"),
            _check("loss_spikes", spikes <= MAX_LOSS_SPIKES,
                   f"{spikes} loss spikes, at most {MAX_LOSS_SPIKES} allowed"),
        ]  # fmt: skip
        return {"passed": all(check["passed"] for check in checks), "checks": checks}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the history and old alerts, strictly JSON-able."""
        return {
            **{name: getattr(self, name) for name in _SCALARS},
            **{name: getattr(self, name).state_dict() for name in _WINDOWS},
            "alerts": [alert | {key: encode_float(alert[key]) for key in _ALERT_FLOATS} for alert in self.alerts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name in _SCALARS:
            setattr(self, name, state[name])
        for name in _WINDOWS:
            getattr(self, name).load_state_dict(state[name])
        self.alerts = [alert | {key: float(alert[key]) for key in _ALERT_FLOATS} for alert in state["alerts"]]

    def _record_loss(self, loss: float, is_warmup: bool) -> None:
        self.loss_window.add(loss)
        self.current_loss = loss
        self.initial_loss = loss if self.initial_loss is None else self.initial_loss
        self.min_loss = loss if self.min_loss is None else min(self.min_loss, loss)
        self.max_loss = loss if self.max_loss is None else max(self.max_loss, loss)
        if not is_warmup and self.warmup_complete_loss is None:
            self.warmup_complete_loss = loss

    def _check_loss(self, step: int, loss: float) -> None:
        """Against the window before this loss is in it."""
        threshold = math.inf
        if len(self.loss_window) >= min(MIN_VALUES_FOR_SPIKE, self.loss_window.window_size):
            threshold = self.loss_spike_threshold * self.loss_window.mean
        if loss > threshold or not math.isfinite(loss):
            self._alert("loss_spike", step, loss, threshold, "loss")

    def _check_grad_norm(self, step: int, grad_norm: float) -> None:
        if grad_norm > self.grad_norm_threshold or not math.isfinite(grad_norm):
            self._alert("grad_explosion", step, grad_norm, self.grad_norm_threshold, "gradient norm")

    def _alert(self, kind: str, step: int, value: float, threshold: float, name: str) -> None:
        above = f"above {threshold:.4f}" if math.isfinite(threshold) else "not finite"
        message = f"step {step}: {name} {value:.4f} is {above}"
        self.alerts.append({"type": kind, "step": step, "value": value, "threshold": threshold, "message": message})


_SCALARS = ("initial_loss", "warmup_complete_loss", "current_loss", "min_loss", "max_loss", "steps")
_WINDOWS = ("loss_window", "grad_norm_window", "throughput_window")
_ALERT_FLOATS = ("value", "threshold")


def _check(name: str, passed: bool, message: str) -> dict[str, Any]:
    return {"name": name, "passed": passed, "message": message}


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def compute_gradient_norm(model: nn.Module) -> float:
    """Global L2 norm of the gradients that lie in `p.grad`; 0.0 without any.

    For unsharded models (the engines report their own norm, since ZeRO keeps `p.grad` empty). Waits for the device.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
