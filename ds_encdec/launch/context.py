"""The place of a run: handed down from the start of a run to everybody who asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_encdec.engines import ENGINES, EngineName, EngineSpec
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RunContext:
    """This rank among the others, its device, its engine, and how the ranks' main threads talk to each other.

    `collectives` has the one host-side group of a run: a thread beside the main one asks it for a group of its own.
    """

    world: World
    device: torch.device
    engine: EngineName
    collectives: HostCollectives

    @property
    def engine_spec(self) -> EngineSpec:
        """The row of the engine."""
        return ENGINES[self.engine]
