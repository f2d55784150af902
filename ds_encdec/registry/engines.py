"""Lists the engines, a row of facts each: code elsewhere reads the row of an engine, never its name. The functions and
classes of an engine are in `ByEngine` tables, in the modules to which they belong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
EngineName = Literal["deepspeed", "fsdp"]
# The values of `infra.distributed_type`: an engine's name, another word of its row, or `auto`.
DistributedType = Literal[EngineName, "ddp", "auto"]


@dataclass(frozen=True)
class ByEngine(Generic[T]):
    """One value of each engine, such as the function that builds it. A new engine adds a field here: type checkers then
    name every table that lacks it."""

    deepspeed: T
    fsdp: T

    def __getitem__(self, engine: EngineName) -> T:
        found: T = getattr(self, engine)
        return found


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The facts of one engine.

    `title`: its name in texts. `distributed_types`: the values of `infra.distributed_type` that select it; `auto` takes
    the first row that supports the configuration. `package`: the one needed besides torch, or None. `state_format`:
    `format` in its checkpoints' engine.json. `reduction_field`: the field that makes it reduce after every micro-batch,
    if there is a choice. `merges_settings`: its zero1 is zero2, and parameters are offloaded with the optimizer.
    `saves_compute_weights`: checkpoints of unsharded weights also hold them in the compute dtype. `gathers_by_hooks`:
    at stage 3, around layers or inside them. `instead`: field → the value that it refuses, and the one to set.
    """

    name: EngineName
    title: str
    distributed_types: tuple[str, ...]
    package: str | None
    state_format: Literal["deepspeed", "dcp"]
    reduction_field: str | None = None
    merges_settings: bool = False
    saves_compute_weights: bool = False
    gathers_by_hooks: bool = False
    instead: Mapping[str, tuple[bool | str, bool | str]] = field(default_factory=dict)


# The rows by name, in the order of preference of `infra.distributed_type=auto`.
ENGINES: dict[str, EngineSpec] = {
    row.name: row
    for row in (
        EngineSpec(
            name="deepspeed",
            title="DeepSpeed",
            distributed_types=("deepspeed",),
            package="deepspeed",
            state_format="deepspeed",
            saves_compute_weights=True,
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
            reduction_field="infra.fsdp_reduce_every_micro_batch",
            merges_settings=True,
        ),
    )
}

# Rows by the format of the states that they write in checkpoints.
STATE_FORMATS: dict[str, EngineSpec] = {row.state_format: row for row in ENGINES.values()}
