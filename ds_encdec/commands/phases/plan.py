"""The phases of a pre-training (sanity_check → validation → medium → full): their numbers and the configurations of
their runs. It does not import torch; execute.py starts the runs."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ds_encdec.base.types import ConfigError
from ds_encdec.config.rules import find_conflicts
from ds_encdec.config.schema import FullConfig, Mark, PhaseOverrides, PhasesConfig, TrainingConfig, marked
from ds_encdec.config.shares import global_batch_size, is_auto, micro_batches_per_step
from ds_encdec.config.training_rules import ROLLBACK_FIELDS

TrainingPhase = StrEnum("TrainingPhase", ["SANITY_CHECK", "VALIDATION", "MEDIUM", "FULL"])
PHASES = tuple(TrainingPhase)
_CADENCES = ("num_train_steps", "eval_steps", "save_steps", "logging_steps")
_TRAINING = TrainingConfig()


@dataclass(frozen=True, slots=True)
class PhaseConfig:
    """The numbers of a phase, which ends with `num_tokens` (both sides) or `num_train_steps`, whichever comes first.
    `warmup_steps` None is `training.warmup_steps`, but at most a tenth of the phase. The gate, in nats per target
    token: the loss of the first step after the warm-up is at most `max_loss_after_warmup`, and the mean of the last
    ones (`monitor.window_size`) at least `min_loss_decrease` below the first loss of the first phase."""

    phase: TrainingPhase
    num_tokens: int
    description: str
    num_train_steps: int = _TRAINING.num_train_steps
    eval_steps: int = _TRAINING.eval_steps
    save_steps: int = _TRAINING.save_steps
    logging_steps: int = _TRAINING.logging_steps
    max_loss_after_warmup: float = 10.0
    min_loss_decrease: float = 0.1
    warmup_steps: int | None = None


PHASE_CONFIGS = {  # the defaults; `phases:` in the YAML replaces single fields
    row.phase: row
    for row in (
        PhaseConfig(TrainingPhase.SANITY_CHECK, 10_000_000, "whether it trains at all", 100, 50, 100, 1, 15.0),
        PhaseConfig(TrainingPhase.VALIDATION, 1_000_000_000, "whether it learns", 5_000, 500, 1_000, 10, 8.0, 0.5),
        PhaseConfig(
            TrainingPhase.MEDIUM, 100_000_000_000, "whether it keeps learning", 50_000, 1_000, 5_000, 10, 5.0, 1.0
        ),
        PhaseConfig(TrainingPhase.FULL, 500_000_000_000, "the run itself", 100_000, 500, 10_000, 10, 4.0, 1.5),
    )
}


def select_phases(only: str | None, first: str | None, last: str | None) -> Sequence[TrainingPhase]:
    """Return the phases that `--only`, `--from` and `--to` name; without them, all. Raises ConfigError."""
    if only is not None and (first is not None or last is not None):
        raise ConfigError("--only names a single phase: leave out --from and --to, or --only")
    if only is not None:
        first = last = only
    start, stop = (PHASES.index(TrainingPhase(name)) for name in (first or PHASES[0], last or PHASES[-1]))
    if stop < start:
        raise ConfigError(f"--to {last} comes before --from {first}; the order is {', '.join(PHASES)}")
    return PHASES[start : stop + 1]


def phase_config(config: FullConfig, phase: TrainingPhase) -> PhaseConfig:
    """Return the numbers of `phase`: the defaults, replaced by the configuration's `phases:`."""
    return replace(PHASE_CONFIGS[phase], **getattr(config.phases, phase).model_dump(exclude_none=True))


def with_given(config: FullConfig, given: Collection[str]) -> FullConfig:
    """Return `config` with the fields of `training` that the command line sets (`given`) in place of the phases'
    defaults, but not of the configuration's `phases`. Steps can only become fewer."""
    phases = {}
    for phase in PHASES:
        own: PhaseOverrides = getattr(config.phases, phase)
        values = {
            name: getattr(config.training, name)
            for name in _CADENCES
            if f"training.{name}" in given and getattr(own, name) is None
        }
        if "num_train_steps" in values:
            values["num_train_steps"] = min(values["num_train_steps"], PHASE_CONFIGS[phase].num_train_steps)
        phases[str(phase)] = own.model_copy(update=values)
    return config.model_copy(update={"phases": config.phases.model_copy(update=phases)})


def phase_folder(config: FullConfig, phase: TrainingPhase) -> Path:
    """Return the folder of `phase`, below the output folder of `config`."""
    return Path(config.infra.output_dir).expanduser().absolute() / "phases" / phase


def phase_before(phase: TrainingPhase) -> TrainingPhase | None:
    """Return the phase whose weights `phase` starts from; None for the first."""
    return dict(zip(PHASES[1:], PHASES, strict=False)).get(phase)


def estimate_steps_for_tokens(
    num_tokens: int, batch_size: int, seq_length: int, gradient_accumulation_steps: int, num_gpus: int
) -> int:
    """Return the optimizer steps that it takes to see `num_tokens` tokens, rounded up. A step has `num_gpus` ×
    `gradient_accumulation_steps` micro-batches, each of `batch_size` sequences of `seq_length` tokens."""
    return math.ceil(num_tokens / (batch_size * seq_length * gradient_accumulation_steps * num_gpus))


def estimate_training_time(num_steps: int, step_time_seconds: float) -> dict[str, float]:
    """Return the time of `num_steps` as `seconds`, `minutes`, `hours` and `days`."""
    seconds = num_steps * step_time_seconds
    return {"seconds": seconds, "minutes": seconds / 60, "hours": seconds / 3600, "days": seconds / 86400}


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """A phase: its numbers (`settings`), and the configuration of its run (`config`), whose `training.num_train_steps`
    is the smallest of the phase's, `steps_for_tokens` and the caller's. `tokens_per_step` includes padding."""

    settings: PhaseConfig
    config: FullConfig
    tokens_per_step: int
    steps_for_tokens: int

    @property
    def phase(self) -> TrainingPhase:
        """Return the phase."""
        return self.settings.phase

    def differences(self, config: FullConfig) -> str:
        """Return a sentence about the numbers and answers to alerts that its run changes in `config`, or nothing."""
        changed = []
        for section, names in (("training", (*_CADENCES, "warmup_steps")), ("monitor", ROLLBACK_FIELDS)):
            ours, given = getattr(self.config, section), getattr(config, section)
            changed += [
                f"{section}.{name}={getattr(ours, name)} (not {getattr(given, name)})"
                for name in names
                if getattr(ours, name) != getattr(given, name)
            ]
        return f"phase {self.phase} sets {', '.join(changed)}" if changed else ""

    @property
    def folder(self) -> Path:
        """Return the folder of its run."""
        return Path(self.config.infra.output_dir)


def plan_phase(config: FullConfig, phase: TrainingPhase, max_steps: int | None = None) -> PlannedPhase:
    """Plan the run of `phase`, of at most `max_steps`. The data starts again under the phase's own seed, and
    `infra.num_gpus` decides the size of a step. Raises ConfigError for a phase that contradicts itself."""
    settings, before = phase_config(config, phase), phase_before(phase)
    training, infra, monitor = config.training, config.infra, config.monitor
    sequences = global_batch_size(config, infra.num_gpus)
    length = config.data.max_encoder_length + config.data.max_decoder_length
    steps_for_tokens = estimate_steps_for_tokens(settings.num_tokens, sequences, length, 1, 1)
    steps = min(settings.num_train_steps, steps_for_tokens, max_steps or settings.num_train_steps)
    save_steps, logging_dir, answers = min(settings.save_steps, steps), Path(infra.logging_dir), {}
    if save_steps + monitor.rollback_min_steps > steps:  # too short to go back
        fields = type(monitor).model_fields
        answers = {name: fields[name].default for name in ROLLBACK_FIELDS if getattr(monitor, name) == "rollback"}
    changes = {
        # The configured model for the first phase; later ones start from the export of the phase before.
        "model": before
        and {
            "model_name_or_path": str(phase_folder(config, before) / "export" / "final"),
            "architecture": None,
            "tokenizer_name_or_path": None,
            **{path.partition(".")[2]: None for path in marked(Mark.FORM)},  # it is of the first one's form
        },
        # None if the run finds its micro-batch size, and so its lanes, when it starts.
        "data": {"num_lanes": None if is_auto(config) else micro_batches_per_step(config, infra.num_gpus)},
        "training": {
            "global_batch_size": sequences if is_auto(config) else training.global_batch_size,
            "num_train_steps": steps,
            "num_train_epochs": None,
            "warmup_steps": _warmup_steps(config, settings, steps),
            "warmup_ratio": None,
            "eval_steps": min(settings.eval_steps, steps),
            "save_steps": save_steps,
            "logging_steps": min(settings.logging_steps, steps),
            "seed": training.seed + PHASES.index(phase),
        },
        # These fields keep the runs of the phases apart.
        "infra": {
            "output_dir": str(phase_folder(config, phase)),
            "logging_dir": str(logging_dir / phase) if logging_dir.is_absolute() else infra.logging_dir,
            "wandb_run_name": infra.wandb_run_name and f"{infra.wandb_run_name}-{phase}",
            "upload_to": infra.upload_to and f"{infra.upload_to.rstrip('/')}/phases/{phase}",
        },
        "monitor": answers,
    }
    sections = {name: getattr(config, name).model_copy(update=changed) for name, changed in changes.items()}
    # Gates belong to the pipeline: they may change, and the run's configuration does not.
    overlaid = config.model_copy(update={**sections, "phases": PhasesConfig()})
    if conflicts := find_conflicts(overlaid):
        lines = "\n".join(f"  {', '.join(conflict.fields)}: {conflict.message}" for conflict in conflicts)
        raise ConfigError(f"phase {phase} of {steps} steps contradicts itself (see phases.{phase}):\n{lines}")
    return PlannedPhase(settings, overlaid, sequences * length, steps_for_tokens)


def _warmup_steps(config: FullConfig, settings: PhaseConfig, steps: int) -> int:
    ratio, wanted = config.training.warmup_ratio, settings.warmup_steps
    if wanted is not None and steps == settings.num_train_steps:
        return wanted
    if wanted is None:
        wanted = config.training.warmup_steps if ratio is None else math.ceil(steps * ratio)
    # At most a tenth; 0 only if 0 is configured, because DeepSpeed's schedules need a warm-up.
    return max(1, min(wanted, steps // 10)) if wanted else 0
