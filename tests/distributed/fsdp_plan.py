"""Which cases of fsdp_cases.py run at which number of ranks, in one start of processes each, without deepspeed."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

from engine_steps import Case
from gloo_ranks import RankFailure, run_ranks
from small_run import FREEZE, LORA, NF4, OWN_OPTIMIZER, REGULARIZED, SHORT_STEPS

HYBRID_OF_ONE = {"hybrid_shard_size": 1}

PARITY: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{stage: {"sharding_stage": stage, "steps": SHORT_STEPS} for stage in ("zero0", "zero2")},
        "zero3-offload": {"offload_optimizer": "cpu", "steps": SHORT_STEPS},
        "zero3-regularized": {"steps": SHORT_STEPS, **REGULARIZED},
        "zero2-muon": {"sharding_stage": "zero2", "optimizer": "muon", "steps": SHORT_STEPS},
    },
    2: {
        **{stage: {"sharding_stage": stage, "steps": SHORT_STEPS} for stage in ("zero0", "zero3")},
        "zero1-wsd": {
            "sharding_stage": "zero1",
            "lr_scheduler_type": "wsd",
            "wsd_decay_fraction": 0.75,
            "steps": SHORT_STEPS + 1,
        },
        "zero2-offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu", "steps": SHORT_STEPS},
        "zero3-offload": {"offload_optimizer": "cpu", "offload_params": "cpu", "steps": SHORT_STEPS},
        "zero3_hybrid-of-one": {"sharding_stage": "zero3_hybrid", "steps": SHORT_STEPS, **HYBRID_OF_ONE},
        "zero3-full-regularized": {"activation_checkpointing": "full", "steps": SHORT_STEPS, **REGULARIZED},
        "zero3-selective": {"activation_checkpointing": "selective", "steps": SHORT_STEPS},
        "zero3-activation-offload": {
            "activation_checkpointing": "full",
            "activation_offload": True,
            "steps": SHORT_STEPS,
        },
        "zero3-compile-full": {
            "torch_compile": True,
            "activation_checkpointing": "full",
            "residual_dropout": 0.1,
            "steps": SHORT_STEPS,
        },
        "zero0-lora-nf4": {"activation_checkpointing": "full", "steps": SHORT_STEPS, **NF4},
        "zero3-lora-offload": {
            "offload_optimizer": "cpu",
            "activation_checkpointing": "full",
            "steps": SHORT_STEPS,
            **LORA,
        },
        "zero0-muon": {"sharding_stage": "zero0", "optimizer": "muon", "steps": SHORT_STEPS},
        "zero3-own-optimizer-offload": {"offload_optimizer": "cpu", "steps": SHORT_STEPS, **OWN_OPTIMIZER},
        "zero3-muon-offload-freeze": {
            "offload_optimizer": "cpu",
            "optimizer": "muon",
            "steps": SHORT_STEPS,
            **FREEZE,
        },
    },
    4: {
        "zero3": {"steps": SHORT_STEPS},
        "zero2_hybrid-reduce-always": {
            "sharding_stage": "zero2_hybrid",
            "hybrid_shard_size": 2,
            "fsdp_reduce_every_micro_batch": True,
            "steps": SHORT_STEPS,
        },
        "zero3_hybrid-muon": {
            "sharding_stage": "zero3_hybrid",
            "hybrid_shard_size": 2,
            "optimizer": "muon",
            "steps": SHORT_STEPS,
        },
    },
}
"""Float32 runs that must be the oracle's, by number of ranks and name."""

BF16: dict[str, dict[str, Any]] = {
    "zero2-offload": {"sharding_stage": "zero2", "offload_optimizer": "cpu"},
    "zero3-selective": {"activation_checkpointing": "selective"},
}
"""bf16 runs of two ranks, by name."""

SAVES: dict[str, dict[str, Any]] = {
    "zero3": {"lr_scheduler_type": "WarmupDecayLR", "copy": False},
    "zero3-offload-bf16": {"offload_optimizer": "cpu", "bf16": True, "copy": True},
    "zero3_hybrid": {
        "sharding_stage": "zero3_hybrid",
        "fsdp_reduce_every_micro_batch": True,
        "copy": False,
        **HYBRID_OF_ONE,
    },
    "zero0-lora-nf4-bf16": {"bf16": True, "copy": True, **NF4},
    "zero0-freeze-bf16": {"sharding_stage": "zero0", "bf16": True, "copy": True, **FREEZE},
    "zero2-muon-bf16": {"sharding_stage": "zero2", "optimizer": "muon", "bf16": True, "copy": True},
    "zero3-own-optimizer": {"copy": True, **OWN_OPTIMIZER},
}
"""Runs of two ranks that are saved and loaded, by name."""

SKIPS = ("zero0-freeze-bf16", "zero2-muon-bf16", "zero3", "zero3-offload-bf16")
"""Those of them that are also made with skipped steps."""

RELOADS: dict[str, dict[str, Any]] = {
    "zero0": {"sharding_stage": "zero0"},
    "zero3": {},
    "zero3_hybrid-muon": {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2, "optimizer": "muon"},
}
"""Runs of four ranks that load what two have saved, by name."""


def reloaded(case: str) -> str:
    """The name of the save that a run of four ranks loads."""
    return "zero2-muon-bf16" if "optimizer" in RELOADS[case] else "zero3"


COMMUNICATION: dict[str, dict[str, Any]] = {
    "zero0": {"sharding_stage": "zero0"},
    "zero2": {"sharding_stage": "zero2"},
    "zero3": {},
    "zero3_hybrid": {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2},
    "zero2_hybrid-reduce-always": {
        "sharding_stage": "zero2_hybrid",
        "hybrid_shard_size": 2,
        "fsdp_reduce_every_micro_batch": True,
    },
}
"""Runs of four ranks whose collectives are counted, and whose shards are measured, by name."""


@functools.cache
def checkpoints() -> Path:
    """Where the cases leave their checkpoints, until the end of the session."""
    folder = tempfile.TemporaryDirectory(prefix="fsdp-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


WAITING: dict[str, dict[str, Any]] = {
    "zero2-bf16": {"sharding_stage": "zero2", "bf16": True},
    "zero3-offload": {"sharding_stage": "zero3", "offload_optimizer": "cpu"},
}
"""Runs whose waits for the device are counted, by name."""


def result(world_size: int, case: str) -> list[Any]:
    """The case's result on every rank."""
    ranks = _run(world_size)
    if isinstance(ranks, RankFailure):
        raise ranks
    found = [rank[case] for rank in ranks]
    for traceback in found:
        assert not (isinstance(traceback, str) and traceback.startswith("Traceback")), traceback
    return found


@functools.cache
def _run(world_size: int) -> list[dict[str, Any]] | RankFailure:
    plan = [
        (f"parity {name}", "compiled_trajectory" if "torch_compile" in given else "trajectory", given)
        for name, given in PARITY[world_size].items()
    ]
    plan += _CASES[world_size]()
    try:
        return run_ranks(
            "fsdp_cases.py:run_cases",
            world_size,
            {"cases": plan},
            engine="fsdp",
        )
    except RankFailure as failure:
        return failure  # cached like a result: every test would wait for it again


def _one_rank() -> list[Case]:
    return []


def _two_ranks() -> list[Case]:
    plan: list[Case] = [
        (f"bf16 {name}", "trajectory", {"bf16": True, "steps": SHORT_STEPS, **given}) for name, given in BF16.items()
    ]
    plan += [(f"skip {name}", "skipping", SAVES[name]) for name in SKIPS]
    plan += [(f"save {name}", "saving", {"directory": str(checkpoints() / name), **g}) for name, g in SAVES.items()]
    plan += [(f"unreadable {problem}", "unreadable_weights", {"problem": problem}) for problem in ("shape", "error")]
    plan.append(("decay", "only_decay", {}))
    plan += [(f"waits {name}", "waits", given) for name, given in WAITING.items()]
    plan.append(("untrained", "untrained_state", {}))
    plan.append(("refused", "refused_loads", {}))
    plan.append(("indivisible", "indivisible_ranks", {}))
    plan.append(("host copies", "host_copies", {"directory": str(checkpoints() / "host copies")}))
    plan.append(("full disk", "full_disk", {"directory": str(checkpoints() / "full")}))
    return plan


def _four_ranks() -> list[Case]:
    plan: list[Case] = []
    for name, given in RELOADS.items():
        result(2, f"save {reloaded(name)}")  # must be there
        saved = str(checkpoints() / reloaded(name))
        given = {"directory": saved, "lr_scheduler_type": "WarmupDecayLR", **given}
        plan.append((f"reload {name}", "reloading", given))
    plan += [(f"communication {name}", "communication", given) for name, given in COMMUNICATION.items()]
    return plan


_CASES = {1: _one_rank, 2: _two_ranks, 4: _four_ranks}
