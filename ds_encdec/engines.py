"""The engines there are, a row each: what the rest of the package asks about an engine by its row, never by its name.

It stands on the floor, beside the types, so it imports nothing of the other rooms: what an engine has there is a dotted
name ("package.module:attribute"), which the room that uses it resolves with `load`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EngineName = Literal["deepspeed", "fsdp"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine.

    `title`: what texts call it. `distributed_types`: the values of `infra.distributed_type` that ask for it; `auto`
    takes the first row that can do what is asked. `package`: what must be installed beside torch, or None.
    `state_format`: `format` in its checkpoints' engine.json. Dotted names: `lacks` (FullConfig → conflicts), `build`
    (engine/select.py), `state_reader` (checkpoint folder → SavedState), `memory` (Job → Breakdown), `launcher` (number
    of ranks → the words that start them on this machine).

    What the memory estimate asks: `trace` (Job → StorageLog of a step of the engine itself, or None where only its
    activations can be traced), `reduction_field` (the field that makes it reduce after every micro-batch, where that
    can be chosen), `merges_settings` (its zero1 is zero2, and parameters are offloaded with the optimizer),
    `saves_compute_weights` (checkpoints of unsharded weights hold them in the compute dtype, too), `instead` (by field
    the value that it refuses, and the one to take).
    """

    name: EngineName
    title: str
    distributed_types: tuple[str, ...]
    package: str | None
    state_format: str
    lacks: str
    build: str
    state_reader: str
    memory: str
    launcher: str
    trace: str | None = None
    reduction_field: str | None = None
    merges_settings: bool = False
    saves_compute_weights: bool = False
    instead: Mapping[str, tuple[bool | str, bool | str]] = field(default_factory=dict)


ENGINES: dict[str, EngineSpec] = {
    row.name: row
    for row in (
        EngineSpec(
            name="deepspeed",
            title="DeepSpeed",
            distributed_types=("deepspeed",),
            package="deepspeed",
            state_format="deepspeed",
            lacks="ds_encdec.config.rules:deepspeed_lacks",
            build="ds_encdec.engine.select:build_deepspeed",
            state_reader="ds_encdec.checkpoint.zero_state:ZeroState",
            memory="ds_encdec.memory.zero:zero_memory",
            launcher="ds_encdec.pipeline.subprocess_run:deepspeed_launcher",
            saves_compute_weights=True,
            instead={
                "infra.fsdp_reduce_every_micro_batch": (True, False),
                "training.torch_compile": (True, False),
                "training.activation_checkpointing": ("selective", "full"),
            },
        ),
        EngineSpec(
            name="fsdp",
            title="FSDP2",
            distributed_types=("fsdp", "ddp"),
            package=None,
            state_format="dcp",
            lacks="ds_encdec.config.rules:fsdp_lacks",
            build="ds_encdec.engine.select:build_fsdp2",
            state_reader="ds_encdec.checkpoint.dcp_state:DcpState",
            memory="ds_encdec.memory.fsdp:fsdp_memory",
            launcher="ds_encdec.pipeline.subprocess_run:torchrun_launcher",
            trace="ds_encdec.memory.trace:fsdp_step",
            reduction_field="infra.fsdp_reduce_every_micro_batch",
            merges_settings=True,
        ),
    )
}
"""By name, in the order of preference of `infra.distributed_type=auto`."""


def load(dotted: str) -> Any:
    """What a row's dotted name names; imports its module."""
    module, _, attribute = dotted.partition(":")
    return getattr(importlib.import_module(module), attribute)
