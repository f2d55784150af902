"""The sections about alerts (`monitor`), and about phases, which override fields of `training`."""

from typing import Literal

from pydantic import Field

from ds_encdec.config.section_base import Section

LARGEST_LOSS = 20.0
"""Nats per target token, above the first loss of any model: a guess among the 151,936 ids of Qwen3 costs 11.9."""


class MonitorConfig(Section):
    """Thresholds of alerts, and how the run answers them (docs/monitor.md).

    An alert is answered with `warn` (report it and go on), `skip_step` (leave the step out), `rollback` (go back to an
    earlier checkpoint, past the data since) or `stop`.
    """

    window_size: int = Field(default=100, ge=2)
    """Optimizer steps in the window of losses and gradient norms; logging intervals in that of throughput."""
    loss_spike_threshold: float = Field(default=2.0, gt=1)
    """`loss_spike`: the step's loss over the mean of its window."""
    loss_spike_min_values: int = Field(default=10, ge=1)
    """Losses that must be in the window before one can be a spike."""
    grad_norm_threshold: float = Field(default=10.0, gt=0)
    """`grad_explosion`: global gradient norm of a step before clipping."""
    loss_plateau_steps: int | None = Field(default=10_000, ge=1)
    """`loss_plateau`: optimizer steps without a fall of the window's mean loss; None: never."""
    loss_plateau_min_decrease: float = Field(default=0.005, ge=0)
    """Least decrease of that mean that is no plateau, in nats per target token."""
    learning_rate_tolerance: float = Field(default=1e-3, gt=0, lt=1)
    """`learning_rate_off`: relative difference between the rate of a step and its schedule's."""
    throughput_drop_threshold: float = Field(default=0.5, gt=0, lt=1)
    """`throughput_drop`: tokens per second of a logging interval over the mean of its window."""
    straggler_threshold: float = Field(default=1.5, gt=1)
    """`straggler`: a rank's time for a fixed computation over the median rank's."""
    straggler_late_threshold: float = Field(default=0.1, gt=0, lt=1)
    """`straggler`: share of the step time that one rank keeps the others waiting."""
    memory_growth_threshold: float = Field(default=0.25, gt=0)
    """`memory_growth`: growth of a rank's memory since its first logging intervals, as a share."""
    data_wait_threshold: float = Field(default=0.2, gt=0, lt=1)
    """`data_wait`: share of the time that a rank waits for its next batch."""
    on_non_finite: Literal["skip_step", "rollback", "stop"] = "skip_step"
    """Answer to a loss or gradient norm that is not finite; such a step is always skipped."""
    on_loss_spike: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `loss_spike`. `skip_step` reads every step's loss before it is made, which waits for the device."""
    on_grad_explosion: Literal["warn", "skip_step", "rollback", "stop"] = "warn"
    """Answer to `grad_explosion`. `skip_step` waits for the device, too."""
    on_loss_plateau: Literal["warn", "stop"] = "warn"
    """Answer to `loss_plateau`."""
    on_learning_rate_off: Literal["warn", "stop"] = "warn"
    """Answer to `learning_rate_off`."""
    on_throughput_drop: Literal["warn", "stop"] = "warn"
    """Answer to `throughput_drop`. `stop` saves first, so the run can be resumed (exit code 75)."""
    on_straggler: Literal["warn", "stop"] = "warn"
    """Answer to `straggler`; `stop` as for `on_throughput_drop`."""
    on_memory_growth: Literal["warn", "stop"] = "warn"
    """Answer to `memory_growth`; `stop` as for `on_throughput_drop`."""
    on_data_wait: Literal["warn", "stop"] = "warn"
    """Answer to `data_wait`; `stop` as for `on_throughput_drop`."""
    rollback_min_steps: int = Field(default=50, ge=1)
    """Least age in optimizer steps of a checkpoint to go back to: trouble begins before it shows."""
    max_rollbacks: int = Field(default=5, ge=1)
    """Rollbacks of a run; one more alert stops it as diverged (exit code 7)."""


class PhaseOverrides(Section):
    """Settings of a phase that replace its defaults (`PHASE_CONFIGS`); None keeps these."""

    num_tokens: int | None = Field(default=None, gt=0)
    """Tokens of both sides to train on. A phase ends with these or with its steps, whichever comes first."""
    description: str | None = None
    """Purpose of the phase, in the log and the report."""
    num_train_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of warm-up; None: `training.warmup_steps`, but at most a tenth of the phase."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations."""
    save_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints."""
    logging_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between two lines of metrics."""
    max_loss_after_warmup: float | None = Field(default=None, gt=0)
    """Gate: largest loss allowed in the first step after the warm-up, in nats per target token."""
    min_loss_decrease: float | None = None
    """Gate: least fall of the loss since the first step of the first phase, in nats per target token."""


class PhasesConfig(Section):
    """The phases of `ds-encdec phases`; the next one starts when the one before has passed its gate."""

    sanity_check: PhaseOverrides = PhaseOverrides()
    """The first phase, which shows that the run trains at all."""
    validation: PhaseOverrides = PhaseOverrides()
    """The second phase, which shows that the run learns."""
    medium: PhaseOverrides = PhaseOverrides()
    """The third phase, which shows that the run goes on learning."""
    full: PhaseOverrides = PhaseOverrides()
    """The run itself."""
