"""Which cases of engine_cases.py run at which world size, in one start of processes each: starting takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_run import SHORT_STEPS, STEPS

Case = tuple[str, str, dict[str, Any]]

STAGES = ("zero0", "zero1", "zero2", "zero3")
SHARDED = STAGES[1:]

# ZeRO-3 with what it is given by default: parameters as small as these stay whole between steps.
DEFAULT_PERSISTENCE = {"deepspeed_extra": {}}
# DeepSpeed then builds another optimizer for stage 1, with the norm in another place.
FLOAT32_ACCUMULATION = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "fp32"}}}

PARITY: dict[str, dict[str, Any]] = {
    **{stage: {"sharding_stage": stage, "steps": STEPS} for stage in STAGES},
    **{f"{stage}-offload": {"sharding_stage": stage, "offload_optimizer": "cpu", "steps": STEPS} for stage in SHARDED},
    "zero1-wsd": {
        "sharding_stage": "zero1",
        "lr_scheduler_type": "wsd",
        "wsd_decay_fraction": 0.5,
        "steps": STEPS,
    },
    "zero3-offload-all": {"offload_optimizer": "cpu", "offload_params": "cpu", "steps": SHORT_STEPS},
}
"""Float32 runs that must be the oracle's, by name, on one and two ranks."""

TWO_RANK_PARITY: dict[str, dict[str, Any]] = PARITY | {
    "zero3-short": {"steps": SHORT_STEPS},
    "zero3-persistent": {"steps": SHORT_STEPS, **DEFAULT_PERSISTENCE},
    "zero3-recompute": {"steps": SHORT_STEPS, "activation_checkpointing": "full"},
    "zero3-recompute-every-2": {"steps": SHORT_STEPS, "activation_checkpointing": "every_n"},
    "zero3-activation-offload": {
        "steps": SHORT_STEPS,
        "activation_checkpointing": "full",
        "activation_offload": True,
    },
    "zero3-warmup-decay": {"steps": SHORT_STEPS, "lr_scheduler_type": "WarmupDecayLR"},
}
"""The same, on two ranks only."""

SKIPS: dict[str, dict[str, Any]] = {
    f"{stage}-{how}": {"sharding_stage": stage, "how": how} for stage in STAGES for how in ("veto", "nan")
} | {
    "zero1-offload-bf16-veto": {"sharding_stage": "zero1", "offload_optimizer": "cpu", "bf16": True, "how": "veto"},
    "zero2-bf16-nan": {"sharding_stage": "zero2", "bf16": True, "how": "nan"},
    "zero3-offload-bf16-veto": {"offload_optimizer": "cpu", "bf16": True, "how": "veto"},
    "zero1-float32-accumulation-veto": {"sharding_stage": "zero1", "bf16": True, "how": "veto", **FLOAT32_ACCUMULATION},
    "zero1-float32-accumulation-nan": {"sharding_stage": "zero1", "bf16": True, "how": "nan", **FLOAT32_ACCUMULATION},
}
"""Runs with a skipped step, by name."""

RESUMES: dict[str, dict[str, Any]] = {
    **{stage: {"sharding_stage": stage} for stage in ("zero0", "zero2")},
    "zero1-bf16": {"sharding_stage": "zero1", "bf16": True},
    "zero3-offload-bf16": {"offload_optimizer": "cpu", "bf16": True},
    "zero1-warmup-cosine": {"sharding_stage": "zero1", "lr_scheduler_type": "WarmupCosineLR"},
    "zero3-persistent": {"bf16": True, **DEFAULT_PERSISTENCE},
    "zero3-warmup-decay": {"lr_scheduler_type": "WarmupDecayLR"},
}
"""Runs that are saved and resumed, by name. They change no setting."""

OTHER_SETTINGS = {
    "learning_rate": 3e-3,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.2,
    "num_train_steps": 5,
}
CHANGED_RESUMES: dict[str, dict[str, Any]] = {
    "zero0-cosine": {"sharding_stage": "zero0", "then": OTHER_SETTINGS},
    "zero1-wsd": {"sharding_stage": "zero1", "then": {**OTHER_SETTINGS, "lr_scheduler_type": "wsd"}},
    "zero2-to-native": {"sharding_stage": "zero2", "then": {**OTHER_SETTINGS, "lr_scheduler_type": "WarmupDecayLR"}},
    "zero3-offload-from-native": {
        "offload_optimizer": "cpu",
        "lr_scheduler_type": "WarmupDecayLR",
        "then": {**OTHER_SETTINGS, "lr_scheduler_type": "cosine"},
    },
    "zero3-native": {"lr_scheduler_type": "WarmupCosineLR", "then": OTHER_SETTINGS},
}
"""Float32 runs that are resumed with other settings, by name."""

UNTRAINED: dict[str, dict[str, Any]] = {
    **{f"{stage}-bf16": {"sharding_stage": stage, "bf16": True} for stage in SHARDED},
    "zero1-bf16-float32-accumulation": {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
    "zero2-bf16-offload": {"sharding_stage": "zero2", "bf16": True, "offload_optimizer": "cpu"},
    "zero3-bf16-offload": {"bf16": True, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3-bf16-persistent": {"bf16": True, **DEFAULT_PERSISTENCE},
}
"""Runs with float32 weights beside those they compute with, by name."""

LOSSLESS = ("zero1-bf16", "zero3-bf16")
"""Those of them that also start from a bf16 source."""

UNREADABLE = {f"{stage}-{problem}": (stage, problem) for stage in ("zero1", "zero3") for problem in ("shape", "error")}
"""Sources that rank 0 cannot read, by name."""


def cases(world_size: int, folder: Path) -> list[Case]:
    """All cases of a start with `world_size` ranks; checkpoints go under `folder`."""
    parity = PARITY if world_size == 1 else TWO_RANK_PARITY
    plan: list[Case] = [(f"parity {name}", "trajectory", given) for name, given in parity.items()]
    if world_size == 1:
        return plan
    plan += [(f"skip {name}", "skipping", given) for name, given in SKIPS.items()]
    plan += [
        (f"resume {name}", "resuming", {"directory": str(folder / name), **given}) for name, given in RESUMES.items()
    ]
    plan += [
        (f"changed {name}", "resuming_changed", {"directory": str(folder / f"changed-{name}"), **given})
        for name, given in CHANGED_RESUMES.items()
    ]
    plan += [
        (f"untrained {name} {source}", "untrained", {"source": source, **given})
        for name, given in UNTRAINED.items()
        for source in (("float32", "bf16") if name in LOSSLESS else ("float32",))
    ]
    plan += [
        (f"unreadable {name}", "unreadable_weights", {"sharding_stage": stage, "problem": problem})
        for name, (stage, problem) in UNREADABLE.items()
    ]
    plan += [(f"decay {stage}", "only_decay", {"sharding_stage": stage}) for stage in ("zero0", "zero3")]
    plan.append(("shards", "shard_sizes", {}))
    plan.append(("refused", "refused_loads", {"directory": str(folder / "refused"), "sharding_stage": "zero2"}))
    return plan
