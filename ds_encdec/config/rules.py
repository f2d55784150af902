"""All sections together: their fields by dotted path, and the contradictions between sections.

The rules inside of one section are its own, in its class. Every rule names all the fields that it reads, so that the
report can say where each was set.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

from pydantic import field_validator
from pydantic.fields import FieldInfo

from ds_encdec.config.model_sections import ModelConfig
from ds_encdec.config.monitor_sections import LARGEST_LOSS, MonitorConfig, PhasesConfig
from ds_encdec.config.sections import DataConfig, Mark, Section
from ds_encdec.config.settings import Conflict, Rule, Settings, broken, join
from ds_encdec.config.training_sections import LOSS_FIGURES, InfraConfig, TrainingConfig
from ds_encdec.denoisers import DENOISERS
from ds_encdec.engines import ENGINES, EngineName, EngineSpec, load
from ds_encdec.objectives import OBJECTIVES
from ds_encdec.optimizers import OPTIMIZERS, row_of

NATIVE_SCHEDULES = ("WarmupDecayLR", "WarmupLR", "WarmupCosineLR")
"""Schedules that are DeepSpeed's own classes."""
SMALLEST_VOCABULARY = 258
"""Ids of a byte-level tokenizer before the first merge: 256 bytes, padding, end of sequence."""
ROLLBACK_FIELDS = ("on_non_finite", "on_loss_spike", "on_grad_explosion")
"""Fields of `monitor` that may say `rollback`."""


class Sections(Section):
    """All sections of a run, each valid by itself; those of a `schema.FullConfig` also agree with each other."""

    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    training: TrainingConfig = TrainingConfig()
    """The optimization."""
    infra: InfraConfig = InfraConfig()
    """The machines."""
    monitor: MonitorConfig = MonitorConfig()
    """Alerts, and how they are answered."""
    phases: PhasesConfig = PhasesConfig()
    """The phases of `ds-encdec phases`, and their gates."""

    @field_validator("*", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        """A section whose lines are all commented out is left at its defaults."""
        return {} if value is None else value


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a field of type `annotation` holds: itself, in a union, or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part))), None)


def _fields(section: type[Section], at: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield (path := join(at, name)), info
        if inner := section_in(info.annotation):
            yield from _fields(inner, f"{path}.0" if "tuple" in str(info.annotation) else path)


@cache
def fields() -> dict[str, FieldInfo]:
    """Every field by its dotted path, those of nested sections too; the items of a list are called `0`."""
    return dict(_fields(Sections, ""))


def marked(*marks: Mark) -> list[str]:
    """The dotted paths of the fields that have one of `marks`, in the order of the schema; of a list, only itself."""
    return [path for path, info in fields().items() if set(marks) & set(info.metadata) and ".0." not in path]


def find_conflicts(config: Sections) -> list[Conflict]:
    """List everything that contradicts itself in `config`."""
    between = [*_architecture(config), *_training(config), *_rollback(config), *_phase_gates(config)]
    kind = config.infra.distributed_type
    lacks = [engine_conflicts(config, row.name) for row in ENGINES.values() if kind in (*row.distributed_types, "auto")]
    no_engine = [conflict for found in lacks for conflict in found if all(lacks)]  # `auto` takes one that can
    return [*config.conflicts(), *broken(between), *no_engine]


def _architecture(config: Sections) -> Iterable[Rule]:
    shape, at = config.model.architecture, "model.architecture."
    if shape is None:
        return
    needed = SMALLEST_VOCABULARY + config.model.num_sentinel_tokens + len(DENOISERS) * config.data.use_mode_tokens
    yield Rule(
        f"{at}vocab_size model.num_sentinel_tokens data.use_mode_tokens",
        f"must be >= {needed}: bytes, special tokens, sentinels and mode tokens each take a row",
        shape.vocab_size < needed,
    )
    for name in ("max_encoder_length", "max_decoder_length"):
        is_longer = getattr(config.data, name) > shape.max_position_embeddings
        message = "an example may be longer than the model is declared for"
        yield Rule(f"data.{name} {at}max_position_embeddings", message, is_longer)


def _training(config: Sections) -> Iterable[Rule]:
    training, data, infra, monitor = config.training, config.data, config.infra, config.monitor
    sequences, size, lanes = training.global_batch_size, training.per_device_train_batch_size, data.num_lanes
    micro, made = "training.per_device_train_batch_size", lanes and size != "auto" and lanes * size
    divides = size != "auto" and sequences is not None and sequences % size == 0
    yield Rule(
        f"{micro} data.num_lanes",
        "auto decides how many micro-batches make a step: set global_batch_size, and num_lanes=null",
        size == "auto" and lanes is not None,
    )
    yield Rule(
        f"training.global_batch_size data.num_lanes {micro}",
        f"{lanes} micro-batches of {size} are {made} sequences: make them equal, or remove one",
        divides and made and made != sequences,
    )
    objective, has_own = OBJECTIVES[data.objective], data.own_split("validation") is not None
    yield Rule(
        " ".join([*(f"data.{name}" for name in objective.split_fields), "training.eval_samples"]),
        f"evaluation needs held-out documents: set {objective.split_advice}, or eval_samples=0",
        training.eval_samples and not has_own and not objective.held_out(data)[0],
    )
    yield Rule(
        "data.eval_sets training.eval_samples",
        "nothing is evaluated with eval_samples=0: raise it, or remove the sets",
        data.eval_sets and not training.eval_samples,
    )
    best = training.metric_for_best_model
    eval_set, _, figure = best.rpartition("/")
    yield Rule(
        "training.metric_for_best_model data.eval_sets",
        f"{best} is none of the figures of sets: write NAME/loss or NAME/perplexity with a name of data.eval_sets "
        f"({', '.join(data.eval_sets) or 'there are none'})",
        eval_set and (eval_set not in data.eval_sets or figure not in LOSS_FIGURES),
    )
    optimizer = row_of(training.optimizer)
    yield Rule(
        "training.optimizer model.lora",
        "Muon steps matrices of the model itself, not adapters beside them: set training.optimizer=adamw",
        optimizer.matrix_moments is not None and config.model.lora is not None,
    )
    yield Rule(
        "training.freeze model.lora",
        "with adapters everything else is frozen already: remove one of the two",
        training.freeze and config.model.lora is not None,
    )
    yield Rule(
        "training.torch_compile model.lora.quantize",
        "bitsandbytes' products are not compiled: set torch_compile=false, or quantize=none",
        training.torch_compile is True and _quantizes(config),
    )
    limit = monitor.grad_norm_threshold
    is_set = limit != MonitorConfig.model_fields["grad_norm_threshold"].default
    yield Rule(
        "monitor.grad_norm_threshold training.max_grad_norm",
        "gradients below max_grad_norm are not clipped and cannot be explosions: raise grad_norm_threshold",
        is_set and limit < training.max_grad_norm,
    )
    yield Rule(
        "infra.deepspeed_extra.scheduler training.lr_scheduler_type",
        f"only DeepSpeed's own schedules take these: {', '.join(NATIVE_SCHEDULES)}",
        "scheduler" in infra.deepspeed_extra and training.lr_scheduler_type not in NATIVE_SCHEDULES,
    )
    given, at = Settings(infra.deepspeed_extra).get("optimizer.params"), "infra.deepspeed_extra.optimizer.params."
    given = given if isinstance(given, dict) else {}
    takes_both = given.get("fused") and given.get("foreach")
    yield Rule(f"{at}fused {at}foreach", "torch's AdamW takes one of them", takes_both)


def _quantizes(config: Sections) -> bool:
    return config.model.lora is not None and config.model.lora.quantize != "none"


def _rollback(config: Sections) -> Iterable[Rule]:
    monitor, training = config.monitor, config.training
    rolling_back = " ".join(f"monitor.{name}" for name in ROLLBACK_FIELDS if getattr(monitor, name) == "rollback")
    kept, fields = training.save_total_limit, f"training.save_steps monitor.rollback_min_steps {rolling_back}"
    oldest = math.inf if kept is None else (kept - 1) * training.save_steps
    least = training.save_steps + monitor.rollback_min_steps
    yield Rule(
        f"training.save_strategy {rolling_back}",
        "nobody knows how old the checkpoints would be to go back to: set steps, and save_on_best=true",
        rolling_back and training.save_strategy == "best",
    )
    yield Rule(
        f"training.save_total_limit {fields}",
        f"the oldest of {kept} kept checkpoints is {oldest} steps old, too young to go back to: keep more",
        rolling_back and oldest < monitor.rollback_min_steps,
    )
    yield Rule(
        f"{fields} training.num_train_steps",
        "no checkpoint of this run would ever be old enough to go back to: lower the first two",
        rolling_back and least > training.num_train_steps,
    )


def _phase_gates(config: Sections) -> Iterable[Rule]:
    """A decrease that no run can make would be noticed after days."""
    shape = config.model.architecture
    first_loss, sizes = (math.log(shape.vocab_size), " model.architecture.vocab_size") if shape else (LARGEST_LOSS, "")
    message = f"must be >= 0 and < {first_loss:.1f} nats, what the first loss is at most: none falls below 0"
    for phase, numbers in config.phases:
        is_possible = 0 <= (numbers.min_loss_decrease or 0) < first_loss
        yield Rule(f"phases.{phase}.min_loss_decrease{sizes}", message, not is_possible)


def engine_conflicts(config: Sections, engine: EngineName) -> list[Conflict]:
    """List what `config` asks for that `engine` cannot do."""
    return list(broken(load(ENGINES[engine].lacks)(config)))


def engine_candidates(config: Sections) -> list[EngineSpec]:
    """The engines that `infra.distributed_type` leaves the choice of, the preferred one first; never empty.

    `auto` leaves those that can do what `config` asks; the rules refuse a configuration that none can do.
    """
    rows = list(ENGINES.values())
    asked = [row for row in rows if config.infra.distributed_type in row.distributed_types]
    return asked or [row for row in rows if not engine_conflicts(config, row.name)] or rows[-1:]


def deepspeed_lacks(config: Sections) -> Iterable[Rule]:
    """List what a configuration may ask for that DeepSpeed cannot do."""
    training, infra, engine = config.training, config.infra, "infra.distributed_type"
    yield Rule(
        f"infra.sharding_stage {engine}",
        "DeepSpeed has no hybrid of ZeRO-2; FSDP2 has: set distributed_type=fsdp, or zero3_hybrid",
        infra.sharding_stage == "zero2_hybrid",
    )
    yield Rule(
        f"training.activation_checkpointing {engine}",
        "selective checkpointing is FSDP2's (distributed_type=fsdp); DeepSpeed has none, full and every_n",
        training.activation_checkpointing == "selective",
    )
    by_module = training.freeze or config.model.lora is not None
    by_module = by_module or "zero_optimization.leaf_module" in Settings(infra.deepspeed_extra)
    yield Rule(
        f"training.torch_compile infra.sharding_stage {engine}",
        "ZeRO-3 gathers parameters inside layers here (training.freeze, model.lora, leaf_module), which cannot be "
        "compiled so: set torch_compile=auto, sharding_stage=zero2 or lower, or distributed_type=fsdp",
        training.torch_compile is True and infra.sharding_stage.startswith("zero3") and by_module,
    )
    refusal = row_of(training.optimizer).not_deepspeeds
    yield Rule(f"training.optimizer {engine}", refusal, bool(refusal))
    is_users = training.optimizer not in OPTIMIZERS
    yield Rule(
        "training.optimizer infra.deepspeed_extra.optimizer",
        "two optimizers: remove one of the two",
        is_users and "optimizer" in infra.deepspeed_extra,
    )
    yield Rule(
        f"training.optimizer infra.offload_optimizer {engine}",
        "DeepSpeed swaps the states of AdamW alone to a disk: set offload_optimizer=cpu or none, or optimizer=adamw",
        is_users and infra.offload_optimizer == "nvme",
    )
    yield Rule(
        f"infra.fsdp_reduce_every_micro_batch {engine}",
        "this is FSDP2's: set distributed_type=fsdp, or fsdp_reduce_every_micro_batch=false",
        infra.fsdp_reduce_every_micro_batch,
    )
    on_cpu = infra.device == "cpu"
    yield Rule("training.fp16 infra.device", "DeepSpeed trains no float16 on CPUs: use bf16", training.fp16 and on_cpu)
    # DeepSpeed 0.19.8 unscales these gradients without having scaled the loss (runtime/engine.py: backward).
    yield Rule(
        "training.fp16 infra.sharding_stage",
        "without sharding DeepSpeed trains float16 wrongly: use bf16, or zero1 to zero3",
        training.fp16 and infra.sharding_stage == "zero0",
    )
    yield Rule(
        f"model.lora.quantize {engine}",
        "DeepSpeed cuts and broadcasts no 4-bit weights: set distributed_type=ddp and sharding_stage=zero0, or "
        "quantize=none",
        _quantizes(config),
    )
    yield Rule(
        "training.warmup_steps training.lr_scheduler_type",
        "DeepSpeed's schedules need at least 1 step of warm-up; linear, cosine and constant do without",
        training.lr_scheduler_type in NATIVE_SCHEDULES and training.warmup_steps < 1,
    )
    yield from _keys_that_deepspeed_lacks(config)


def _keys_that_deepspeed_lacks(config: Sections) -> Iterable[Rule]:
    """List the keys of its JSON that DeepSpeed, as it runs here, would stop at or lose something by."""
    infra, training = config.infra, config.training
    swaps, extra = infra.offload_optimizer == "nvme", Settings(infra.deepspeed_extra)
    for key in (
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
    ):
        yield Rule(
            f"infra.offload_optimizer infra.deepspeed_extra.{key}",
            "states on a disk are float32, and read and written one sub-group after the other: remove it",
            swaps and extra.get(key) is not None,
        )
    at = "infra.deepspeed_extra.bf16."
    low_weights, low_states = (
        extra.get(f"bf16.{key}") for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    )
    yield Rule(
        f"{at}bf16_master_weights_and_grads {at}bf16_optimizer_states infra.offload_optimizer",
        "one without the other, or offloaded, is for DeepSpeed's own CPUAdam: set both and offload_optimizer=none, or "
        "remove both",
        (low_weights or low_states) and not (low_weights and low_states and infra.offload_optimizer == "none"),
    )
    # A leaf's gradients are reduced when that of its input is there, and where the input needs none, before all others.
    leaves = ("leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes")
    for key in (*leaves, "stage3_module_granularity_threshold"):
        yield Rule(
            f"infra.deepspeed_extra.zero_optimization.{key}",
            "gradients of leaf modules are lost where their input is not trained, as with training.freeze and "
            "model.lora: remove it, or train everything",
            extra.get(f"zero_optimization.{key}") and (training.freeze or config.model.lora is not None),
        )
    quantized = "zero_optimization.zero_quantized_nontrainable_weights"
    yield Rule(
        f"infra.deepspeed_extra.{quantized}",
        "DeepSpeed quantizes frozen weights for good, and checkpoints would hold what is left of them: remove it",
        extra.get(quantized),
    )


def fsdp_lacks(config: Sections) -> Iterable[Rule]:
    """List what a configuration may ask for that FSDP2 cannot do."""
    training, infra = config.training, config.infra
    yield Rule(
        "training.fp16 infra.distributed_type",
        "FSDP2 has no loss scaling: set bf16=true and fp16=false, or distributed_type=deepspeed",
        training.fp16,
    )
    yield Rule(
        "model.lora.quantize infra.sharding_stage",
        "4-bit weights cannot be cut into shards: set sharding_stage=zero0, on one rank or several (DDP)",
        _quantizes(config) and infra.sharding_stage != "zero0",
    )
    yield Rule(
        "infra.offload_optimizer infra.distributed_type",
        "FSDP2 keeps nothing on a disk: set offload_optimizer=cpu, or distributed_type=deepspeed",
        infra.offload_optimizer == "nvme",
    )
    # Its sharded parameters are the float32 master weights that the optimizer steps, where they are.
    yield Rule(
        "infra.offload_params infra.offload_optimizer",
        "FSDP2 offloads parameters and optimizer together: set offload_optimizer=cpu, or offload_params=none",
        infra.offload_params == "cpu" and infra.offload_optimizer == "none",
    )
