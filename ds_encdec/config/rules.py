"""Contradictions between fields that are each valid by themselves.

Every rule looks at a whole configuration and yields the contradictions it finds, each with all the fields
it read, so that the report can say where each of them was set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_encdec.config.deepspeed_keys import check_extra
from ds_encdec.engines import ENGINES, EngineName, EngineSpec, load
from ds_encdec.types import DENOISERS

if TYPE_CHECKING:
    from ds_encdec.config.schema import DataConfig, FullConfig, MixtureSource

NATIVE_SCHEDULES = ("WarmupDecayLR", "WarmupLR", "WarmupCosineLR")
"""Schedules that are DeepSpeed's own classes."""
LOCAL_FORMATS = ("text", "json", "csv", "parquet")
"""Data set names that stand for local files."""
_FORMAT_OF = {"jsonl": "json", "ndjson": "json", "txt": "text"}
"""Endings of such files, which are no names of data sets."""
SMALLEST_VOCABULARY = 258
"""Ids of a byte-level tokenizer before the first merge: 256 bytes, padding, end of sequence."""

LARGEST_LOSS = 20.0
"""Nats per target token, above what any model starts with: a guess among the 151,936 ids of Qwen3 costs 11.9."""

ROLLBACK_FIELDS = ("on_non_finite", "on_loss_spike", "on_grad_explosion")
"""Fields of `monitor` that may say `rollback`."""

_FSDP_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "zero0",
    "HYBRID_SHARD": "zero3_hybrid",
}


@dataclass(frozen=True)
class Conflict:
    """Fields (dotted names) that contradict each other, and what is allowed."""

    fields: tuple[str, ...]
    message: str


class ConflictingFields(ValueError):
    """A configuration contradicts itself. `conflicts` lists how."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        self.conflicts = conflicts
        super().__init__("; ".join(f"{', '.join(c.fields)}: {c.message}" for c in conflicts))


def find_conflicts(config: FullConfig) -> list[Conflict]:
    """Everything that contradicts itself in `config`."""
    return [conflict for rule in _RULES for conflict in rule(config)]


def _model_source(config: FullConfig) -> Iterator[Conflict]:
    model = config.model
    fields = ("model.model_name_or_path", "model.architecture")
    if model.model_name_or_path is not None and model.architecture is not None:
        yield Conflict(
            fields, "give one of the two: a checkpoint to start from, or an architecture to start from scratch"
        )
    if model.model_name_or_path is None and model.architecture is None:
        yield Conflict(fields, "one of the two is needed: a checkpoint to start from, or an architecture")
    if model.architecture is not None and model.tokenizer_name_or_path is None:
        message = "a model from scratch brings no tokenizer: name one, or `builtin`"
        yield Conflict(("model.tokenizer_name_or_path",), message)
    if model.architecture is None and model.tokenizer_name_or_path == "builtin":
        message = "builtin goes with an architecture: a pretrained model needs the tokenizer it was trained with"
        yield Conflict(("model.tokenizer_name_or_path", "model.model_name_or_path"), message)


def _architecture(config: FullConfig) -> Iterator[Conflict]:
    shape = config.model.architecture
    if shape is None:
        return
    at = "model.architecture."
    if shape.num_attention_heads % shape.num_key_value_heads:
        message = "every key/value head must serve equally many query heads: one must divide the other"
        yield Conflict((at + "num_attention_heads", at + "num_key_value_heads"), message)
    if shape.head_dim % 2:
        yield Conflict((at + "head_dim",), "must be even: rotary embeddings turn pairs of dimensions")
    mode_tokens = len(DENOISERS) if config.data.use_mode_tokens else 0
    needed = SMALLEST_VOCABULARY + config.model.num_sentinel_tokens + mode_tokens
    if shape.vocab_size < needed:
        message = f"must be >= {needed}: bytes, special tokens, sentinels and mode tokens each take a row"
        yield Conflict((at + "vocab_size", "model.num_sentinel_tokens", "data.use_mode_tokens"), message)
    for length in ("max_encoder_length", "max_decoder_length"):
        if getattr(config.data, length) > shape.max_position_embeddings:
            message = "an example may be longer than the model is declared for"
            yield Conflict(("data." + length, at + "max_position_embeddings"), message)


def _batch(config: FullConfig) -> Iterator[Conflict]:
    sequences, lanes = config.training.global_batch_size, config.data.num_lanes
    size = config.training.per_device_train_batch_size
    given, micro = "training.global_batch_size", "training.per_device_train_batch_size"
    if size == "auto":
        if lanes is not None:
            message = "auto decides how many micro-batches make a step: set global_batch_size, and num_lanes=null"
            yield Conflict((micro, "data.num_lanes"), message)
    elif sequences is not None and sequences % size:
        yield Conflict((given, micro), "a step must be a whole number of micro-batches: the former a multiple")
    elif sequences is not None and lanes is not None and sequences != lanes * size:
        message = f"{lanes} micro-batches of {size} are {lanes * size} sequences: make them equal, or remove one"
        yield Conflict((given, "data.num_lanes", micro), message)


def _precision(config: FullConfig) -> Iterator[Conflict]:
    if config.training.bf16 and config.training.fp16:
        yield Conflict(("training.bf16", "training.fp16"), "at most one may be true; both false is float32")


def _sharding(config: FullConfig) -> Iterator[Conflict]:
    infra = config.infra
    stage, engine = infra.sharding_stage, infra.distributed_type
    if stage == "zero0" and infra.offload_optimizer != "none":
        message = "without sharding there is nothing to offload: set offload_optimizer=none, or zero1 to zero3"
        yield Conflict(("infra.sharding_stage", "infra.offload_optimizer"), message)
    if infra.offload_params != "none" and stage not in ("zero3", "zero3_hybrid"):
        message = "parameters can be offloaded only where they are sharded: set zero3, or offload_params=none"
        yield Conflict(("infra.sharding_stage", "infra.offload_params"), message)
    if engine == "ddp" and stage != "zero0":
        yield Conflict(("infra.distributed_type", "infra.sharding_stage"), "ddp shards nothing: set zero0")
    if infra.hybrid_shard_size is not None and not stage.endswith("_hybrid"):
        message = "only zero2_hybrid and zero3_hybrid shard over fewer ranks than all: set one of them, or null"
        yield Conflict(("infra.hybrid_shard_size", "infra.sharding_stage"), message)


def _compilation(config: FullConfig) -> Iterator[Conflict]:
    if config.training.torch_compile and config.training.activation_checkpointing == "selective":
        message = "inside compiled layers nothing can be selected: set full, every_n or none, or torch_compile=false"
        yield Conflict(("training.torch_compile", "training.activation_checkpointing"), message)


def _engine(config: FullConfig) -> Iterator[Conflict]:
    kind = config.infra.distributed_type
    lacks = [engine_conflicts(config, row.name) for row in ENGINES.values() if kind in (*row.distributed_types, "auto")]
    if all(lacks):  # `auto` takes one that can
        yield from itertools.chain(*lacks)


def engine_conflicts(config: FullConfig, engine: EngineName) -> list[Conflict]:
    """What `config` asks for that `engine` cannot do."""
    return list(load(ENGINES[engine].lacks)(config))


def preferred_engine(config: FullConfig, installed: Callable[[str], bool] = lambda package: True) -> EngineSpec | None:
    """The engine that `infra.distributed_type` means where of the engines' packages those that are `installed` are.

    One that is named is meant whatever it lacks; `auto` is the first that lacks nothing of what `config` asks for.
    None where the package of what is meant is missing, or no engine that is installed can do it.
    """
    kind = config.infra.distributed_type
    for row in ENGINES.values():
        is_meant = kind in row.distributed_types or (kind == "auto" and not engine_conflicts(config, row.name))
        if is_meant and (row.package is None or installed(row.package)):
            return row
    return None


def deepspeed_lacks(config: FullConfig) -> Iterator[Conflict]:
    """What `config` asks for that DeepSpeed cannot do."""
    training, infra = config.training, config.infra
    if infra.sharding_stage == "zero2_hybrid":
        message = "DeepSpeed has no hybrid of ZeRO-2; FSDP2 has: set distributed_type=fsdp, or zero3_hybrid"
        yield Conflict(("infra.sharding_stage", "infra.distributed_type"), message)
    if training.activation_checkpointing == "selective":
        message = "selective checkpointing is FSDP2's (distributed_type=fsdp); DeepSpeed has none, full and every_n"
        yield Conflict(("training.activation_checkpointing", "infra.distributed_type"), message)
    if training.torch_compile:
        message = "compiled layers are FSDP2's: set distributed_type=fsdp, or torch_compile=false"
        yield Conflict(("training.torch_compile", "infra.distributed_type"), message)
    if infra.fsdp_reduce_every_micro_batch:
        message = "this is FSDP2's: set distributed_type=fsdp, or fsdp_reduce_every_micro_batch=false"
        yield Conflict(("infra.fsdp_reduce_every_micro_batch", "infra.distributed_type"), message)
    if training.fp16 and infra.device == "cpu":
        yield Conflict(("training.fp16", "infra.device"), "DeepSpeed trains no float16 on CPUs: use bf16")
    if training.fp16 and infra.sharding_stage == "zero0":
        # DeepSpeed 0.19.8 unscales these gradients without having scaled the loss (runtime/engine.py: backward).
        message = "without sharding DeepSpeed trains float16 wrongly: use bf16, or zero1 to zero3"
        yield Conflict(("training.fp16", "infra.sharding_stage"), message)
    if training.lr_scheduler_type in NATIVE_SCHEDULES and training.warmup_steps < 1:
        message = "DeepSpeed's schedules need at least 1 step of warm-up; linear, cosine and constant do without"
        yield Conflict(("training.warmup_steps", "training.lr_scheduler_type"), message)


def fsdp_lacks(config: FullConfig) -> Iterator[Conflict]:
    """What `config` asks for that FSDP2 cannot do."""
    training, infra = config.training, config.infra
    if training.fp16:
        message = "FSDP2 has no loss scaling: set bf16=true and fp16=false, or distributed_type=deepspeed"
        yield Conflict(("training.fp16", "infra.distributed_type"), message)
    if infra.offload_params == "cpu" and infra.offload_optimizer == "none":
        # Its sharded parameters are the float32 master weights that the optimizer steps, where they are.
        message = "FSDP2 offloads parameters and optimizer together: set offload_optimizer=cpu, or offload_params=none"
        yield Conflict(("infra.offload_params", "infra.offload_optimizer"), message)


def _nvme(config: FullConfig) -> Iterator[Conflict]:
    for field in ("offload_optimizer", "offload_params"):
        if getattr(config.infra, field) == "nvme":
            yield Conflict(("infra." + field,), "nvme does not work yet: checkpoints would lack what is there; use cpu")


def _fsdp_aliases(config: FullConfig) -> Iterator[Conflict]:
    infra, checkpointing = config.infra, config.training.activation_checkpointing
    if infra.fsdp_sharding_strategy is not None:
        stage = _FSDP_STRATEGIES[infra.fsdp_sharding_strategy]
        if stage != infra.sharding_stage:
            message = f"the alias must agree: {infra.fsdp_sharding_strategy} is sharding_stage={stage}"
            yield Conflict(("infra.fsdp_sharding_strategy", "infra.sharding_stage"), message)
    if infra.fsdp_activation_checkpointing is not None:
        wanted = "full" if infra.fsdp_activation_checkpointing else "none"
        if wanted != checkpointing:
            message = f"the alias must agree: this is activation_checkpointing={wanted}"
            yield Conflict(("infra.fsdp_activation_checkpointing", "training.activation_checkpointing"), message)
    if infra.fsdp_cpu_offload is not None:
        for field in ("offload_optimizer", "offload_params"):
            if (getattr(infra, field) == "cpu") is not infra.fsdp_cpu_offload:
                message = f"the alias must agree: this is {field}={'cpu' if infra.fsdp_cpu_offload else 'none'}"
                yield Conflict(("infra.fsdp_cpu_offload", "infra." + field), message)


def _schedule(config: FullConfig) -> Iterator[Conflict]:
    training = config.training
    schedule = training.lr_scheduler_type
    fields = ("training.warmup_steps", "training.num_train_steps", "training.lr_scheduler_type")
    if schedule not in ("WarmupLR", "constant") and training.warmup_steps >= training.num_train_steps:
        yield Conflict(fields, "the warm-up must end before the run does; only WarmupLR and constant have no end")
    decay_steps = round(training.wsd_decay_fraction * training.num_train_steps)
    if schedule == "wsd" and training.warmup_steps < training.num_train_steps < training.warmup_steps + decay_steps:
        message = f"the warm-up and the decay of {decay_steps} steps do not fit into the run"
        yield Conflict((*fields, "training.wsd_decay_fraction"), message)


def _data_sources(config: FullConfig) -> Iterator[Conflict]:
    data = config.data
    if data.mixture is None:
        yield from _source(data, "data.")
        return
    if not data.mixture:
        yield Conflict(("data.mixture",), "a mixture needs at least one source")
    for field in ("dataset_name", "dataset_config", "dataset_split", "dataset_revision", "data_files", "text_column"):
        if getattr(data, field) != type(data).model_fields[field].default:
            message = f"a mixture replaces {field}: remove it, or make it one of the mixture's sources"
            yield Conflict(("data.mixture", "data." + field), message)
    for index, source in enumerate(data.mixture):
        yield from _source(source, f"data.mixture.{index}.")


def _source(source: DataConfig | MixtureSource, at: str) -> Iterator[Conflict]:
    fields = (at + "dataset_name", at + "data_files")
    if meant := _FORMAT_OF.get(source.dataset_name):
        yield Conflict(fields[:1], f"no data set; for local files of this kind write `{meant}`")
    if source.dataset_name in LOCAL_FORMATS and not source.data_files:
        yield Conflict(fields, f"{source.dataset_name} needs data_files: paths or patterns of local files")
    if source.dataset_name in ("builtin", "random") and source.data_files is not None:
        yield Conflict(fields, f"{source.dataset_name} reads no files; for yours set {', '.join(LOCAL_FORMATS)}")


def _denoisers(config: FullConfig) -> Iterator[Conflict]:
    weights = config.data.ul2_task_weights
    if min(weights) < 0:
        yield Conflict(("data.ul2_task_weights",), f"weights of {', '.join(DENOISERS)} must be >= 0")
    elif not any(weights):
        yield Conflict(("data.ul2_task_weights",), f"at least one of {', '.join(DENOISERS)} must have a weight > 0")


def _averaging(config: FullConfig) -> Iterator[Conflict]:
    if config.training.average_checkpoints == 1:
        yield Conflict(("training.average_checkpoints",), "the mean of one is that one: give 2 or more, or 0 for none")


def _evaluation(config: FullConfig) -> Iterator[Conflict]:
    if config.training.eval_samples and not config.data.eval_fraction:
        message = "evaluation needs held-out documents: set eval_fraction > 0, or eval_samples=0"
        yield Conflict(("data.eval_fraction", "training.eval_samples"), message)


def _early_stopping(config: FullConfig) -> Iterator[Conflict]:
    training = config.training
    for field, asked in (
        ("early_stopping_patience", training.early_stopping_patience is not None),
        ("save_on_best", training.save_on_best),
    ):
        if asked and not training.eval_samples:
            message = "this is decided on the evaluation's loss: set eval_samples > 0, or turn it off"
            yield Conflict((f"training.{field}", "training.eval_samples"), message)


def _monitor(config: FullConfig) -> Iterator[Conflict]:
    monitor, training = config.monitor, config.training
    if monitor.loss_spike_min_values > monitor.window_size:
        message = "the window never holds that many losses, so that no spike would ever be seen: lower the former"
        yield Conflict(("monitor.loss_spike_min_values", "monitor.window_size"), message)
    threshold_is_set = monitor.grad_norm_threshold != type(monitor).model_fields["grad_norm_threshold"].default
    if threshold_is_set and monitor.grad_norm_threshold < training.max_grad_norm:
        message = "a norm that is not even clipped would be an explosion: raise the former, or lower the latter"
        yield Conflict(("monitor.grad_norm_threshold", "training.max_grad_norm"), message)
    rolling_back = [f"monitor.{name}" for name in ROLLBACK_FIELDS if getattr(monitor, name) == "rollback"]
    if not rolling_back:
        return
    kept = training.save_total_limit
    if kept is not None and (kept - 1) * training.save_steps < monitor.rollback_min_steps:
        oldest = (kept - 1) * training.save_steps
        message = f"the oldest of {kept} kept checkpoints is {oldest} steps old, too young to go back to: keep more"
        fields = ("training.save_total_limit", "training.save_steps", "monitor.rollback_min_steps")
        yield Conflict((*fields, *rolling_back), message)
    if training.save_steps + monitor.rollback_min_steps > training.num_train_steps:
        message = "no checkpoint of this run would ever be old enough to go back to: lower the first two"
        fields = ("training.save_steps", "monitor.rollback_min_steps", "training.num_train_steps")
        yield Conflict((*fields, *rolling_back), message)


def _phase_gates(config: FullConfig) -> Iterator[Conflict]:
    """A decrease that no run can make would be noticed after days."""
    shape = config.model.architecture
    first_loss = LARGEST_LOSS if shape is None else math.log(shape.vocab_size)
    for phase in type(config.phases).model_fields:
        gate = getattr(config.phases, phase)
        if not 0 <= (gate.min_loss_decrease or 0) < first_loss:
            message = f"must be >= 0 and < {first_loss:.1f} nats, what the first loss is at most: none falls below 0"
            fields = ("model.architecture.vocab_size",) if shape else ()
            yield Conflict((f"phases.{phase}.min_loss_decrease", *fields), message)
        if (gate.max_loss_after_warmup or 0) > LARGEST_LOSS:
            message = f"must be <= {LARGEST_LOSS:.0f} nats: any run keeps a limit above"
            yield Conflict((f"phases.{phase}.max_loss_after_warmup",), message)


def _hang(config: FullConfig) -> Iterator[Conflict]:
    infra = config.infra
    if 0 < (infra.hang_timeout_minutes or 0) < 0.1:
        message = "no run makes a step so soon after its start: give 0.1 (6 seconds) or more, or 0 for never"
        yield Conflict(("infra.hang_timeout_minutes",), message)
    if infra.hang_timeout_minutes is not None and infra.hang_timeout_minutes >= infra.distributed_timeout_minutes:
        message = "a collective that stands still would end the run before anybody saw where: lower the former"
        yield Conflict(("infra.hang_timeout_minutes", "infra.distributed_timeout_minutes"), message)


def _deepspeed_extra(config: FullConfig) -> Iterator[Conflict]:
    for path, message in check_extra(config.infra.deepspeed_extra):
        yield Conflict((f"infra.deepspeed_extra.{path}",), message)
    if "scheduler" in config.infra.deepspeed_extra and config.training.lr_scheduler_type not in NATIVE_SCHEDULES:
        message = f"only DeepSpeed's own schedules take these: {', '.join(NATIVE_SCHEDULES)}"
        yield Conflict(("infra.deepspeed_extra.scheduler", "training.lr_scheduler_type"), message)


def _adam_options(config: FullConfig) -> Iterator[Conflict]:
    """Options that one class of AdamW has and the other, which runs, would stop at."""
    optimizer = config.infra.deepspeed_extra.get("optimizer", {})
    given = optimizer.get("params", {}) if isinstance(optimizer, dict) else {}
    torch_adam = config.training.torch_adam
    theirs, other = ("DeepSpeed", "false") if torch_adam else ("torch", "true")
    for name in ("bias_correction",) if torch_adam else ("fused", "foreach"):
        if name in given:
            message = f"only {theirs}'s AdamW has this: set training.torch_adam={other}"
            yield Conflict((f"infra.deepspeed_extra.optimizer.params.{name}", "training.torch_adam"), message)
    if given.get("fused") and given.get("foreach"):
        fields = tuple(f"infra.deepspeed_extra.optimizer.params.{name}" for name in ("fused", "foreach"))
        yield Conflict(fields, "torch's AdamW takes one of them")


_RULES: tuple[Callable[[FullConfig], Iterator[Conflict]], ...] = (
    _model_source,
    _architecture,
    _batch,
    _precision,
    _sharding,
    _compilation,
    _engine,
    _nvme,
    _fsdp_aliases,
    _schedule,
    _data_sources,
    _denoisers,
    _evaluation,
    _averaging,
    _early_stopping,
    _monitor,
    _phase_gates,
    _hang,
    _deepspeed_extra,
    _adam_options,
)
