"""What the loop has to say, turned into metrics: one object, so that the loop stays a loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_encdec.monitor.metrics import StepAccumulator, StepRecord, train_metrics
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.performance import IntervalClock, performance_metrics
from ds_encdec.monitor.sinks import Sink
from ds_encdec.types import Batch, LossSum, StepResult, TrainingState

logger = logging.getLogger(__name__)

BatchFlops = Callable[[Batch], float]
"""Model FLOPs, forward and backward without recomputation, of one micro-batch."""


class Recorder:
    """Collects steps on every rank; logs, watches and publishes once per logging interval.

    `sinks` is empty on every rank but 0. `peak_flops`: of one device, in FLOP/s; None where it is not known.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_devices: int,
        warmup_steps: int,
        monitor: TrainingMonitor,
        sinks: Sequence[Sink],
        batch_flops: BatchFlops,
        peak_flops: float | None,
    ) -> None:
        self.monitor = monitor
        self._steps = StepAccumulator(device)
        self._clock = IntervalClock()
        self._sinks = sinks
        self._device = device
        self._num_devices = num_devices
        self._warmup_steps = warmup_steps
        self._batch_flops = batch_flops
        self._peak_flops = peak_flops
        self._flops = 0.0
        self._restored_steps = 0
        self._once: dict[str, float] = {}

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Wraps the wait for the next micro-batches."""
        return self._clock.waiting_for_data()

    def paused(self) -> AbstractContextManager[None]:
        """Wraps what is not training: evaluation and saving."""
        return self._clock.paused()

    def add(self, loss: LossSum, batch: Batch) -> None:
        """One micro-batch of this rank. Does not wait for the device."""
        self._steps.add(loss, encoder_tokens=batch.encoder_tokens)
        self._flops += self._batch_flops(batch)

    def end_step(self, state: TrainingState, result: StepResult) -> None:
        """The end of a step, applied or not; `state` is the one after it."""
        self._steps.end_step(result, global_step=state.global_step, data_step=state.data_step)

    def log(self, state: TrainingState) -> None:
        """Close the interval: reduce, watch, publish. A collective."""
        records = self._steps.take()
        lap = self._clock.lap()
        timed = records[self._restored_steps :]
        self._restored_steps = 0
        performance = performance_metrics(
            lap,
            num_steps=len(timed),
            tokens=sum(record.tokens for record in timed),
            num_devices=self._num_devices,
            # Every rank has the same budgets, so this rank's FLOPs stand for the others'.
            flops=self._flops * self._num_devices,
            peak_flops_per_device=self._peak_flops,
        )
        self._flops = 0.0
        self._watch(records, performance["perf/tokens_per_sec"])
        self._publish(
            state,
            {
                **train_metrics(records),
                "train/tokens_seen": state.total_tokens_seen,
                "train/encoder_tokens_seen": state.encoder_tokens_seen,
                "train/target_tokens_seen": state.target_tokens_seen,
                "train/epoch": state.epoch,
                **performance,
                "mem/peak_bytes": _peak_bytes(self._device),
                **self._once,
            },
        )
        self._once = {}

    def log_eval(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Publish an evaluation."""
        self._publish(state, dict(metrics))

    def log_save(self, *, blocked_seconds: float, seconds: float) -> None:
        """Note how long a checkpoint held training up, and took in all, for the next line of metrics."""
        self._once |= {"ckpt/blocked_s": blocked_seconds, "ckpt/total_s": seconds}

    def state_dict(self) -> dict[str, Any]:
        """Windows and the steps of an unfinished interval; equal on all ranks. A collective."""
        return {"steps": self._steps.state_dict(), "monitor": self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._steps.load_state_dict(state["steps"])
        self._restored_steps = len(state["steps"]["records"])  # made before this process's clock ran
        self.monitor.load_state_dict(state["monitor"])

    def close(self, exit_code: int) -> None:
        """Flush and close the sinks, telling them how the run ended."""
        for sink in self._sinks:
            sink.close(exit_code)

    def _watch(self, records: Sequence[StepRecord], tokens_per_second: float) -> None:
        for record in records:
            alerts = self.monitor.update(
                record.global_step,
                record.loss,
                record.grad_norm,
                record.learning_rate,
                tokens_per_second,
                is_warmup=record.global_step <= self._warmup_steps,
            )
            for alert in alerts if self._sinks else ():
                logger.warning("%s: %s", alert["type"], alert["message"])

    def _publish(self, state: TrainingState, metrics: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.log(state.global_step, {"data_step": state.data_step, **metrics})


def _peak_bytes(device: torch.device) -> float:
    """Largest allocation so far: of the accelerator, or of this process where there is none."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource  # Unix only, and only here

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
