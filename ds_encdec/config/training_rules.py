"""Rules about contradictions between fields of `training`, and between these and other sections."""

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import get_args

from ds_encdec.base.plugins import is_dotted
from ds_encdec.config.sections import MonitorConfig, Sections
from ds_encdec.config.settings import Conflict, closest, conflicts_in
from ds_encdec.config.training_sections import (
    CROSS_ENTROPY,
    ENDLESS_SCHEDULES,
    LOSS_FIGURES,
    SOURCE,
    TEXT_FIGURES,
    Schedule,
    Tracker,
    TrainingConfig,
)
from ds_encdec.registry.objectives import FIGURES, OBJECTIVES, TASKS, TEACHERS_FIGURE
from ds_encdec.registry.optimizers import OPTIMIZERS, row_of

ROLLBACK_FIELDS = ("on_non_finite", "on_loss_spike", "on_grad_explosion")  # fields that may be `rollback`
# Fields that not every schedule, or optimizer, reads, with those that do.
_READ_BY: dict[str, dict[str, Iterable[str]]] = {
    "lr_scheduler_type": {
        "min_lr_ratio": ("cosine", "wsd", "polynomial", "WarmupCosineLR"),
        "lr_scheduler_power": ("polynomial",),
        "lr_scheduler_timescale": ("inverse_sqrt",),
        "wsd_decay_fraction": ("wsd",),
    },
    "optimizer": {
        **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), OPTIMIZERS),
        "muon_momentum": ("muon",),
    },
}
# Fields for a name that is built in, or `module:name`.
_NAMED: dict[str, Iterable[str]] = {
    "lr_scheduler_type": get_args(Schedule),
    "loss": (CROSS_ENTROPY,),
    "optimizer": OPTIMIZERS,
    "report_to": get_args(Tracker),
    "callbacks": (),
    "metric_for_best_model": (*LOSS_FIGURES, *TEXT_FIGURES, *FIGURES),
}


def training_rules(config: Sections) -> Iterator[Conflict]:
    """Yield the contradictions within `training`, and with other sections."""
    training = config.training
    for field, allowed in _NAMED.items():
        value = training.best_figure if field == "metric_for_best_model" else getattr(training, field)
        names = (value,) if isinstance(value, str) else value
        if (name := next((name for name in names if name not in allowed and not is_dotted(name)), None)) is not None:
            guess = closest(name, allowed)
            yield Conflict(
                (f"training.{field}",),
                f"allowed: {', '.join([*allowed, '`module:name`'])}" + (f"; did you mean `{guess}`?" if guess else ""),
            )
    yield from _batches(config)
    yield from _schedule(training)
    yield from _fields_not_read(training)
    yield from _optimization(config)
    yield from _teacher(config)
    yield from _preferences(config)
    yield from _evaluation(config)
    yield from _saving(config)


def _batches(config: Sections) -> Iterator[Conflict]:
    size, lanes = config.training.per_device_train_batch_size, config.data.num_lanes
    sequences, conflict = config.training.global_batch_size, conflicts_in("training")
    if size == "auto":
        if lanes is not None:
            yield conflict(
                "per_device_train_batch_size data.num_lanes",
                "auto decides the micro-batches of a step: set global_batch_size, and num_lanes=null",
            )
    elif sequences and sequences % size:
        yield conflict(
            "global_batch_size per_device_train_batch_size",
            "global_batch_size must be a multiple of the micro-batch size",
        )
    elif sequences and lanes and lanes * size != sequences:
        yield conflict(
            "global_batch_size data.num_lanes per_device_train_batch_size",
            f"{lanes} micro-batches of {size} are {lanes * size} sequences: make them equal, or remove one",
        )


def _schedule(training: TrainingConfig) -> Iterator[Conflict]:
    steps, schedule, warmup = training.num_train_steps, training.lr_scheduler_type, training.warmup_steps
    set_fields, conflict = training.model_fields_set, conflicts_in("training")
    decay_steps, ends = round(training.wsd_decay_fraction * steps), "warmup_steps num_train_steps lr_scheduler_type"
    if training.num_train_epochs is not None and "num_train_steps" in set_fields:
        yield conflict(
            "num_train_epochs num_train_steps",
            "the length of the run twice: remove one of the two, or set num_train_steps=null",
        )
    if training.warmup_ratio is not None and "warmup_steps" in set_fields:
        yield conflict("warmup_ratio warmup_steps", "the warm-up twice: remove one of the two, or set it to null")
    if schedule not in ENDLESS_SCHEDULES and warmup >= steps:
        yield conflict(
            ends,
            f"the warm-up must end before the run does: set warmup_steps={max(1, steps // 10)}, a tenth of it, or "
            "lr_scheduler_type=WarmupLR or constant, which have no end",
        )
    if schedule == "wsd" and warmup < steps < warmup + decay_steps:
        yield conflict(f"{ends} wsd_decay_fraction", f"warm-up and decay ({decay_steps} steps) do not fit into the run")


def _fields_not_read(training: TrainingConfig) -> Iterator[Conflict]:
    names, written = list(chain(*_READ_BY.values())), training.model_fields_set
    # A run's file has all fields, and its defaults are nobody's choice.
    chosen_fields = {*(training.changed(*names) if {*names} <= written else written)}
    for chooser, readers in _READ_BY.items():
        chosen = getattr(training, chooser)
        if chosen not in _NAMED[chooser] and not (chooser == "optimizer" and is_dotted(chosen)):
            continue  # the user's own schedule, which may read any of them, or a mistake that is reported elsewhere
        for field in (name for name in readers if name in chosen_fields):
            is_its_end = field == "min_lr_ratio" and training.min_lr_ratio == (chosen in ENDLESS_SCHEDULES)
            if chosen not in readers[field] and not is_its_end:
                fix = f"set {chooser}={' or '.join(readers[field])}, or remove {field}"
                yield conflicts_in("training")(f"{chooser} {field}", f"{chosen} does not read it: {fix}")


def _optimization(config: Sections) -> Iterator[Conflict]:
    training, lora, own_loss = config.training, config.model.lora, config.training.loss != CROSS_ENTROPY
    limit, conflict = config.monitor.grad_norm_threshold, conflicts_in("training")
    if training.optimizer in OPTIMIZERS and training.optimizer_args:
        yield conflict(
            "optimizer optimizer_args",
            "these are for your own optimizer, `module:name`: remove them, and set adam_* or muon_momentum",
        )
    if own_loss and (training.label_smoothing or training.z_loss):
        yield conflict(
            "loss label_smoothing z_loss",
            "these are parts of the cross-entropy: set them to 0, and compute them in your own loss",
        )
    if own_loss and training.fp16:
        yield conflict("loss fp16", "float16 needs gradients of a known size: set bf16=true, or loss=cross_entropy")
    if training.bf16 and training.fp16:
        yield conflict("bf16 fp16", "at most one may be true; both false is float32")
    if training.attention_dropout and training.activation_checkpointing == "selective":
        yield conflict(
            "attention_dropout activation_checkpointing",
            "selective checkpointing keeps attention's output without its dropout: set full, every_n or none",
        )
    if row_of(training.optimizer).matrix_moments is not None and lora:
        yield conflict(
            "optimizer model.lora",
            "Muon steps matrices of the model itself, not adapters beside them: set training.optimizer=adamw",
        )
    if training.freeze and lora:
        yield conflict("freeze model.lora", "adapters freeze everything else: remove one of the two")
    if training.torch_compile is True and lora and lora.quantize != "none":
        yield conflict(
            "torch_compile model.lora.quantize",
            "bitsandbytes' products are not compiled: set torch_compile=false, or quantize=none",
        )
    if limit != MonitorConfig.default("grad_norm_threshold") and limit < training.max_grad_norm:
        yield conflict(
            "monitor.grad_norm_threshold max_grad_norm",
            "gradients below max_grad_norm are not clipped and cannot be explosions: raise grad_norm_threshold",
        )
    if config.monitor.loss_spike_min_values > config.monitor.window_size:
        yield conflict(
            "monitor.loss_spike_min_values monitor.window_size", "must be <= window_size, or spikes are never detected"
        )


def _teacher(config: Sections) -> Iterator[Conflict]:
    training, data, conflict = config.training, config.data, conflicts_in("training")
    if training.teacher is None:
        for name in training.changed("teacher_weight", "teacher_temperature"):
            yield conflict(f"{name} teacher", f"nothing reads it without a teacher: set teacher, or remove {name}")
        return
    if training.loss != CROSS_ENTROPY:
        yield conflict("teacher loss", "a teacher goes with the built-in loss: set loss=cross_entropy, or remove it")
    taught = [name for name, row in OBJECTIVES.items() if any(TASKS[task].continues for task in row.tasks)]
    if data.objective not in taught:
        fix = f"set data.objective to {' or '.join(taught)}, or remove teacher"
        yield conflict("teacher data.objective", f"{data.objective} has no outputs that a teacher can read: {fix}")
    if training.teacher != SOURCE:
        return
    if config.model.model_name_or_path is None:
        yield conflict("teacher model.architecture", "a new model has no source: name a decoder's folder")
    if data.objective in taught and not OBJECTIVES[data.objective].continues(data):
        yield conflict("teacher data.ul2_task_weights", "a decoder teaches only S, whose weight is 0: raise it")
    if data.use_mode_tokens:
        yield conflict("teacher data.use_mode_tokens", "a decoder knows no mode tokens: set use_mode_tokens=false")


def _preferences(config: Sections) -> Iterator[Conflict]:
    training, dpo, name = config.training, config.training.dpo, config.data.objective
    conflict = conflicts_in("training")
    per_example = any(TASKS[task].per_example for task in OBJECTIVES[name].tasks)
    for field in training.changed("loss", "label_smoothing", "z_loss") if per_example else ():
        instead = " (training.dpo has a loss and a label_smoothing)" if name == "dpo" else ""
        yield conflict(f"{field} data.objective", f"{name} does not learn tokens: remove it{instead}")
    if dpo != type(dpo)() and name != "dpo":
        yield conflict("dpo data.objective", f"{name} does not read it: set objective=dpo, or remove it")
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        yield conflicts_in("training.dpo")(
            "label_smoothing loss", f"{dpo.loss} does not read it: set loss=sigmoid, or remove it"
        )


def _evaluation(config: Sections) -> Iterator[Conflict]:
    training, data, best = config.training, config.data, config.training.metric_for_best_model
    objective, has_own = OBJECTIVES[data.objective], data.own_split("validation") is not None
    eval_set, _, figure = best.rpartition("/")
    is_of_texts = figure not in LOSS_FIGURES and (figure in TEXT_FIGURES or is_dotted(figure))
    has_perplexity = not any(TASKS[task].per_example for task in objective.tasks)
    conflict = conflicts_in("training")
    if training.eval_samples and not has_own and not objective.held_out(data)[0]:
        yield conflict(
            " ".join([*(f"data.{name}" for name in objective.split_fields), "eval_samples"]),
            f"evaluation needs held-out documents: set {objective.split_advice}, or eval_samples=0",
        )
    if data.eval_sets and not training.eval_samples:
        yield conflict("data.eval_sets eval_samples", "eval_samples=0 evaluates nothing: raise it, or remove the sets")
    figures = [*objective.figures, *[TEACHERS_FIGURE] * (training.teacher is not None)]
    if (figure in FIGURES and figure not in figures) or (figure == "perplexity" and not has_perplexity):
        known = ", ".join(["loss", *figures])
        yield conflict("metric_for_best_model data.objective", f"{data.objective} has no such figure: take {known}")
    if eval_set and (eval_set not in data.eval_sets or figure not in (*LOSS_FIGURES, *FIGURES)):
        yield conflict(
            "metric_for_best_model data.eval_sets",
            f"{best} is no figure of a set: write NAME/loss or NAME/perplexity with a name of data.eval_sets "
            f"({', '.join(data.eval_sets) or 'no set is there'})",
        )
    if 0 < training.eval_samples < training.eval_generate_samples:
        yield conflict(
            "eval_generate_samples eval_samples",
            "outputs are generated for the first of the examples that are evaluated: make it eval_samples at most",
        )
    if is_of_texts and not training.eval_generate_samples:
        yield conflict(
            "metric_for_best_model eval_generate_samples",
            "it is a figure of generated texts, and no text is generated: set eval_generate_samples > 0, or take loss",
        )
    of_evaluations = (
        "early_stopping_patience",
        "save_on_best",
        "load_best_model_at_end",
        "eval_generate_samples",
        "save_strategy",
    )
    for name in training.changed(*of_evaluations) if not training.eval_samples else ():
        yield conflict(
            f"{name} eval_samples",
            "this is done in evaluations, or decided by them: set eval_samples > 0, or turn it off",
        )


def _saving(config: Sections) -> Iterator[Conflict]:
    monitor, training = config.monitor, config.training
    rolling = " ".join(f"monitor.{name}" for name in ROLLBACK_FIELDS if getattr(monitor, name) == "rollback")
    kept, fields = training.save_total_limit, f"save_steps monitor.rollback_min_steps {rolling}"
    oldest, conflict = math.inf if kept is None else (kept - 1) * training.save_steps, conflicts_in("training")
    if training.average_checkpoints == 1:
        yield conflict("average_checkpoints", "averaging needs 2 or more; 0 turns it off")
    if training.load_best_model_at_end and not training.export_at_end:
        yield conflict(
            "load_best_model_at_end export_at_end", "the best model is exported at the end: set export_at_end=true"
        )
    if rolling and training.save_strategy == "best":
        yield conflict(f"save_strategy {rolling}", "rollback needs regular saves: set steps, and save_on_best=true")
    if rolling and oldest < monitor.rollback_min_steps:
        yield conflict(
            f"save_total_limit {fields}",
            f"the oldest of {kept} kept checkpoints is {oldest} steps old, too young to go back to: keep more",
        )
    if rolling and training.save_steps + monitor.rollback_min_steps > training.num_train_steps:
        yield conflict(
            f"{fields} num_train_steps",
            "no checkpoint of this run would ever be old enough to go back to: lower the first two",
        )
