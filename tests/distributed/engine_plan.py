"""The table of cases: what every engine runs on how many ranks, in one start of processes each, which takes seconds."""

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

from gloo_ranks import RankFailure, run_ranks
from small_run import FREEZE, LORA, NF4, OWN_OPTIMIZER, REGULARIZED, SHORT_STEPS

from ds_encdec.registry.engines import EngineName

Settings = dict[str, Any]  # overrides of `small_run.run_config`
Table = dict[EngineName, dict[str, Settings]]  # runs of each engine by name
Start = tuple[EngineName, int]  # an engine and its number of ranks


def zero(stage: int, **more: Any) -> Settings:
    """A run under DeepSpeed."""
    return {"sharding_stage": f"zero{stage}", **more}


def fsdp(stage: int, **more: Any) -> Settings:
    """A run under FSDP2, or DDP at stage 0."""
    kind = "fsdp" if stage else "ddp"
    return {"distributed_type": kind, "deepspeed_extra": {}, "sharding_stage": f"zero{stage}", **more}


def zero_extra(**more: Any) -> Settings:
    """Keys of DeepSpeed's `zero_optimization`."""
    return {"deepspeed_extra": {"zero_optimization": more}}


BF16: Settings = {"bf16": True}
OFFLOAD: Settings = {"offload_optimizer": "cpu"}
OFFLOAD_ALL: Settings = {"offload_optimizer": "cpu", "offload_params": "cpu"}
RECOMPUTE: Settings = {"activation_checkpointing": "full"}
ACTIVATION_OFFLOAD: Settings = {**RECOMPUTE, "activation_offload": True}
WSD: Settings = {"lr_scheduler_type": "wsd", "wsd_decay_fraction": 0.75, "steps": SHORT_STEPS + 1}
DECAY: Settings = {"lr_scheduler_type": "WarmupDecayLR"}
MUON: Settings = {"optimizer": "muon"}
HYBRID_OF_ONE: Settings = {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 1}
HYBRID_OF_TWO: Settings = {"sharding_stage": "zero3_hybrid", "hybrid_shard_size": 2}
REDUCE_ALWAYS: Settings = {**HYBRID_OF_TWO, "sharding_stage": "zero2_hybrid", "fsdp_reduce_every_micro_batch": True}
# ZeRO-3 with what it is given by default: parameters as small as these stay whole between steps.
PERSISTENT: Settings = {"deepspeed_extra": {}}
# DeepSpeed then builds another optimizer for stage 1, with the norm in another place.
FLOAT32_ACCUMULATION: Settings = {"deepspeed_extra": {"data_types": {"grad_accum_dtype": "fp32"}}}
# Several of the optimizer's tensors to a parameter group, each with its own Adam step.
SUB_GROUPS = zero_extra(stage3_param_persistence_threshold=0, sub_group_size=1000)
# Smaller than the larger half of the parameters, as 50 million elements are for models of 8 billion.
OVERLAPPED = zero_extra(overlap_comm=True, reduce_bucket_size=1000)
GATHERED = zero_extra(overlap_comm=True, reduce_bucket_size=1000, stage3_param_persistence_threshold=0)

# Float32 runs that must be the oracle's. Fifty steps are compared in test_parity_table.py.
PARITY: dict[Start, dict[str, Settings]] = {
    ("deepspeed", 1): {
        "zero0": zero(0),
        "zero2-offload": zero(2, **OFFLOAD),
        "zero3-offload": zero(3, **OFFLOAD),
    },
    ("deepspeed", 2): {
        "zero0": zero(0),
        "zero1-wsd": zero(1, **WSD),
        "zero1-lora": zero(1, **LORA),
        "zero2-offload": zero(2, **OFFLOAD),
        "zero3": zero(3),
        "zero3-offload-all": zero(3, **OFFLOAD_ALL),
        "zero3-persistent": zero(3, **PERSISTENT),
        "zero3-recompute-regularized": zero(3, **RECOMPUTE, **REGULARIZED),
        "zero3-activation-offload": zero(3, **ACTIVATION_OFFLOAD),
        "zero3-lora-offload-all": zero(3, **OFFLOAD_ALL, **RECOMPUTE, **LORA),
        "zero3-freeze": zero(3, **FREEZE),
        "zero3-renormed-recompute": zero(3, **RECOMPUTE, cross_attention="renormed"),
        "zero3-final": zero(3, cross_attention="final"),
        "zero3-biased": zero(3, layers="biased"),
        "zero1-biased-lora": zero(1, layers="biased", **LORA),
        "zero2-own-optimizer-offload": zero(2, **OFFLOAD, **OWN_OPTIMIZER),
        "zero3-own-optimizer": zero(3, **OWN_OPTIMIZER),
    },
    ("fsdp", 1): {"zero0": fsdp(0), "zero3-regularized": fsdp(3, **REGULARIZED), "zero2-muon": fsdp(2, **MUON)},
    ("fsdp", 2): {
        "zero0": fsdp(0),
        "zero3": fsdp(3),
        "zero1-wsd": fsdp(1, **WSD),
        "zero2-offload": fsdp(2, **OFFLOAD),
        "zero3-offload": fsdp(3, **OFFLOAD_ALL),
        "zero3-full-regularized": fsdp(3, **RECOMPUTE, **REGULARIZED),
        "zero3-selective": fsdp(3, activation_checkpointing="selective"),
        "zero3-activation-offload": fsdp(3, **ACTIVATION_OFFLOAD),
        "zero3-compile-full": fsdp(3, **RECOMPUTE, torch_compile=True, residual_dropout=0.1),
        "zero0-lora-nf4": fsdp(0, **RECOMPUTE, **NF4),
        "zero3-lora-offload": fsdp(3, **OFFLOAD, **RECOMPUTE, **LORA),
        "zero0-muon": fsdp(0, **MUON),
        "zero3-renormed": fsdp(3, cross_attention="renormed"),
        "zero2-final-full": fsdp(2, **RECOMPUTE, cross_attention="final"),
        "zero3-biased-full": fsdp(3, **RECOMPUTE, layers="biased"),
        "zero0-biased-lora-nf4": fsdp(0, layers="biased", **NF4),
        "zero3-own-optimizer-offload": fsdp(3, **OFFLOAD, **OWN_OPTIMIZER),
        "zero3-muon-offload-freeze": fsdp(3, **OFFLOAD, **MUON, **FREEZE),
    },
    ("fsdp", 4): {
        "zero3": fsdp(3),
        "zero2_hybrid-reduce-always": {**fsdp(2), **REDUCE_ALWAYS},
        "zero3_hybrid-muon": {**fsdp(3), **HYBRID_OF_TWO, **MUON},
    },
}

# Runs of two ranks that are saved and loaded. They change no setting. The files of those in bf16, and of those with
# another optimizer, are written by a thread while training goes on.
SAVES: Table = {
    "deepspeed": {
        "zero0-bf16": zero(0, **BF16),
        "zero1-bf16": zero(1, **BF16, lr_scheduler_type="WarmupCosineLR"),
        "zero1-bf16-float32-accumulation": zero(1, **BF16, **FLOAT32_ACCUMULATION),
        "zero2": zero(2),
        "zero2-offload-bf16": zero(2, **OFFLOAD, **BF16),
        "zero3-offload-bf16": zero(3, **OFFLOAD, **BF16),
        "zero3-sub-groups": zero(3, **SUB_GROUPS),
        "zero3-persistent": zero(3, **BF16, **DECAY, **PERSISTENT),
        "zero3-lora-offload-all-bf16": zero(3, **OFFLOAD_ALL, **BF16, **LORA),
        "zero3-freeze-bf16": zero(3, **BF16, **FREEZE),
        "zero0-own-optimizer-bf16": zero(0, **BF16, **OWN_OPTIMIZER),
        "zero3-own-optimizer-offload-bf16": zero(3, **OFFLOAD, **BF16, **OWN_OPTIMIZER),
    },
    "fsdp": {
        "zero3": fsdp(3, **DECAY),
        "zero3-offload-bf16": fsdp(3, **OFFLOAD, **BF16),
        "zero3_hybrid": {**fsdp(3), **HYBRID_OF_ONE, "fsdp_reduce_every_micro_batch": True},
        "zero0-lora-nf4-bf16": fsdp(0, **BF16, **NF4),
        "zero0-freeze-bf16": fsdp(0, **BF16, **FREEZE),
        "zero2-muon-bf16": fsdp(2, **BF16, **MUON),
        "zero3-own-optimizer": fsdp(3, **OWN_OPTIMIZER),
    },
}
# Those of them that are also made with skipped steps.
SKIPS: dict[EngineName, str] = {
    "deepspeed": "zero0-bf16 zero1-bf16 zero1-bf16-float32-accumulation zero2-offload-bf16 zero3-offload-bf16",
    "fsdp": "zero0-freeze-bf16 zero2-muon-bf16 zero3 zero3-offload-bf16",
}
# Runs that go on from those on another number of ranks: the engine and the case, and how. DeepSpeed makes hpZ's groups
# once per process: one case of a start may use it.
ARRIVALS: dict[Start, dict[str, tuple[EngineName, str, Settings]]] = {
    ("deepspeed", 1): {
        "zero0": ("deepspeed", "zero2", zero(0)),
        "zero1": ("fsdp", "zero3_hybrid", zero(1)),
        "zero3-sub-groups": ("deepspeed", "zero2", zero(3, **SUB_GROUPS)),
    },
    ("deepspeed", 4): {
        "zero2-offload": ("deepspeed", "zero3-sub-groups", zero(2, **OFFLOAD)),
        "zero2-bf16": ("deepspeed", "zero1-bf16-float32-accumulation", zero(2, **BF16)),
        "zero3-decay": ("fsdp", "zero3", zero(3, **DECAY, **SUB_GROUPS)),
        "zero3-persistent-bf16": ("deepspeed", "zero0-bf16", zero(3, **BF16, **PERSISTENT)),
        "zero3_hybrid-bf16": ("deepspeed", "zero3-offload-bf16", {**BF16, **HYBRID_OF_TWO}),
    },
    ("fsdp", 1): {"zero2": ("deepspeed", "zero3-sub-groups", fsdp(2))},
    ("fsdp", 4): {
        "zero0-decay": ("fsdp", "zero3", fsdp(0, **DECAY)),
        "zero3-offload": ("deepspeed", "zero2", fsdp(3, **OFFLOAD)),
        "zero3_hybrid-muon-bf16": ("fsdp", "zero2-muon-bf16", {**fsdp(3), **HYBRID_OF_TWO, **MUON, **BF16}),
    },
}

OTHER_SETTINGS: Settings = {
    "learning_rate": 3e-3,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.2,
    "num_train_steps": 5,
}
# Float32 runs that are resumed with the other settings of `then`.
CHANGED: Table = {
    "deepspeed": {
        "zero2-to-native": zero(2, then={**OTHER_SETTINGS, **DECAY}),
        "zero3-offload-from-native": zero(
            3, **OFFLOAD, **DECAY, then={**OTHER_SETTINGS, "lr_scheduler_type": "cosine"}
        ),
    },
    "fsdp": {"zero3-to-decay": fsdp(3, then={**OTHER_SETTINGS, **DECAY})},
}
# Runs without targets, and those whose source one rank cannot read: rank 0, which alone does so under DeepSpeed, and
# else the last.
PLAIN: Table = {"deepspeed": {"zero0": zero(0), "zero3": zero(3)}, "fsdp": {"zero3": fsdp(3)}}
# Runs that are handed states of other models, and damaged ones.
REFUSED: Table = {"deepspeed": {"zero3": zero(3)}, "fsdp": {"zero3": fsdp(3)}}
# Runs of DeepSpeed with float32 weights beside those they compute with.
UNTRAINED: dict[str, Settings] = {
    "zero0-bf16": zero(0, **BF16),
    "zero1-bf16": zero(1, **BF16),
    "zero3-bf16-offload": zero(3, **BF16, **OFFLOAD_ALL),
    "zero3-bf16-persistent": zero(3, **BF16, **PERSISTENT),
}
# Runs of DeepSpeed whose gradients are summed over one and two ranks.
SUMMED: dict[str, Settings] = {"zero2-bf16": zero(2, **BF16), "zero3-bf16": zero(3, **BF16)}
# Runs of FSDP2 in bf16 that are compared with plain torch.
TORCHS_BF16: dict[str, Settings] = {
    "zero2-offload": fsdp(2, **OFFLOAD, **BF16),
    "zero3-selective": fsdp(3, **BF16, activation_checkpointing="selective"),
}
# Runs of FSDP2 on four ranks whose collectives are counted, and whose shards are measured.
COMMUNICATION: dict[str, Settings] = {
    "zero0": fsdp(0),
    "zero2": fsdp(2),
    "zero3": fsdp(3),
    "zero3_hybrid": {**fsdp(3), **HYBRID_OF_TWO},
    "zero2_hybrid-reduce-always": {**fsdp(2), **REDUCE_ALWAYS},
}
# Runs whose waits for the device are counted.
WAITING: Table = {
    "deepspeed": {
        "zero0-bf16": zero(0, **BF16),
        "zero1-bf16": zero(1, **BF16),
        "zero1-bf16-float32-accumulation": zero(1, **BF16, **FLOAT32_ACCUMULATION),
        "zero2-offload-bf16": zero(2, **OFFLOAD, **BF16),
        "zero3-offload-all-bf16": zero(3, **OFFLOAD_ALL, **BF16),
    },
    "fsdp": {"zero2-bf16": fsdp(2, **BF16), "zero3-offload": fsdp(3, **OFFLOAD)},
}
# Runs of DeepSpeed on a device that has streams.
STREAMS: dict[int, dict[str, Settings]] = {
    1: {
        "zero2-offload-bf16": zero(2, **OFFLOAD, **BF16, **OVERLAPPED),
        "zero3-offload-bf16": zero(3, **OFFLOAD, **BF16, **GATHERED),
    },
    2: {
        "zero1-bf16": zero(1, **BF16, **OVERLAPPED),
        "zero2-bf16": zero(2, **BF16, **OVERLAPPED),
        "zero2-offload-bf16": zero(2, **OFFLOAD, **BF16, **OVERLAPPED),
        "zero2": zero(2, **OVERLAPPED),
        "zero3-offload-all-bf16": zero(3, **OFFLOAD_ALL, **BF16, **GATHERED),
    },
}


@functools.cache
def checkpoints() -> Path:
    """Where the cases leave their checkpoints, until the end of the session."""
    folder = tempfile.TemporaryDirectory(prefix="engines-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def folder_of(engine: EngineName, case: str) -> Path:
    """The checkpoint of a case of SAVES, or what other cases have left."""
    return checkpoints() / engine / case


def result(engine: EngineName, world_size: int, case: str) -> list[Any]:
    """The case's result on every rank."""
    ranks = _run(engine, world_size)
    if isinstance(ranks, RankFailure):
        raise ranks
    found = [rank[case] for rank in ranks]
    for traceback in found:
        assert not (isinstance(traceback, str) and traceback.startswith("Traceback")), traceback
    return found


@functools.cache
def _run(engine: EngineName, world_size: int) -> list[dict[str, Any]] | RankFailure:
    try:
        return run_ranks(f"{engine}_cases.py:run_cases", world_size, {"cases": cases(engine, world_size)}, engine)
    except RankFailure as failure:
        return failure  # cached like a result: every test would wait for it again


def cases(engine: EngineName, world_size: int) -> list[tuple[str, str, Settings]]:
    """All cases of one start of ranks: name, function, arguments."""
    plan = []
    for name, given in PARITY.get((engine, world_size), {}).items():
        function = "compiled_trajectory" if "torch_compile" in given else "trajectory"
        plan.append((f"parity {name}", function, {"steps": SHORT_STEPS, **given}))
    if world_size == 2:
        plan += _on_two_ranks(engine)
    if engine == "deepspeed" and world_size <= 2:
        plan += [(f"summed {name}", "summed_gradient", given) for name, given in SUMMED.items()]
        plan += [(f"streams {name}", "waits_of_streams", given) for name, given in STREAMS[world_size].items()]
    if (engine, world_size) == ("fsdp", 4):
        plan += [(f"communication {name}", "communication", given) for name, given in COMMUNICATION.items()]
    for name, (source, case, given) in ARRIVALS.get((engine, world_size), {}).items():
        result(source, 2, f"save {case}")  # must be there
        places = {"source": str(folder_of(source, case)), "directory": str(folder_of(engine, f"{world_size} {name}"))}
        plan.append((f"arrival {name}", "arriving", {**places, **given}))
    return plan


def _on_two_ranks(engine: EngineName) -> list[tuple[str, str, Settings]]:

    def in_folder(kind: str, function: str, table: dict[str, Settings]) -> list[tuple[str, str, Settings]]:
        named = ((f"{kind} {name}", given) for name, given in table.items())
        return [(name, function, {"directory": str(folder_of(engine, name)), **given}) for name, given in named]

    plan = [(f"skip {name}", "skipping", SAVES[engine][name]) for name in SKIPS[engine].split()]
    for name, given in SAVES[engine].items():
        copy = "bf16" in given or "optimizer" in given
        plan.append((f"save {name}", "saving", {"directory": str(folder_of(engine, name)), "copy": copy, **given}))
    plan += in_folder("changed", "resuming_changed", CHANGED[engine])
    plan += in_folder("refused", "refused_loads", REFUSED[engine])
    failing = 0 if engine == "deepspeed" else 1
    for name, given in PLAIN[engine].items():
        plan.append((f"unreadable {name}", "unreadable_weights", {"failing": failing, **given}))
        plan.append((f"decay {name}", "only_decay", given))
    plan += [(f"waits {name}", "waits", given) for name, given in WAITING[engine].items()]
    if engine == "deepspeed":
        plan += [(f"compiled {compiled}", "compiling", zero(3, torch_compile=compiled)) for compiled in (False, True)]
        plan += [(f"untrained {name}", "untrained", given) for name, given in UNTRAINED.items()]
        plan.append(("shards", "shard_sizes", {}))
    else:
        for name, given in TORCHS_BF16.items():
            plan.append((f"bf16 {name}", "trajectory", {"steps": SHORT_STEPS, **given}))
        plan.append(("lacking memory", "lacking_memory", fsdp(3)))
    return plan
