"""Parts that train: every engine for fifty steps against a run on the CPU, on through each other's checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from kit import TINY, Kit, run_config
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from ds_encdec.config.schema import FullConfig
from ds_encdec.training.build import run_training

INFRA: dict[str, dict[str, Any]] = {
    "reference": {"distributed_type": "fsdp", "sharding_stage": "zero2", "offload_optimizer": "none", "device": "cpu"},
    "zero1": {"distributed_type": "deepspeed", "sharding_stage": "zero1", "offload_optimizer": "none"},
    "zero2": {"distributed_type": "deepspeed", "sharding_stage": "zero2", "offload_optimizer": "none"},
    "zero3": {"distributed_type": "deepspeed", "sharding_stage": "zero3", "offload_optimizer": "none"},
    "zero3 offload": {"distributed_type": "deepspeed", "sharding_stage": "zero3", "offload_optimizer": "cpu"},
    "fsdp zero2": {"distributed_type": "fsdp", "sharding_stage": "zero2", "offload_optimizer": "none"},
    "fsdp zero3": {"distributed_type": "fsdp", "sharding_stage": "zero3", "offload_optimizer": "none"},
}
INFRA["zero1 again"] = INFRA["zero1"]
DTYPES = {"fp32": {"bf16": False}, "bf16": {"bf16": True}, "fp16": {"bf16": False, "fp16": True}}
BOUNDS = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
"""Largest difference of a step's loss from the CPU's in float32, in nats. Fifty steps carry roundings a long way."""


def reference(kit: Kit) -> None:
    """Train on the CPU in float32, and save a checkpoint in the middle; the others are held against its losses."""
    losses = _train(kit, "reference", "fp32", saves=True)
    (kit.shared / "reference.json").write_text(json.dumps(losses))
    kit.row(
        "CPU, fp32",
        ok=losses[max(losses)] < losses[1] - 0.05,
        steps=len(losses),
        first=losses[1],
        last=losses[max(losses)],
    )


def engine(kit: Kit, name: str, resumes: str) -> None:
    """Train from the start in each dtype, and on from the checkpoint that the part `resumes` saved in the middle."""
    expected = _expected(kit)
    for dtype in DTYPES:
        if dtype == "fp16" and (kit.dry_run or INFRA[name]["distributed_type"] == "fsdp"):
            kit.omit(f"{name}, fp16", "it is not trained in float16 here: DeepSpeed does that, on accelerators")
        elif dtype == "bf16" and kit.dry_run:
            kit.omit(f"{name}, bf16", "a dry run keeps to float32 and the rows of speed, which are in bf16")
        else:
            _compare(kit, f"{name}, {dtype}", _train(kit, name, dtype, saves=dtype == "fp32"), expected, dtype)
    places = {"own checkpoint": f"engine {name}", f"checkpoint of {resumes}": resumes}
    for place, part in list(places.items())[kit.dry_run :]:
        folder = kit.shared / part.removeprefix("engine ").replace(" ", "_") / "checkpoints"
        middle = min(path for path in folder.iterdir() if path.name.startswith("step-"))
        found = _train(kit, name, "fp32", resume=middle)
        _compare(kit, f"{name}, fp32, from {place}", found, expected, "fp32", resumed_at=min(found) - 1)


def compiled(kit: Kit) -> None:
    """Train with layers that are compiled, and count the graphs; each engine that compiles."""
    expected = _expected(kit)
    if kit.dry_run:
        kit.omit("inductor", "a dry run only traces the layers: tests/model compiles them on a CPU")
        torch._TorchCompileInductorWrapper.__call__ = lambda _, graph, inputs: aot_eager(graph, inputs)
    for name in ("fsdp zero2",) if kit.dry_run else ("fsdp zero2", "zero1", "zero3"):
        counters.clear()
        losses = _train(kit, name, "fp32", torch_compile=True)
        graphs, why = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        facts: dict[str, Any] = {"graphs_with_the_trials": graphs, "breaks": sum(why.values()), "why": why}
        _compare(kit, f"{name}, fp32, compiled", losses, expected, "fp32", **facts)
        if not kit.dry_run:
            eager = _train(kit, name, "bf16")
            losses = _train(kit, name, "bf16", torch_compile=True)
            _compare(kit, f"{name}, bf16, compiled against eager", losses, eager, "bf16")


def _expected(kit: Kit) -> dict[int, float]:
    return {int(step): loss for step, loss in json.loads((kit.shared / "reference.json").read_text()).items()}


def _compare(
    kit: Kit, name: str, found: Mapping[int, float], expected: Mapping[int, float], dtype: str, **facts: Any
) -> None:
    """Keep a row: whether all losses are where they should be, and the farthest one."""
    both = found.keys() & expected.keys()  # float16 may have skipped steps, and gone on beyond the last one
    worst, bound = max((abs(found[step] - expected[step]) for step in both), default=math.nan), BOUNDS[dtype]
    ok = max(expected) in both and worst <= bound
    kit.row(name, ok=ok, largest_difference=worst, bound=bound, last=found.get(max(expected)), **facts)


def _train(
    kit: Kit, name: str, dtype: str, *, saves: bool = False, resume: Path | None = None, **training: Any
) -> dict[int, float]:
    """Train by `run_training`; its metrics' losses by data step. `saves`: keeps its middle for other parts."""
    folder = kit.shared / name.replace(" ", "_") if saves else kit.folder / f"run-{len(list(kit.folder.iterdir()))}"
    run_training(training_config(kit, name, dtype, folder, saves=saves, **training), resume=resume and str(resume))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = {line["data_step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return {step: loss for step, loss in losses.items() if isinstance(loss, float)}  # a skipped step has no loss


def training_config(
    kit: Kit, name: str, dtype: str, folder: Path, *, saves: bool = False, **training: Any
) -> FullConfig:
    """The configuration of a run of a tiny model on the built-in text; `saves` in its middle, too."""
    steps = 6 if kit.dry_run else 50
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "num_train_steps": steps,
        "warmup_steps": 4,
        "logging_steps": 1,
        "save_steps": steps // 2 if saves else steps,
        "eval_samples": 8,  # so that a GPU rehearses evaluation and save before its first step
        "eval_steps": steps,
        "activation_checkpointing": "none",
        "average_checkpoints": 0,
        "export_at_end": False,
        "torch_compile": False,
    }
    # No step is to be skipped: losses are compared step by step.
    scaling = {"deepspeed_extra": {"fp16": {"initial_scale_power": 10}}} if dtype == "fp16" else {}
    return run_config(
        kit,
        TINY,
        training=settings | DTYPES[dtype] | training,
        data={
            "dataset_name": "builtin",
            "max_seq_length": 256,
            "max_encoder_length": 128,
            "max_decoder_length": 64,
            "preprocessing_num_workers": 0,
        },
        infra={"device": kit.device.type, **INFRA[name], **scaling, "output_dir": str(folder)},
        model={"num_sentinel_tokens": 32},
    )
