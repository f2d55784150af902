"""Watch the training: sliding windows, alerts, and the summary that decides a phase's gate."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Self

from torch import nn

from ds_encdec.base.quantities import count
from ds_encdec.config.schedules import learning_rate
from ds_encdec.config.schema import FullConfig, MonitorConfig
from ds_encdec.monitor.metrics import MetricWindow
from ds_encdec.monitor.metrics_file import make_alert, strict_json

MAX_LOSS_SPIKES = 5  # loss spikes that a phase may have and still pass

# Alerts of each type that are kept, the newest ones: many of one type do not push out another's.
MAX_ALERTS_OF_A_TYPE = 200

MAX_HISTORY = 10_000  # observations that `TrainingMonitor.history` keeps, the newest ones

# Difference between two learning rates that is never an alert: a rate of 0 after rounding.
LEARNING_RATE_ROUNDING = 1e-12


class Observation(NamedTuple):
    """One call of `TrainingMonitor.update`."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    applied: bool


@dataclass(eq=False)
class TrainingMonitor:
    """Windows of loss, gradient norm and throughput; alerts (see `make_alert`) when one leaves its bounds. Values that
    are not finite or of a step that was not applied stay out of all statistics. `history`: the last `MAX_HISTORY`
    observations of this process. `loss_plateau_steps` None: no alerts of plateaus. `planned_learning_rate`: the rate of
    the i-th applied update (from 0); None: no alerts of rates. `loss_scaling` (float16): a norm that overflows is no
    alert while the loss is finite. The other arguments are `MonitorConfig`'s."""

    window_size: int = 100
    loss_spike_threshold: float = 2.0
    grad_norm_threshold: float = 10.0
    _: KW_ONLY
    loss_spike_min_values: int = 10
    loss_plateau_steps: int | None = None
    loss_plateau_min_decrease: float = 0.0
    learning_rate_tolerance: float = 1e-3
    planned_learning_rate: Callable[[int], float] | None = None
    loss_scaling: bool = False

    # The fields that no caller sets are saved, with the windows and the alerts.
    initial_loss: float | None = field(default=None, init=False)
    warmup_complete_loss: float | None = field(default=None, init=False)
    min_loss: float | None = field(default=None, init=False)
    max_loss: float | None = field(default=None, init=False)
    steps: int = field(default=0, init=False)
    # The window's mean and the step when it last fell by enough, and whether an alert was raised since then.
    plateau_mean: float | None = field(default=None, init=False)
    plateau_step: int = field(default=0, init=False)
    plateau_said: bool = field(default=False, init=False)
    learning_rate_is_off: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.loss_spike_min_values = min(self.loss_spike_min_values, self.window_size)
        self.loss_window, self.grad_norm_window, self.throughput_window = (
            MetricWindow(self.window_size) for _ in range(3)
        )
        self.history: deque[Observation] = deque(maxlen=MAX_HISTORY)
        self.alerts: list[dict[str, Any]] = []

    @classmethod
    def from_config(cls, config: FullConfig) -> Self:
        """Return the monitor of a run. Rates are compared with the schedule, unless raw DeepSpeed JSON has its own."""
        settings = {name: getattr(config.monitor, name) for name in MonitorConfig.model_fields if hasattr(cls, name)}
        schedule = partial(learning_rate, training=config.training)
        planned = None if "scheduler" in config.infra.deepspeed_extra else schedule
        return cls(**settings, planned_learning_rate=planned, loss_scaling=config.training.fp16)

    def update(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens_per_second: float,
        is_warmup: bool = False,
        *,
        applied: bool = True,
    ) -> list[dict[str, Any]]:
        """Add one optimizer step and return its new alerts. `step`: applied steps after this one. `loss` in nats per
        target token, `grad_norm` before clipping, `tokens_per_second` NaN if it was not measured."""
        alerts = self._judge(step, loss, grad_norm)
        if applied and math.isfinite(grad_norm):
            self.grad_norm_window.add(grad_norm)
        if applied and math.isfinite(loss):
            self.loss_window.add(loss)
            self.initial_loss = loss if self.initial_loss is None else self.initial_loss
            self.min_loss = loss if self.min_loss is None else min(self.min_loss, loss)
            self.max_loss = loss if self.max_loss is None else max(self.max_loss, loss)
            if not is_warmup and self.warmup_complete_loss is None:
                self.warmup_complete_loss = loss
        if applied and not is_warmup:
            alerts += self._judge_plateau(step)
        if math.isfinite(tokens_per_second):
            self.throughput_window.add(tokens_per_second)
        alerts += self._judge_learning_rate(step, learning_rate, update_index=step - applied)
        self.history.append(Observation(step, loss, grad_norm, learning_rate, tokens_per_second, applied))
        self.steps += 1
        self.keep(alerts)
        return alerts

    def keep(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Add new alerts to those of the run."""
        for alert in alerts:
            same = [earlier for earlier in self.alerts if earlier["type"] == alert["type"]]
            if len(same) >= MAX_ALERTS_OF_A_TYPE:
                self.alerts.remove(same[0])
            self.alerts.append(alert)

    def refuses(self, loss: float, grad_norm: float) -> set[str]:
        """Return the types of alert that `update` would raise for these two by themselves. Records nothing."""
        return {alert["type"] for alert in self._judge(0, loss, grad_norm)}

    def get_summary(self) -> dict[str, Any]:
        """Return the run in numbers. The `current` loss is the mean of its window, and `decrease` its distance below
        the `initial` one. The other losses are over the whole run (None before the first step), norms and throughput
        over their windows. `steps` counts those that were not applied too."""
        current = self.loss_window.mean if len(self.loss_window) else None
        decrease = None if self.initial_loss is None or current is None else self.initial_loss - current
        return {
            "loss": {"current": current, "initial": self.initial_loss, "after_warmup": self.warmup_complete_loss,
                     "min": self.min_loss, "max": self.max_loss, "decrease": decrease},
            "grad_norm": {"mean": self.grad_norm_window.mean, "std": self.grad_norm_window.std,
                          "max": max(self.grad_norm_window.values, default=0.0)},
            "throughput": {"mean_tokens_per_sec": self.throughput_window.mean},
            "alerts": list(self.alerts),
            "steps": self.steps,
        }  # fmt: skip

    def validate_phase(self, phase_config: Any) -> dict[str, Any]:
        """Judge the run by the phase's gate, `max_loss_after_warmup` and `min_loss_decrease`: `passed`, and `checks` of
        `name`, `passed`, `message`. A loss that was never measured fails its check. Spikes that a rollback took back do
        not count."""
        after_warmup, decrease = self.warmup_complete_loss, self.get_summary()["loss"]["decrease"]
        all_spikes = [alert for alert in self.alerts if alert["type"] == "loss_spike"]
        spikes = sum("rolled_back" not in alert for alert in all_spikes)
        taken_back = f", beside {len(all_spikes) - spikes} that rollbacks took back" if len(all_spikes) > spikes else ""
        limit, least = phase_config.max_loss_after_warmup, phase_config.min_loss_decrease
        after = "no loss was logged after" if after_warmup is None else f"the loss was {after_warmup:.4f} after"
        fell = "no loss was logged"
        if decrease is not None:
            fell = (
                f"the loss {'rose' if decrease < 0 else 'fell'} by {abs(decrease):.4f} to the mean of the last "
                f"{count(len(self.loss_window), 'value')}"
            )
        checks = [
            ("loss_after_warmup", after_warmup is not None and after_warmup <= limit,
             f"{after} the warm-up; at most {limit:.4f} is allowed"),
            ("loss_decrease", decrease is not None and decrease >= least,
             f"{fell}; it must fall by at least {least:.4f}"),
            ("loss_spikes", spikes <= MAX_LOSS_SPIKES,
             f"{count(spikes, 'loss spike')}{taken_back}; at most {MAX_LOSS_SPIKES} are allowed"),
        ]  # fmt: skip
        return {
            "passed": all(passed for _, passed, _ in checks),
            "checks": [{"name": name, "passed": passed, "message": message} for name, passed, message in checks],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the history, strictly JSON-able."""
        windows = {name: getattr(self, name).state_dict() for name in _WINDOWS}
        return {name: getattr(self, name) for name in _SAVED} | windows | {"alerts": strict_json(self.alerts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        vars(self).update({name: state[name] for name in _SAVED})
        for name in _WINDOWS:
            getattr(self, name).load_state_dict(state[name])
        self.alerts = [
            {**alert, "value": float(alert["value"]), "threshold": float(alert["threshold"])}
            for alert in state["alerts"]
        ]

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier `state_dict` of this run, as a rollback does; the alerts since then stay, marked."""
        alerts = self.alerts
        self.load_state_dict(state)
        kept = {alert["message"] for alert in self.alerts}  # each begins with its step
        self.alerts = [alert if alert["message"] in kept else alert | {"rolled_back": True} for alert in alerts]

    def _judge(self, step: int, loss: float, grad_norm: float) -> list[dict[str, Any]]:
        """Return the alerts of a step by itself, against the window before its loss is in it."""
        finite_loss, finite_norm = math.isfinite(loss), math.isfinite(grad_norm)
        limit, values = self.loss_spike_threshold * self.loss_window.mean, len(self.loss_window)
        is_full_enough, largest = values >= self.loss_spike_min_values, self.grad_norm_threshold
        rows: list[tuple[Any, ...]] = [
            ("non_finite", not finite_loss or not (finite_norm or self.loss_scaling),
             grad_norm if finite_loss else loss, math.inf,
             f"loss {loss:.4f}, gradient norm {grad_norm:.4f}: not finite"),
            ("loss_spike", finite_loss and loss > limit and is_full_enough, loss, limit,
             f"loss {loss:.4f} is above {limit:.4f}, monitor.loss_spike_threshold={self.loss_spike_threshold:g} "
             f"times the mean of the {values} losses before it"),
            ("grad_explosion", finite_norm and grad_norm > largest, grad_norm, largest,
             f"gradient norm {grad_norm:.4f} before clipping is above the largest one allowed, "
             f"monitor.grad_norm_threshold={largest:g}"),
        ]  # fmt: skip
        return [make_alert(kind, step, *facts) for kind, is_seen, *facts in rows if is_seen]

    def _judge_plateau(self, step: int) -> list[dict[str, Any]]:
        """Return one alert per stretch of steps in which the full window's mean has not fallen by enough."""
        if self.loss_plateau_steps is None or len(self.loss_window) < self.loss_window.window_size:
            return []
        mean, decrease = self.loss_window.mean, self.loss_plateau_min_decrease
        if self.plateau_mean is None or 0 < self.plateau_mean - mean >= decrease:
            self.plateau_mean, self.plateau_step, self.plateau_said = mean, step, False
        if self.plateau_said or step - self.plateau_step < self.loss_plateau_steps:
            return []
        self.plateau_said = True
        return [
            make_alert("loss_plateau", step, mean, self.plateau_mean - decrease,
                f"the mean of the last {len(self.loss_window)} losses is {mean:.4f}; since it was "
                f"{self.plateau_mean:.4f} at step {self.plateau_step}, it has not fallen by "
                f"monitor.loss_plateau_min_decrease={decrease:g} nats in "
                f"monitor.loss_plateau_steps={self.loss_plateau_steps}")
        ]  # fmt: skip

    def _judge_learning_rate(self, step: int, rate: float, *, update_index: int) -> list[dict[str, Any]]:
        """Return one alert when the rate leaves its schedule; the next one only after it has come back."""
        if self.planned_learning_rate is None:
            return []
        planned = self.planned_learning_rate(update_index)
        tolerance, was_off = self.learning_rate_tolerance, self.learning_rate_is_off
        self.learning_rate_is_off = not math.isclose(rate, planned, rel_tol=tolerance, abs_tol=LEARNING_RATE_ROUNDING)
        if was_off or not self.learning_rate_is_off:
            return []
        # Against the larger of the two, as in isclose: a rate of 0 is a number like any other.
        return [
            make_alert("learning_rate_off", step, abs(rate - planned) / max(abs(rate), abs(planned)), tolerance,
                f"learning rate {rate:.4e} where the schedule has {planned:.4e}: they differ by more than "
                f"monitor.learning_rate_tolerance={tolerance:g} of the larger one")
        ]  # fmt: skip


_SAVED = tuple(field.name for field in fields(TrainingMonitor) if not field.init)
_WINDOWS = ("loss_window", "grad_norm_window", "throughput_window")


def compute_gradient_norm(model: nn.Module) -> float:
    """Return the global L2 norm (float32) of an unsharded model's gradients; 0.0 without any. Waits for the device."""
    return float(nn.utils.get_total_norm([each.grad.float() for each in model.parameters() if each.grad is not None]))
