"""The engines there are, a row each: what the rest of the package asks about an engine by its row, never by its name.

It stands on the floor, beside the types, so it imports nothing of the other rooms: what an engine has there is a dotted
name ("package.module:attribute"), which the room that uses it resolves with `load`.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

EngineName = Literal["deepspeed", "fsdp"]
DistributedType = Literal[EngineName, "ddp", "auto"]
"""The values of `infra.distributed_type`: an engine's name, or another word of its row, or the choice of one."""


@dataclass(frozen=True)
class ByEngine(Generic[T]):
    """One thing of each engine, such as the function that builds it, in the module where these things are.

    A new engine adds a field here: type checkers then name every place that lacks it.
    """

    deepspeed: T
    fsdp: T

    def __getitem__(self, engine: EngineName) -> T:
        found: T = getattr(self, engine)
        return found


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine.

    `title`: what texts call it. `distributed_types`: the values of `infra.distributed_type` that ask for it; `auto`
    takes the first row that can do what is asked. `package`: what must be installed beside torch, or None.
    `state_format`: `format` in its checkpoints' engine.json.

    Dotted names, with what they are called with: `check` (configuration, World, device; raises ConfigError for what
    these ranks cannot do, before they meet), `join` (World, device, timeout, store; makes the default process group),
    `build` (configuration, RunContext, the model's configuration, weights, accumulation → Engine), `run_files` (name of
    a JSON file in the run's folder → configuration, World, device, accumulation → its content), `state_reader`
    (checkpoint folder → SavedState), `memory` (Job → Breakdown), `launcher` (number of ranks → the words that start
    them on this machine).

    What the memory estimate asks: `trace` (Job → StorageLog of a step of the engine itself, or None where only its
    activations can be traced), `reduction_field` (the field that makes it reduce after every micro-batch, where that
    can be chosen), `merges_settings` (its zero1 is zero2, and parameters are offloaded with the optimizer),
    `saves_compute_weights` (checkpoints of unsharded weights hold them in the compute dtype, too), `gathers_by_hooks`
    (at stage 3, around layers or inside them), `gathering_ms` (host time that each layer then costs a micro-batch:
    gathered at once, and module by module, as beside frozen parameters),
    `instead` (by field the value that it refuses, and the one to take).
    """

    name: EngineName
    title: str
    distributed_types: tuple[str, ...]
    package: str | None
    state_format: Literal["deepspeed", "dcp"]
    join: str
    build: str
    state_reader: str
    memory: str
    launcher: str
    check: str | None = None
    run_files: Mapping[str, str] = field(default_factory=dict)
    trace: str | None = None
    reduction_field: str | None = None
    merges_settings: bool = False
    saves_compute_weights: bool = False
    gathering_ms: tuple[float, float] = (0.0, 0.0)
    gathers_by_hooks: bool = False
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
            join="ds_encdec.launch.process_group:join_deepspeed",
            build="ds_encdec.engine.deepspeed_zero:DeepSpeedEngine",
            state_reader="ds_encdec.checkpoint.zero_state:ZeroState",
            memory="ds_encdec.memory.zero:zero_memory",
            launcher="ds_encdec.phase_runs.subprocess_run:deepspeed_launcher",
            check="ds_encdec.engine.ds_json:check_deepspeed",
            run_files={"ds_config.json": "ds_encdec.engine.ds_json:run_json"},
            saves_compute_weights=True,
            # scripts/bench/host_time.py, 56 layers: beyond plain torch's 91 ms of CPU of an EPYC (Zen 5) 92 to 116 by
            # layer and 215 to 270 by module; slower cores take up to three times as long (BENCHMARKS.md, host time).
            gathering_ms=(2.0, 4.5),
            gathers_by_hooks=True,
            instead={
                "infra.fsdp_reduce_every_micro_batch": (True, False),
                "training.activation_checkpointing": ("selective", "full"),
            },
        ),
        EngineSpec(
            name="fsdp",
            title="FSDP2",
            distributed_types=("fsdp", "ddp"),
            package=None,
            state_format="dcp",
            join="ds_encdec.launch.process_group:join_torch",
            build="ds_encdec.engine.fsdp2:FSDP2Engine",
            state_reader="ds_encdec.checkpoint.saved_state:DcpState",
            memory="ds_encdec.memory.fsdp:fsdp_memory",
            launcher="ds_encdec.phase_runs.subprocess_run:torchrun_launcher",
            check="ds_encdec.engine.select:check_mesh",
            trace="ds_encdec.memory.trace:fsdp_step",
            reduction_field="infra.fsdp_reduce_every_micro_batch",
            merges_settings=True,
        ),
    )
}
"""The rows by name, in the order of preference of `infra.distributed_type=auto`."""

STATE_FORMATS: dict[str, EngineSpec] = {row.state_format: row for row in ENGINES.values()}
"""Rows by the format of the states that they write in checkpoints."""


def load(dotted: str) -> Any:
    """Import the module of a row's dotted name and return what it names there."""
    return pkgutil.resolve_name(dotted)
