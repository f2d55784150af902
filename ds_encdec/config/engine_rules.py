"""Rules about contradictions between fields of `infra`, and about requests that an engine cannot fulfil."""

from collections.abc import Callable, Iterator

from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import Conflict, Settings, conflicts_in
from ds_encdec.config.yaml.deepspeed_keys import check_extra
from ds_encdec.registry.engines import ByEngine
from ds_encdec.registry.optimizers import OPTIMIZERS, row_of

NATIVE_SCHEDULES = ("WarmupDecayLR", "WarmupLR", "WarmupCosineLR")  # DeepSpeed's own classes
_ENGINE, _STAGE, _EXTRA = "infra.distributed_type", "infra.sharding_stage", "infra.deepspeed_extra"


def infra_rules(config: Sections) -> Iterator[Conflict]:
    """Yield the contradictions within `infra`, including `deepspeed_extra`."""
    infra, stage, hang = config.infra, config.infra.sharding_stage, config.infra.hang_timeout_minutes or 0
    is_ddp, is_zero3 = infra.distributed_type == "ddp", stage.startswith("zero3")
    extra, at, conflict = Settings(infra.deepspeed_extra), "optimizer.params.", conflicts_in("infra")
    if stage == "zero0" and infra.offload_optimizer != "none":
        yield conflict(
            f"{'distributed_type' if is_ddp else ''} sharding_stage offload_optimizer",
            "without sharding there is nothing to offload: set offload_optimizer=none"
            + ("" if is_ddp else ", or zero1 to zero3"),
        )
    if infra.offload_params != "none" and not is_zero3:
        yield conflict(
            "sharding_stage offload_params",
            "parameters can be offloaded only where they are sharded: set zero3, or offload_params=none",
        )
    if infra.offload_optimizer == "nvme" and infra.nvme_path is None:
        yield conflict("offload_optimizer nvme_path", "nvme needs a disk of every node: set nvme_path")
    if infra.offload_optimizer == "nvme" and not is_zero3:
        yield conflict(
            "offload_optimizer sharding_stage",
            "only states of sharded parameters can be on a disk: set zero3, or offload_optimizer=cpu",
        )
    if is_ddp and stage != "zero0":
        yield conflict("distributed_type sharding_stage", "ddp shards nothing: set zero0")
    if infra.hybrid_shard_size is not None and not stage.endswith("_hybrid"):
        yield conflict(
            "hybrid_shard_size sharding_stage",
            "only zero2_hybrid and zero3_hybrid shard over fewer ranks than all: set one of them, or null",
        )
    if 0 < hang < 0.1:
        yield conflict("hang_timeout_minutes", "no step is that fast: give 0.1 (6 seconds) or more, or 0 for never")
    if hang >= infra.distributed_timeout_minutes:
        yield conflict(
            "hang_timeout_minutes distributed_timeout_minutes",
            "must be smaller, or collectives time out before the watchdog writes stack traces",
        )
    if "scheduler" in infra.deepspeed_extra and config.training.lr_scheduler_type not in NATIVE_SCHEDULES:
        yield conflict(
            f"{_EXTRA}.scheduler training.lr_scheduler_type",
            f"only DeepSpeed's own schedules take these: {', '.join(NATIVE_SCHEDULES)}",
        )
    if extra.get(f"{at}fused") and extra.get(f"{at}foreach"):
        yield conflict(f"{_EXTRA}.{at}fused {_EXTRA}.{at}foreach", "torch's AdamW takes one of them")
    for path, message in check_extra(infra.deepspeed_extra):  # whose paths may have blanks
        yield Conflict((f"{_EXTRA}.{path}",), message)


def _quantizes(config: Sections) -> bool:
    return config.model.lora is not None and config.model.lora.quantize != "none"


def _deepspeed_lacks(config: Sections) -> Iterator[Conflict]:
    training, infra, extra = config.training, config.infra, Settings(config.infra.deepspeed_extra)
    stage, trains_a_part = infra.sharding_stage, training.freeze or config.model.lora is not None
    is_users, conflict = training.optimizer not in OPTIMIZERS, conflicts_in("training")
    if stage == "zero2_hybrid":
        yield conflict(
            f"{_STAGE} {_ENGINE}",
            "DeepSpeed has no hybrid of ZeRO-2; FSDP2 has: set distributed_type=fsdp, or zero3_hybrid",
        )
    if training.activation_checkpointing == "selective":
        yield conflict(
            f"activation_checkpointing {_ENGINE}",
            "selective checkpointing is FSDP2's (distributed_type=fsdp); DeepSpeed has none, full and every_n",
        )
    if (
        training.torch_compile is True
        and stage.startswith("zero3")
        and (trains_a_part or "zero_optimization.leaf_module" in extra)
    ):
        yield conflict(
            f"torch_compile {_STAGE} {_ENGINE}",
            "ZeRO-3 gathers parameters inside layers here (training.freeze, model.lora, leaf_module), which cannot be "
            "compiled so: set torch_compile=auto, sharding_stage=zero2 or lower, or distributed_type=fsdp",
        )
    if infra.fsdp_reduce_every_micro_batch:
        yield conflict(
            f"infra.fsdp_reduce_every_micro_batch {_ENGINE}",
            "this is FSDP2's: set distributed_type=fsdp, or fsdp_reduce_every_micro_batch=false",
        )
    if training.fp16 and infra.device == "cpu":
        yield conflict("fp16 infra.device", "DeepSpeed trains no float16 on CPUs: use bf16")
    # DeepSpeed 0.19.8 unscales these gradients without having scaled the loss (runtime/engine.py: backward).
    if training.fp16 and stage == "zero0":
        yield conflict(f"fp16 {_STAGE}", "unsharded, DeepSpeed trains float16 wrongly: use bf16, or zero1 to zero3")
    if _quantizes(config):
        yield conflict(
            f"model.lora.quantize {_ENGINE}",
            "DeepSpeed cannot send 4-bit weights: set distributed_type=ddp and sharding_stage=zero0, or quantize=none",
        )
    if refusal := row_of(training.optimizer).not_deepspeeds:
        yield conflict(f"optimizer {_ENGINE}", refusal)
    if is_users and "optimizer" in infra.deepspeed_extra:
        yield conflict(f"optimizer {_EXTRA}.optimizer", "two optimizers: remove one of the two")
    if is_users and infra.offload_optimizer == "nvme":
        yield conflict(
            f"optimizer infra.offload_optimizer {_ENGINE}",
            "DeepSpeed swaps only AdamW's states to a disk: set offload_optimizer=cpu or none, or optimizer=adamw",
        )
    if training.lr_scheduler_type in NATIVE_SCHEDULES and training.warmup_steps < 1:
        yield conflict(
            "warmup_steps lr_scheduler_type",
            "DeepSpeed's schedules need at least 1 step of warm-up; linear, cosine and constant do without",
        )
    yield from _keys_that_deepspeed_lacks(config)


def _keys_that_deepspeed_lacks(config: Sections) -> Iterator[Conflict]:
    """Yield keys of DeepSpeed's JSON at which DeepSpeed, as it runs here, would stop or lose something."""
    infra, extra = config.infra, Settings(config.infra.deepspeed_extra)
    trains_a_part = config.training.freeze or config.model.lora is not None
    zero, low = f"{_EXTRA}.zero_optimization", ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    are_low, conflict = [extra.get(f"bf16.{key}") for key in low], conflicts_in("infra")
    if any(are_low) and not (all(are_low) and infra.offload_optimizer == "none"):
        yield conflict(
            " ".join([*(f"{_EXTRA}.bf16.{key}" for key in low), "offload_optimizer"]),
            "one alone, or offloaded, is for DeepSpeed's CPUAdam: set both and offload_optimizer=none, or remove both",
        )
    if extra.get("zero_optimization.zero_quantized_nontrainable_weights"):
        yield conflict(
            f"{zero}.zero_quantized_nontrainable_weights",
            "DeepSpeed quantizes frozen weights for good, and checkpoints would hold the quantized ones: remove it",
        )
    for key in ("pipeline_read", "pipeline_write"):
        if infra.offload_optimizer == "nvme" and extra.get(f"zero_optimization.offload_optimizer.{key}") is not None:
            yield conflict(
                f"offload_optimizer {zero}.offload_optimizer.{key}",
                "states on a disk are float32, and read and written one sub-group after the other: remove it",
            )
    # A leaf's gradients are reduced once its input has a gradient; if the input needs none, before all others.
    for key in (
        *(f"leaf_module.{what}" for what in ("classes", "names", "name_suffixes")),
        "stage3_module_granularity_threshold",
    ):
        if trains_a_part and extra.get(f"zero_optimization.{key}"):
            yield conflict(
                f"{zero}.{key}",
                "gradients of leaf modules are lost where their input is not trained, as with training.freeze and "
                "model.lora: remove it, or train everything",
            )


def _fsdp_lacks(config: Sections) -> Iterator[Conflict]:
    infra, conflict = config.infra, conflicts_in("infra")
    if config.training.fp16:
        yield conflict(
            f"training.fp16 {_ENGINE}",
            "FSDP2 has no loss scaling: set bf16=true and fp16=false, or distributed_type=deepspeed",
        )
    if _quantizes(config) and infra.sharding_stage != "zero0":
        yield conflict(
            f"model.lora.quantize {_STAGE}",
            "4-bit weights cannot be cut into shards: set sharding_stage=zero0, on one rank or several (DDP)",
        )
    if infra.offload_optimizer == "nvme":
        yield conflict(
            f"offload_optimizer {_ENGINE}",
            "FSDP2 keeps nothing on a disk: set offload_optimizer=cpu, or distributed_type=deepspeed",
        )
    # Its sharded parameters are the float32 master weights, which the optimizer steps on their device.
    if infra.offload_params == "cpu" and infra.offload_optimizer == "none":
        yield conflict(
            "offload_params offload_optimizer",
            "FSDP2 offloads parameters and optimizer together: set offload_optimizer=cpu, or offload_params=none",
        )


# Functions that yield the requests of a configuration that an engine cannot fulfil.
LACKS: ByEngine[Callable[[Sections], Iterator[Conflict]]] = ByEngine(deepspeed=_deepspeed_lacks, fsdp=_fsdp_lacks)
