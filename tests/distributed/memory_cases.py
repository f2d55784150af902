"""Measures the bytes that engines really hold on a rank: runs inside the ranks of test_memory_ranks.py."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_steps import Case, run_all
from memory_runs import MICRO_BATCH_TOKENS, run_of
from packed_batches import boundaries
from torch import Tensor
from tracked import StorageLog, tracking

from ds_encdec.base.types import Batch
from ds_encdec.engine.select import create_engine
from ds_encdec.engine.sharded_engine import ShardedEngine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model import precision
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.registry.engines import EngineName

CPU = torch.device("cpu")
OLD_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")  # on torch 2.11


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """See engine_steps.run_all."""
    # A CPU without bfloat16 instructions multiplies in float32 copies of the weights, which are no part of the engine.
    precision._EMULATED_ON_CPU = frozenset()
    gc.freeze()  # the many collections need not go through what imports have made
    return run_all(cases, globals())


def measured(engine: EngineName, case: str) -> dict[str, int]:
    """Bytes at the moments of the second step of an engine configured so, and of a save."""
    left_over = _all_tensor_bytes()
    config, model = run_of(engine, case)
    micro_batches, shapes = config.training.gradient_accumulation_steps, parameter_shapes(model)
    context = RunContext(discover(os.environ), CPU, engine, HostCollectives())

    def weights(name: str, rows: slice = slice(None)) -> Tensor:
        return torch.full(shapes[name], 1 / 16)[rows]  # a number that every dtype holds

    built = create_engine(config, context, model, weights, micro_batches)
    assert isinstance(built, ShardedEngine)
    for index in range(micro_batches):
        _micro_batch(built, last=index == micro_batches - 1)
    built.step()
    optimizer = built._engine.basic_optimizer if engine == "deepspeed" else built.optimizer
    with (
        tracking(built.model, optimizer, CPU) as tracked,
        ended_collectives(tracked.log) if engine == "fsdp" else nullcontext(),
    ):
        for _ in range(micro_batches - 1):
            _micro_batch(built, last=False)
        tracked.end_phase("earlier")
        gc.collect()
        loss = built.forward(_batch())
        gc.collect()
        tracked.end_phase("forward")
        built.backward(loss, target_tokens=MICRO_BATCH_TOKENS, last=True)
        del loss
        gc.collect()
        tracked.end_phase("backward")
        assert built.step().applied
        tracked.end_phase("step")
    saved_bytes = built.stage(Path("never-written"), copy=False).num_bytes
    built.close()
    del built, optimizer
    gc.collect()
    held = {
        "resting": tracked.resting_bytes,
        "forward": tracked.phases["forward"].held_bytes,
        "backward": tracked.phases["backward"].peak_bytes,
        "step": tracked.phases["step"].peak_bytes,
    }
    return {moment: num_bytes - left_over for moment, num_bytes in held.items()} | {"saved": saved_bytes}


def _all_tensor_bytes() -> int:
    """The sum of this process: DeepSpeed's globals keep parts of the engines of earlier cases."""
    with tracking(torch.nn.Module(), None, CPU) as tracked:
        pass
    return tracked.resting_bytes


@contextmanager
def ended_collectives(log: StorageLog) -> Iterator[None]:
    """Let no collective return before gloo's thread has let go of its tensors, and of copies of its own, seen by `log`.

    The thread first wakes who waits for it, so that on a busy machine a buffer outlives its use, and adds to a peak.
    """

    def ended(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            given = [value.untyped_storage() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            holders, alive = [_holders(storage) for storage in given], set(log._alive)
            assert collective(*args, **kwargs) is None  # it was no asynchronous one
            deadline = time.monotonic() + 60
            while set(log._alive) - alive or [_holders(storage) for storage in given] > holders:
                assert time.monotonic() < deadline
                time.sleep(0)

        return call

    has_new_names = hasattr(dist, "all_gather_single")
    moved = ("all_gather_single", "reduce_scatter_single") if has_new_names else OLD_NAMES
    originals = {name: getattr(dist, name) for name in (*moved, "all_reduce")}  # those that FSDP2 calls
    for name, original in originals.items():
        setattr(dist, name, ended(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _micro_batch(engine: ShardedEngine, *, last: bool) -> None:
    engine.backward(engine.forward(_batch()), target_tokens=MICRO_BATCH_TOKENS, last=last)


def _batch() -> Batch:
    """One document of so few tokens that activations disappear beside the parameters."""
    tokens, ends, lengths = torch.arange(MICRO_BATCH_TOKENS), boundaries([MICRO_BATCH_TOKENS]), (MICRO_BATCH_TOKENS,)
    return Batch(*[tokens] * 5, *[ends] * 2, torch.zeros_like(tokens), lengths, lengths)
