"""The settings whose speed is measured, the most important first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpeedSetting:
    """A run of the 1.02 B model on one GPU: its engine as settings of `infra`, and what its layers do."""

    infra: dict[str, Any]
    compiled: bool = False
    checkpointing: str = "none"
    micro_batch: int = 4
    in_dry_run: bool = False


_ZERO1 = {"distributed_type": "deepspeed", "sharding_stage": "zero1", "offload_optimizer": "none"}
_ZERO2 = _ZERO1 | {"sharding_stage": "zero2"}
_ZERO3 = _ZERO1 | {"sharding_stage": "zero3"}
_OFFLOAD = _ZERO3 | {"offload_optimizer": "cpu"}
_FSDP2 = _ZERO2 | {"distributed_type": "fsdp"}

SPEED_SETTINGS = {
    "fsdp2 compiled": SpeedSetting(_FSDP2, compiled=True),
    "fsdp2": SpeedSetting(_FSDP2, in_dry_run=True),
    "zero2": SpeedSetting(_ZERO2),
    "zero3_offload full": SpeedSetting(_OFFLOAD, checkpointing="full", in_dry_run=True),
    "zero1 compiled": SpeedSetting(_ZERO1, compiled=True),
    "zero3": SpeedSetting(_ZERO3),
    "fsdp2 compiled, micro-batch 8": SpeedSetting(_FSDP2, compiled=True, micro_batch=8),
    "zero2 compiled": SpeedSetting(_ZERO2, compiled=True),
    "zero1": SpeedSetting(_ZERO1, in_dry_run=True),
    "fsdp2 selective": SpeedSetting(_FSDP2, checkpointing="selective", in_dry_run=True),
    "fsdp2 full compiled": SpeedSetting(_FSDP2, compiled=True, checkpointing="full"),
    "zero3 compiled": SpeedSetting(_ZERO3, compiled=True),
    "zero3_offload": SpeedSetting(_OFFLOAD),
}
