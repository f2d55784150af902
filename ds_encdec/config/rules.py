"""Contradictions between sections; those inside of one are its own rules (sections.py).

Every rule yields whether it is broken, with all the fields it read, so that the report can say where each was set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ds_encdec.config.errors import Conflict, Rules, broken
from ds_encdec.config.sections import LARGEST_LOSS, MonitorConfig, Sections
from ds_encdec.config.settings import Settings
from ds_encdec.denoisers import DENOISERS
from ds_encdec.engines import ENGINES, EngineName, EngineSpec, load

NATIVE_SCHEDULES = ("WarmupDecayLR", "WarmupLR", "WarmupCosineLR")
"""Schedules that are DeepSpeed's own classes."""
SMALLEST_VOCABULARY = 258
"""Ids of a byte-level tokenizer before the first merge: 256 bytes, padding, end of sequence."""
ROLLBACK_FIELDS = ("on_non_finite", "on_loss_spike", "on_grad_explosion")
"""Fields of `monitor` that may say `rollback`."""


def find_conflicts(config: Sections) -> list[Conflict]:
    """List everything that contradicts itself in `config`."""
    rules = itertools.chain(*(rule(config) for rule in (_architecture, _training, _rollback, _phase_gates)))
    return [*config.conflicts(), *broken(rules), *_no_engine(config)]


def _architecture(config: Sections) -> Rules:
    shape = config.model.architecture
    if shape is None:
        return
    at = "model.architecture."
    needed = SMALLEST_VOCABULARY + config.model.num_sentinel_tokens + len(DENOISERS) * config.data.use_mode_tokens
    fields = f"{at}vocab_size model.num_sentinel_tokens data.use_mode_tokens"
    message = f"must be >= {needed}: bytes, special tokens, sentinels and mode tokens each take a row"
    yield shape.vocab_size < needed, fields, message
    for length in ("max_encoder_length", "max_decoder_length"):
        is_longer = getattr(config.data, length) > shape.max_position_embeddings
        message = "an example may be longer than the model is declared for"
        yield is_longer, f"data.{length} {at}max_position_embeddings", message


def _training(config: Sections) -> Rules:
    training, data, infra, monitor = config.training, config.data, config.infra, config.monitor
    sequences, size, lanes = training.global_batch_size, training.per_device_train_batch_size, data.num_lanes
    micro = "training.per_device_train_batch_size"
    if size == "auto":
        message = "auto decides how many micro-batches make a step: set global_batch_size, and num_lanes=null"
        yield lanes is not None, f"{micro} data.num_lanes", message
    elif sequences is not None and lanes is not None and sequences % size == 0:
        message = f"{lanes} micro-batches of {size} are {lanes * size} sequences: make them equal, or remove one"
        yield sequences != lanes * size, f"training.global_batch_size data.num_lanes {micro}", message
    message = "evaluation needs held-out documents: set eval_fraction > 0, or eval_samples=0"
    yield training.eval_samples and not data.eval_fraction, "data.eval_fraction training.eval_samples", message
    alias, meant = infra.fsdp_activation_checkpointing, "full" if infra.fsdp_activation_checkpointing else "none"
    fields = "infra.fsdp_activation_checkpointing training.activation_checkpointing"
    message = f"the alias must agree: this is activation_checkpointing={meant}"
    yield alias is not None and meant != training.activation_checkpointing, fields, message
    is_set = monitor.grad_norm_threshold != MonitorConfig.model_fields["grad_norm_threshold"].default
    message = "gradients below max_grad_norm are not clipped and cannot be explosions: raise grad_norm_threshold"
    is_below = is_set and monitor.grad_norm_threshold < training.max_grad_norm
    yield is_below, "monitor.grad_norm_threshold training.max_grad_norm", message
    extra, is_ours = infra.deepspeed_extra, training.lr_scheduler_type not in NATIVE_SCHEDULES
    message = f"only DeepSpeed's own schedules take these: {', '.join(NATIVE_SCHEDULES)}"
    yield is_ours and "scheduler" in extra, "infra.deepspeed_extra.scheduler training.lr_scheduler_type", message
    # Options that one class of AdamW has and the other, which runs, would stop at.
    given, at = Settings(extra).get("optimizer.params"), "infra.deepspeed_extra.optimizer.params."
    given = given if isinstance(given, dict) else {}
    theirs, other = ("DeepSpeed", "false") if training.torch_adam else ("torch", "true")
    for name in ("bias_correction",) if training.torch_adam else ("fused", "foreach"):
        message = f"only {theirs}'s AdamW has this: set training.torch_adam={other}"
        yield name in given, f"{at}{name} training.torch_adam", message
    yield given.get("fused") and given.get("foreach"), f"{at}fused {at}foreach", "torch's AdamW takes one of them"


def _rollback(config: Sections) -> Rules:
    monitor, training = config.monitor, config.training
    rolling_back = " ".join(f"monitor.{name}" for name in ROLLBACK_FIELDS if getattr(monitor, name) == "rollback")
    if not rolling_back:
        return
    kept, fields = training.save_total_limit, f"training.save_steps monitor.rollback_min_steps {rolling_back}"
    oldest = math.inf if kept is None else (kept - 1) * training.save_steps
    message = f"the oldest of {kept} kept checkpoints is {oldest} steps old, too young to go back to: keep more"
    yield oldest < monitor.rollback_min_steps, f"training.save_total_limit {fields}", message
    message = "no checkpoint of this run would ever be old enough to go back to: lower the first two"
    is_too_short = training.save_steps + monitor.rollback_min_steps > training.num_train_steps
    yield is_too_short, f"{fields} training.num_train_steps", message


def _phase_gates(config: Sections) -> Rules:
    """A decrease that no run can make would be noticed after days."""
    shape = config.model.architecture
    first_loss = LARGEST_LOSS if shape is None else math.log(shape.vocab_size)
    for phase, numbers in config.phases:
        fields = f"phases.{phase}.min_loss_decrease {'model.architecture.vocab_size' if shape else ''}"
        message = f"must be >= 0 and < {first_loss:.1f} nats, what the first loss is at most: none falls below 0"
        yield not 0 <= (numbers.min_loss_decrease or 0) < first_loss, fields, message


def _no_engine(config: Sections) -> list[Conflict]:
    kind = config.infra.distributed_type
    lacks = [engine_conflicts(config, row.name) for row in ENGINES.values() if kind in (*row.distributed_types, "auto")]
    return [conflict for found in lacks for conflict in found if all(lacks)]  # `auto` takes one that can


def engine_conflicts(config: Sections, engine: EngineName) -> list[Conflict]:
    """List what `config` asks for that `engine` cannot do."""
    return list(load(ENGINES[engine].lacks)(config))


def engine_candidates(config: Sections) -> list[EngineSpec]:
    """The engines that `infra.distributed_type` leaves the choice of, the preferred one first; never empty.

    `auto` leaves those that can do what `config` asks; the rules refuse a configuration that none can do.
    """
    rows = list(ENGINES.values())
    asked = [row for row in rows if config.infra.distributed_type in row.distributed_types]
    return asked or [row for row in rows if not engine_conflicts(config, row.name)] or rows[-1:]


def deepspeed_lacks(config: Sections) -> Iterator[Conflict]:
    """Yield what `config` asks for that DeepSpeed cannot do."""
    return broken(_deepspeed_lacks(config))


def fsdp_lacks(config: Sections) -> Iterator[Conflict]:
    """Yield what `config` asks for that FSDP2 cannot do."""
    return broken(_fsdp_lacks(config))


def _deepspeed_lacks(config: Sections) -> Rules:
    training, infra, engine = config.training, config.infra, "infra.distributed_type"
    message = "DeepSpeed has no hybrid of ZeRO-2; FSDP2 has: set distributed_type=fsdp, or zero3_hybrid"
    yield infra.sharding_stage == "zero2_hybrid", f"infra.sharding_stage {engine}", message
    message = "selective checkpointing is FSDP2's (distributed_type=fsdp); DeepSpeed has none, full and every_n"
    yield training.activation_checkpointing == "selective", f"training.activation_checkpointing {engine}", message
    message = "compiled layers are FSDP2's: set distributed_type=fsdp, or torch_compile=false"
    yield training.torch_compile, f"training.torch_compile {engine}", message
    message = "this is FSDP2's: set distributed_type=fsdp, or fsdp_reduce_every_micro_batch=false"
    yield infra.fsdp_reduce_every_micro_batch, f"infra.fsdp_reduce_every_micro_batch {engine}", message
    message = "DeepSpeed trains no float16 on CPUs: use bf16"
    yield training.fp16 and infra.device == "cpu", "training.fp16 infra.device", message
    # DeepSpeed 0.19.8 unscales these gradients without having scaled the loss (runtime/engine.py: backward).
    message = "without sharding DeepSpeed trains float16 wrongly: use bf16, or zero1 to zero3"
    yield training.fp16 and infra.sharding_stage == "zero0", "training.fp16 infra.sharding_stage", message
    has_no_warmup = training.lr_scheduler_type in NATIVE_SCHEDULES and training.warmup_steps < 1
    message = "DeepSpeed's schedules need at least 1 step of warm-up; linear, cosine and constant do without"
    yield has_no_warmup, "training.warmup_steps training.lr_scheduler_type", message


def _fsdp_lacks(config: Sections) -> Rules:
    message = "FSDP2 has no loss scaling: set bf16=true and fp16=false, or distributed_type=deepspeed"
    yield config.training.fp16, "training.fp16 infra.distributed_type", message
    # Its sharded parameters are the float32 master weights that the optimizer steps, where they are.
    apart = config.infra.offload_params == "cpu" and config.infra.offload_optimizer == "none"
    message = "FSDP2 offloads parameters and optimizer together: set offload_optimizer=cpu, or offload_params=none"
    yield apart, "infra.offload_params infra.offload_optimizer", message
