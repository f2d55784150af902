"""Turn the steps that the loop reports into metrics, and into actions on alerts."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch

from ds_encdec.base.types import NO_ROWS, Batch, LossSum, RowCounts, StepResult, TrainingState
from ds_encdec.config.schema import MonitorConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.monitor import token_digests
from ds_encdec.monitor.machine import (
    IntervalClock,
    MachineWatch,
    measure_arithmetic,
    measure_rank_stats,
)
from ds_encdec.monitor.metrics import StepAccumulator, by_column, has_losses, mean_loss, train_metrics
from ds_encdec.monitor.metrics_file import MACHINE_ALERTS, EventLog, answer, make_alert
from ds_encdec.monitor.monitor import TrainingMonitor
from ds_encdec.monitor.sinks import Sample, Sink

logger = logging.getLogger(__name__)

# The engine's tensors are counted before this step of a process: the first step has allocated them all.
STEPS_TO_HELD = 2

Alert = Mapping[str, Any]  # see `make_alert`


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions that alerts demand, each with the first such alert; equal on every rank. `stop`: end without a save,
    since training is at fault. `rollback`: go back. `leave`: save, then end, since the machine is at fault."""

    stop: Alert | None = None
    rollback: Alert | None = None
    leave: Alert | None = None


@dataclass(kw_only=True, eq=False)
class Recorder:
    """Collects steps on every rank; once per logging interval it reduces, judges and publishes them. Figures are
    gathered from all ranks first, so that all take the same actions. `state` is the run's when it starts.
    `batch_flops`: model FLOPs, forward and backward without recomputation, of one micro-batch. `peak_flops`: of one
    device, in FLOP/s; None if unknown. `sinks` is empty and `events` writes nothing except on rank 0.
    `estimated_bytes`: the estimate of the largest `mem/peak_bytes`. The loop reports waits and pauses to `clock`, saves
    to `machine`, and the sums of token ids to `tokens`."""

    device: torch.device
    collectives: HostCollectives
    state: InitVar[TrainingState]
    warmup_steps: int
    settings: MonitorConfig
    monitor: TrainingMonitor
    events: EventLog
    sinks: Sequence[Sink]
    batch_flops: Callable[[Batch], float]
    peak_flops: float | None
    estimated_bytes: float | None = None
    on_long_row: str = "skip"

    def __post_init__(self, state: TrainingState) -> None:
        self.clock = IntervalClock()
        self.machine = MachineWatch(self.settings)
        self.tokens: list[tuple[int, int]] = []  # `digest_sums` of all ranks, of each step since the last such entry
        self._steps = StepAccumulator(self.device)
        self.logged = 0  # intervals of the run, each with a line in metrics.jsonl
        self.last_loss: float | None = None  # of the last judged step that had targets, over all ranks
        self._flops, self._last = 0.0, state
        self._judged_steps = self._restored_steps = 0  # steps of the interval
        self._alerts_in_interval: Counter[str] = Counter()
        self._once: dict[str, float] = {}
        self._steps_to_held = STEPS_TO_HELD
        self._held_bytes: Mapping[str, int] = {}
        measure_arithmetic(self.device)  # allocates its operands before memory is full

    def add(self, loss: LossSum, batch: Batch) -> None:
        """Add one micro-batch of this rank. Does not wait for the device."""
        self._steps.add(loss, tokens=batch.encoder_tokens + batch.target_tokens)
        self._flops += self.batch_flops(batch)

    def measure_held(self, held_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Call before each step: once in this process, `Engine.held_bytes` goes into the next line of metrics."""
        self._steps_to_held -= 1
        if self._steps_to_held == 0:
            self._held_bytes = held_bytes()

    @property
    def veto(self) -> Callable[[torch.Tensor], bool] | None:
        """A collective that decides by a step's finite gradient norm (float32 scalar) whether to skip it; the same on
        all ranks. None, and so no wait for the device at each step, unless some alert is answered with `skip_step`."""
        skips = "skip_step" in (self.settings.on_loss_spike, self.settings.on_grad_explosion)
        return self._refuses if skips else None

    def end_step(self, state: TrainingState, result: StepResult) -> None:
        """End a step, applied or not; `state` is the one after it."""
        self._steps.end_step(result, global_step=state.global_step, data_step=state.data_step)
        self._last = state

    def judge(self) -> Actions:
        """Judge the steps that have not been judged yet. A collective."""
        return self._answer(self._judge_steps())

    def alert(self, state: TrainingState, kind: str, value: float, threshold: float, message: str) -> Actions:
        """Record an alert that the loop has found in `state`, the same on every rank, and return its answer. `kind` is
        one of `STATE_ALERTS`; the other arguments are those of `make_alert`."""
        alert = make_alert(kind, state.global_step, value, threshold, message)
        self.monitor.keep([alert])
        return self._answer([(alert, state.data_step)])

    def log(self, state: TrainingState, rows: RowCounts = NO_ROWS) -> tuple[Actions, RowCounts]:
        """Close the interval: judge the rest of it and the machine, and publish. A collective. `rows`: the rows that
        this rank's lanes have passed over; returns those of all ranks too."""
        alerts = self._judge_steps()
        records = self._steps.take()
        timed = records[self._restored_steps :]
        self._judged_steps = self._restored_steps = 0
        stats = measure_rank_stats(self.device, self.clock.lap(), self._held_bytes)
        rank_stats, everyones_rows = zip(*self.collectives.gather((stats, rows)), strict=True)
        self.record_tokens(state)
        rows = RowCounts.summed(everyones_rows)
        bad_rows, long_rows = max(rows.bad, default=0), max(rows.long, default=0)
        seconds = max(rank_stats[0].training_s, 1e-9)
        speed = sum(record.tokens for record in timed) / seconds
        performance = {
            "perf/tokens_per_sec": speed,
            "perf/tokens_per_sec_per_gpu": speed / len(rank_stats),
            "perf/step_time_s": seconds / max(len(timed), 1),
            "perf/data_wait_frac": rank_stats[0].data_wait_s / seconds,
        }
        if self.peak_flops is not None:  # every rank has the same budgets, so this rank's FLOPs stand for the others'
            performance["perf/mfu"] = self._flops / seconds / self.peak_flops
        self._held_bytes, self._flops = {}, 0.0
        self.monitor.throughput_window.add(speed)
        of_machines = self.machine.update(state.global_step, rank_stats, tokens_per_second=speed)
        actions = self._answer(alerts + [(alert, state.data_step) for alert in of_machines])
        self.publish(state, {
            **train_metrics(records),
            "train/tokens_seen": state.total_tokens_seen,
            "train/encoder_tokens_seen": state.encoder_tokens_seen,
            "train/target_tokens_seen": state.target_tokens_seen,
            "train/epoch": state.epoch,
            "data/bad_rows": bad_rows,
            **performance,
            **self.machine.metrics(rank_stats),
            **({"data/long_rows": long_rows} if long_rows else {}),
            **({} if self.estimated_bytes is None else {"mem/estimated_bytes": self.estimated_bytes}),
            "health/alerts": self._alerts_in_interval.total(),
            "health/rollbacks": state.rollbacks,
            **self._once,
        })  # fmt: skip
        self.logged += 1
        self._once = {}
        self._alerts_in_interval.clear()
        if long_rows and not self._last.long_rows and self.collectives.rank == 0:
            logger.warning("%s; data/long_rows in metrics.jsonl counts on", self._long_rows_in_words(long_rows))
        self._last = replace(self._last, bad_rows=bad_rows, long_rows=long_rows)
        return actions, rows

    def record_tokens(self, state: TrainingState) -> None:
        """Write the digests of the steps since the last such entry, if any."""
        if self.tokens:
            ranks, facts = self.collectives.world_size, token_digests.entry(self.tokens, state.data_step)
            self.events.write("tokens", step=state.global_step, ranks=ranks, **facts)
            self.tokens.clear()

    def log_save(self, *, blocked_seconds: float, seconds: float) -> None:
        """Put the pause of training for a checkpoint and its whole time into the next line of metrics."""
        self._once |= {"ckpt/blocked_s": blocked_seconds, "ckpt/total_s": seconds}

    def go_back(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Continue from `saved`, a `state_dict`; `state` is the one after the rollback."""
        self._load(saved)
        self.last_loss = None
        self.monitor.go_back(saved["monitor"])
        self._flops, self._last = 0.0, state
        self.clock.lap()
        for sink in self.sinks:
            sink.go_back(state.global_step, state.rollbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return the windows and the judged steps of an unfinished interval; equal on all ranks. A collective."""
        return {
            "steps": self._steps.state_dict(),
            "logged": self.logged,
            "monitor": self.monitor.state_dict(),
            "machine": {"throughput": self.machine.throughput.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self._load(state)
        self.monitor.load_state_dict(state["monitor"])
        self.machine.throughput.load_state_dict(state["machine"]["throughput"])

    def close(self, exit_code: int, reason: str = "") -> None:
        """Record why the run stopped early, log the number of rows left out, and close the sinks."""
        last = self._last
        self.record_tokens(last)
        if exit_code:
            step, data_step = last.global_step, last.data_step
            self.events.write("stop", step=step, data_step=data_step, exit_code=exit_code, message=reason)
        if last.long_rows and self.collectives.rank == 0:
            logger.info("%s", self._long_rows_in_words(last.long_rows))
        if last.bad_rows and self.collectives.rank == 0:
            logger.info("%s not readable and left out (data.on_bad_row=skip)", _were(last.bad_rows, "row"))
        if self._once and exit_code == 0:  # figures of the last save, which no other line follows
            self.publish(last, self._once)
        for sink in self.sinks:
            sink.close(exit_code)

    def _long_rows_in_words(self, count: int) -> str:
        return (
            f"{_were(count, 'example')} longer than data.max_encoder_length or data.max_decoder_length and "
            f"{'cut off' if self.on_long_row == 'truncate' else 'left out'} (data.on_long_row={self.on_long_row})"
        )

    def _load(self, state: Mapping[str, Any]) -> None:
        self._steps.load_state_dict(state["steps"])
        self.logged = state.get("logged", 0)
        self._restored_steps = self._judged_steps = len(state["steps"]["records"])  # taken before this clock ran

    def _refuses(self, norm: torch.Tensor) -> bool:
        sums = self._steps.sums
        rank_zeros = norm.to(sums) if self.collectives.rank == 0 else sums.new_zeros(())
        *totals, norm_value = self.collectives.sum_tensor(torch.cat([sums.flatten(), rank_zeros.view(1)])).tolist()
        loss_sums, counts = by_column(torch.tensor(totals, dtype=sums.dtype).view_as(sums))
        if not has_losses(counts):
            return False  # a step without targets
        return any(
            name == "non_finite" or answer(name, self.settings) == "skip_step"
            for name in self.monitor.refuses(mean_loss(loss_sums, counts), norm_value)
        )

    def _judge_steps(self) -> list[tuple[Alert, int]]:
        """Return new alerts, each with its data step. A step without targets is not judged. A collective."""
        records = self._steps.reduce()
        new, self._judged_steps = records[self._judged_steps :], len(records)
        with_targets = [record for record in new if has_losses(record.counts)]
        self.last_loss = with_targets[-1].loss if with_targets else self.last_loss
        return [
            (alert, record.data_step)
            for record in with_targets
            for alert in self.monitor.update(
                record.global_step,
                record.loss,
                record.grad_norm,
                record.learning_rate,
                math.nan,  # known per interval only
                is_warmup=record.global_step <= self.warmup_steps,
                applied=record.applied,
            )
        ]

    def _answer(self, alerts: Sequence[tuple[Alert, int]]) -> Actions:
        actions: dict[str, Alert] = {}
        for alert, data_step in alerts:
            kind, action = alert["type"], answer(alert["type"], self.settings)
            self._alerts_in_interval[kind] += 1
            if action != "warn" or self._alerts_in_interval[kind] == 1:
                self.events.write("alert", data_step=data_step, **alert, action=action)
                if self.collectives.rank == 0:
                    logger.warning("%s: %s (%s)", kind, alert["message"], action)
            if action in ("stop", "rollback"):
                actions.setdefault("leave" if action == "stop" and kind in MACHINE_ALERTS else action, alert)
        return Actions(**actions)

    def publish(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Send the metrics of an interval or of an evaluation to the sinks."""
        for sink in self.sinks:
            sink.log(state.global_step, {"data_step": state.data_step, **metrics})

    def show(self, state: TrainingState, samples: Sequence[Sample]) -> None:
        """Send texts that the model has generated to the sinks."""
        for sink in self.sinks if samples else ():
            sink.show(state.global_step, samples)


def _were(count: int, noun: str) -> str:
    return f"{count:,} {noun} was" if count == 1 else f"{count:,} {noun}s were"
