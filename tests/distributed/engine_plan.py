"""Which cases of engine_cases.py run at which world size, in one start of processes each: starting takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_steps import Case
from small_run import FREEZE, LORA, OWN_OPTIMIZER, REGULARIZED, SHORT_STEPS

LANES = 4
SAVED_STEP, LAST_STEP = 3, 5
"""Of the runs that go on elsewhere: all steps are made of four lanes, and what is saved is the state after three."""

# ZeRO-3 with what it is given by default: parameters as small as these stay whole between steps.
DEFAULT_PERSISTENCE = {"deepspeed_extra": {}}
# DeepSpeed then builds another optimizer for stage 1, with the norm in another place.
FLOAT32_ACCUMULATION = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "fp32"}}}

PARITY: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "zero0": {"sharding_stage": "zero0", "steps": SHORT_STEPS},
        "zero2-offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu", "steps": SHORT_STEPS},
        "zero2-regularized": {"sharding_stage": "zero2", "steps": SHORT_STEPS, **REGULARIZED},
        "zero3-offload": {"offload_optimizer": "cpu", "steps": SHORT_STEPS},
    },
    2: {
        "zero0": {"sharding_stage": "zero0", "steps": SHORT_STEPS},
        "zero1-wsd": {
            "sharding_stage": "zero1",
            "lr_scheduler_type": "wsd",
            "wsd_decay_fraction": 0.75,
            "steps": SHORT_STEPS + 1,
        },
        "zero1-lora": {"sharding_stage": "zero1", "steps": SHORT_STEPS, **LORA},
        "zero2-offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu", "steps": SHORT_STEPS},
        "zero2-regularized": {"sharding_stage": "zero2", "steps": SHORT_STEPS, **REGULARIZED},
        "zero3": {"steps": SHORT_STEPS},
        "zero3-offload-all": {"offload_optimizer": "cpu", "offload_params": "cpu", "steps": SHORT_STEPS},
        "zero3-persistent": {"steps": SHORT_STEPS, **DEFAULT_PERSISTENCE},
        "zero3-recompute-regularized": {"steps": SHORT_STEPS, "activation_checkpointing": "full", **REGULARIZED},
        "zero3-activation-offload": {
            "steps": SHORT_STEPS,
            "activation_checkpointing": "full",
            "activation_offload": True,
        },
        "zero3-lora-offload-all": {
            "offload_optimizer": "cpu",
            "offload_params": "cpu",
            "activation_checkpointing": "full",
            "steps": SHORT_STEPS,
            **LORA,
        },
        "zero3-freeze": {"steps": SHORT_STEPS, **FREEZE},
        "zero0-own-optimizer": {"sharding_stage": "zero0", "steps": SHORT_STEPS, **OWN_OPTIMIZER},
        "zero2-own-optimizer-offload": {
            "sharding_stage": "zero2",
            "offload_optimizer": "cpu",
            "steps": SHORT_STEPS,
            **OWN_OPTIMIZER,
        },
        "zero3-own-optimizer": {"steps": SHORT_STEPS, **OWN_OPTIMIZER},
    },
}
"""Float32 runs that must be the oracle's, by number of ranks and name.

ZeRO-3's steps take ten times those of the others; fifty of them are compared in test_parity_table.py.
"""

# Several of the optimizer's tensors to a parameter group, each with its own Adam step.
SUB_GROUPS = {
    "deepspeed_extra": {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 1000}}
}

RESUMES: dict[str, dict[str, Any]] = {
    "zero0-bf16": {"sharding_stage": "zero0", "bf16": True},
    "zero1-bf16": {"sharding_stage": "zero1", "bf16": True, "lr_scheduler_type": "WarmupCosineLR"},
    "zero1-bf16-float32-accumulation": {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
    "zero2": {"sharding_stage": "zero2"},
    "zero2-offload-bf16": {"sharding_stage": "zero2", "offload_optimizer": "cpu", "bf16": True},
    "zero3-offload-bf16": {"offload_optimizer": "cpu", "bf16": True},
    "zero3-sub-groups": SUB_GROUPS,
    "zero3-persistent": {"bf16": True, "lr_scheduler_type": "WarmupDecayLR", **DEFAULT_PERSISTENCE},
    "zero3-lora-offload-all-bf16": {"offload_optimizer": "cpu", "offload_params": "cpu", "bf16": True, **LORA},
    "zero3-freeze-bf16": {"bf16": True, **FREEZE},
    "zero0-own-optimizer-bf16": {"sharding_stage": "zero0", "bf16": True, **OWN_OPTIMIZER},
    "zero1-own-optimizer-bf16-float32-accumulation": {
        "sharding_stage": "zero1",
        "bf16": True,
        **FLOAT32_ACCUMULATION,
        **OWN_OPTIMIZER,
    },
    "zero3-own-optimizer-offload-bf16": {"offload_optimizer": "cpu", "bf16": True, **OWN_OPTIMIZER},
}
"""Runs that are saved and resumed, by name. They change no setting."""

SKIPS = (
    "zero0-bf16",
    "zero1-bf16",
    "zero1-bf16-float32-accumulation",
    "zero2-offload-bf16",
    "zero3-offload-bf16",
)
"""Those of them that are also made with skipped steps."""

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
    "zero2-to-native": {"sharding_stage": "zero2", "then": {**OTHER_SETTINGS, "lr_scheduler_type": "WarmupDecayLR"}},
    "zero3-offload-from-native": {
        "offload_optimizer": "cpu",
        "lr_scheduler_type": "WarmupDecayLR",
        "then": {**OTHER_SETTINGS, "lr_scheduler_type": "cosine"},
    },
}
"""Float32 runs that are resumed with other settings, by name."""

UNTRAINED: dict[str, dict[str, Any]] = {
    **{f"{stage}-bf16": {"sharding_stage": stage, "bf16": True} for stage in ("zero0", "zero1", "zero3")},
    "zero1-bf16-float32-accumulation": {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
    "zero2-bf16-offload": {"sharding_stage": "zero2", "bf16": True, "offload_optimizer": "cpu"},
    "zero3-bf16-offload": {"bf16": True, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3-bf16-persistent": {"bf16": True, **DEFAULT_PERSISTENCE},
}
"""Runs with float32 weights beside those they compute with, by name."""

LOSSLESS = ("zero1-bf16", "zero3-bf16")
"""Those of them that also start from a bf16 source."""

LEAVING: dict[str, dict[str, Any]] = {
    "zero0": {"sharding_stage": "zero0"},
    "zero1": {"sharding_stage": "zero1"},
    "zero2": {"sharding_stage": "zero2"},
    "zero3-offload": {"offload_optimizer": "cpu"},
    "zero1-bf16": {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
    "zero3-bf16": {"bf16": True},
}
"""Runs on two ranks whose checkpoints others go on from, by name."""

ARRIVING: list[tuple[int, dict[str, tuple[str, dict[str, Any]]]]] = [
    (
        1,
        {
            "zero3-offload to zero1": ("zero3-offload", {"sharding_stage": "zero1"}),
            "zero1 to zero3": ("zero1", SUB_GROUPS),
            "zero2 to zero0": ("zero2", {"sharding_stage": "zero0"}),
        },
    ),
    (
        4,
        {
            "zero1-bf16 to zero2-bf16": ("zero1-bf16", {"sharding_stage": "zero2", "bf16": True}),
            "zero0 to zero3": ("zero0", SUB_GROUPS),
            "zero3-bf16 to hybrid": (
                "zero3-bf16",
                {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2, "bf16": True},
            ),
        },
    ),
    (
        2,
        {
            "back to zero2": ("zero0 to zero3", {"sharding_stage": "zero2"}),
            "back to zero3-offload": ("zero2 to zero0", {"offload_optimizer": "cpu"}),
            "back to zero1-bf16": (
                "zero3-bf16 to hybrid",
                {"sharding_stage": "zero1", "bf16": True, **FLOAT32_ACCUMULATION},
            ),
            "back to zero3-bf16": ("zero1-bf16 to zero2-bf16", {"bf16": True, **DEFAULT_PERSISTENCE}),
        },
    ),
]
"""Number of ranks, and which checkpoint each run goes on from and how, in the order in which they can be made."""

STAGING: dict[str, dict[str, Any]] = {
    **{stage: {"sharding_stage": stage} for stage in ("zero0", "zero1")},
    "zero3-offload-bf16": {"offload_optimizer": "cpu", "bf16": True},
    # DeepSpeed makes hpZ's groups once per process: no other case here may use it.
    "zero3-hybrid-bf16": {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2, "bf16": True},
}
"""Runs that are written from copies and go back to the first of them, by name."""

UNREADABLE = {f"{stage}-{problem}": (stage, problem) for stage in ("zero1", "zero3") for problem in ("shape", "error")}
"""Sources that rank 0 cannot read, by name."""


SUMMED: dict[str, dict[str, Any]] = {
    "zero2-bf16": {"sharding_stage": "zero2", "bf16": True},
    "zero3-bf16": {"bf16": True},
}
"""Runs whose gradients are summed over one and two ranks, by name."""

COMMUNICATION = ("zero0", "zero1", "zero2", "zero3")
"""Stages of runs in bf16 whose bytes are counted."""


def cases(world_size: int, folder: Path) -> list[Case]:
    """All cases of a start with `world_size` ranks; checkpoints go under `folder`."""
    plan: list[Case] = [(f"parity {name}", "trajectory", given) for name, given in PARITY[world_size].items()]
    plan += [(f"summed {name}", "summed_gradient", given) for name, given in SUMMED.items()]
    if world_size == 1:
        return plan
    plan += [
        (f"communication {stage}", "communication", {"sharding_stage": stage, "bf16": True}) for stage in COMMUNICATION
    ]
    plan += [(f"compiled {compiled}", "compiling", {"torch_compile": compiled}) for compiled in (False, True)]
    plan += [(f"skip {name}", "skipping", RESUMES[name]) for name in SKIPS]
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
    plan += [
        (f"refused {stage}", "refused_loads", {"directory": str(folder / f"refused-{stage}"), "sharding_stage": stage})
        for stage in ("zero2", "zero3")
    ]
    plan += [
        (f"staging {name}", "staging", {"directory": str(folder / f"staging-{name}"), **given})
        for name, given in STAGING.items()
    ]
    plan.append(("unwritable", "unwritable", {"directory": str(folder / "unwritable"), "sharding_stage": "zero2"}))
    return plan


def portable_cases(folder: Path) -> list[tuple[int, list[Case]]]:
    """The starts of ranks in which checkpoints are left, taken over on other numbers of ranks, and left again."""
    leaving = [(name, "leaving", {"directory": str(folder / name), **given}) for name, given in LEAVING.items()]
    arriving = [
        (
            world_size,
            [
                (name, "arriving", {"source": str(folder / source), "directory": str(folder / name), **given})
                for name, (source, given) in cases.items()
            ],
        )
        for world_size, cases in ARRIVING
    ]
    return [(2, leaving), *arriving]
