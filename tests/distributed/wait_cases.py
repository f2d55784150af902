"""What runs inside the ranks to count what a step waits for, under DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from device_waits import device_waits
from engine_cases import short_engine, short_step
from engine_steps import Case, run_all
from small_run import SHORT_ACCUMULATION, lane_batches
from stand_in_streams import streams

from ds_encdec.base.types import Batch
from ds_encdec.engine.protocol import Engine


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    return run_all(cases, globals())


def waits(**overrides: Any) -> dict[str, int]:
    """How often a step of several micro-batches waits for its device: the fourth, with an evaluation behind it."""
    engine = short_engine(**overrides)
    for step in range(3):  # DeepSpeed's timer starts with the third, ZeRO-3's prefetcher knows its order
        short_step(engine, step)
    batches = own_batches()
    with device_waits() as counted:
        accumulate(engine, batches)
        engine.step()
        engine.evaluate(batches[0])
    engine.close()
    return dict(counted)


def own_batches() -> list[Batch]:
    """This rank's micro-batches of a later step."""
    return lane_batches(4, dist.get_world_size(), SHORT_ACCUMULATION)[dist.get_rank() :: dist.get_world_size()]


def accumulate(engine: Engine, batches: list[Batch]) -> None:
    """The forward and backward passes of a step, without reading anything."""
    for index, batch in enumerate(batches):
        engine.backward(engine.forward(batch), target_tokens=100, last=index == len(batches) - 1)


def waits_of_streams(**overrides: Any) -> dict[str, Any]:
    """What waits for what, and what is overwritten, in the fourth step on a device with streams; and the losses
    of the three before."""
    with streams() as device:
        engine = short_engine(**overrides)
        losses = [short_step(engine, step)["loss"] for step in range(3)]
        device.waits.clear()
        device.overwritten.clear()
        accumulate(engine, own_batches())
        engine.step()
        found = {"losses": losses, "waits": [*device.waits], "overwritten": [*device.overwritten]}
        engine.close()
    return found
