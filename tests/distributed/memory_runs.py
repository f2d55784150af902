"""The runs whose memory is measured and estimated: models whose parameters dwarf their activations."""

from __future__ import annotations

from typing import Any

from small_run import run_config, small_model

from ds_encdec.config.schema import FullConfig
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.registry.engines import EngineName

MICRO_BATCH_TOKENS = 4
BOUNDED: dict[str, Any] = {
    "stage3_max_live_parameters": 800_000,
    "stage3_max_reuse_distance": 800_000,
    "sub_group_size": 200_000,
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1": {},
    "zero1 overlap": {"zero": {"overlap_comm": True}},
    "zero2": {},
    "zero2 bf16-states": {"extra": {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}},
    "zero2 offload float32": {"offload_optimizer": "cpu", "bf16": False},
    # Before others of stage 3, which leave DeepSpeed's linear layers in the place of torch's: recomputation needs none.
    "zero3 bounded recomputed": {"zero": BOUNDED, "activation_checkpointing": "full"},
    "zero3": {},
    "zero3 bounded": {"zero": BOUNDED},
    "zero3 offload": {"offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3_hybrid": {"hybrid_shard_size": 2},
    # Last: what DeepSpeed leaves of this one goes when the next is built, in the middle of its measurement.
    "zero1 float32-accumulation": {"extra": {"data_types": {"grad_accum_dtype": "fp32"}}},
}
FSDP: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero2": {},
    "zero2 one-micro-batch": {"gradient_accumulation_steps": 1},
    "zero3": {},
    "zero3 reduced": {"fsdp_reduce_every_micro_batch": True},
    "zero3 untied": {},
    "zero3_hybrid": {"hybrid_shard_size": 2},
    "zero0 muon": {"optimizer": "muon"},
    "zero3 muon": {"optimizer": "muon"},
}
"""Fields of `training` and `infra` beside the sharding stage, which is a name's first word. `zero`: keys of DeepSpeed's
`zero_optimization`; `extra`: other keys of its JSON."""


def run_of(engine: EngineName, case: str) -> tuple[FullConfig, Qwen3Seq2SeqConfig]:
    """A bf16 run on the CPU, of two micro-batches a step unless the case says otherwise, and its model.

    Under FSDP2 rows do not divide evenly: the first rank holds more than the others.
    """
    stage = case.split()[0]
    vocabulary, hidden, inner = (256, 256, 512) if engine == "deepspeed" else (255, 250, 511)
    model = small_model(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        head_dim=64,
        tie_word_embeddings="untied" not in case,
        loss_chunk_tokens=MICRO_BATCH_TOKENS,
    )
    given = dict((DEEPSPEED if engine == "deepspeed" else FSDP)[case])
    zero, extra = given.pop("zero", {}), given.pop("extra", {})
    if engine == "deepspeed":
        # As with real models: a bucket holds a layer's largest matrix, and only norms are small enough to stay whole.
        buckets: dict[str, Any] = {} if stage == "zero0" else {"reduce_bucket_size": 140_000}
        if stage.startswith("zero3"):
            buckets |= {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 140_000}
        extra = {"zero_optimization": buckets | zero, **extra}
    common = {"bf16": True, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    kind = "ddp" if engine == "fsdp" and stage == "zero0" else engine
    infra = {"distributed_type": kind, "sharding_stage": stage, "deepspeed_extra": extra}
    return run_config(**common | infra | given), model
