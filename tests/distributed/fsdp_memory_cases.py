"""Measures what FSDP2 engines really hold on a rank: runs inside the ranks of test_fsdp_memory_ranks.py."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_steps import Case, run_all
from fsdp_memory_run import TOKENS, config_of, model_of
from packed_batches import boundaries
from tracked import tracking

from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.memory.storage_log import StorageLog
from ds_encdec.model import precision
from ds_encdec.types import Batch

CPU = torch.device("cpu")
OLD_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")  # on torch 2.11


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """See engine_steps.run_all."""
    # A CPU without bfloat16 instructions multiplies in float32 copies of the weights, which are no part of the engine.
    precision._EMULATED_ON_CPU = frozenset()
    gc.freeze()  # the many collections need not go through what imports have made
    return run_all(cases, globals())


@contextmanager
def ended_collectives(log: StorageLog) -> Iterator[None]:
    """Let no collective return before gloo's thread has let go of its tensors, and of copies of its own, seen by `log`.

    The thread first wakes who waits for it, so that on a busy machine a buffer that is done with outlives its use, and
    adds to a peak, by as long as the thread does not come to run.
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
    names = (*moved, "all_reduce")  # those that FSDP2 calls
    originals = {name: getattr(dist, name) for name in names}
    for name, original in originals.items():
        setattr(dist, name, ended(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def measured(case: str) -> dict[str, int]:
    """Bytes at the moments of an engine's second step, and of a save."""
    config = config_of(case)
    micro_batches = config.training.gradient_accumulation_steps
    context = RunContext(discover(os.environ), CPU, "fsdp", HostCollectives())
    engine = FSDP2Engine(config, context, model_of(case), None)
    for parameter in engine.model.parameters():
        torch.nn.init.constant_(parameter, 1 / 16)
    _micro_batches(engine, micro_batches)
    engine.step()
    with tracking(engine.model, engine.optimizer, CPU) as tracked, ended_collectives(tracked.log):
        _micro_batches(engine, micro_batches - 1)
        tracked.end_phase("earlier")
        gc.collect()
        loss = engine.forward(_batch())
        gc.collect()
        tracked.end_phase("forward")
        engine.backward(loss, target_tokens=TOKENS, last=True)
        del loss
        tracked.end_phase("backward")
        assert engine.step().applied
        tracked.end_phase("step")
    saved_bytes = engine.stage(Path("never-written"), copy=False).num_bytes
    engine.close()
    del engine
    gc.collect()
    return {
        "resting": tracked.resting_bytes,
        "forward": tracked.phases["forward"].held_bytes,
        "backward": tracked.phases["backward"].peak_bytes,
        "step": tracked.phases["step"].peak_bytes,
        "saved": saved_bytes,
    }


def _micro_batches(engine: FSDP2Engine, count: int) -> None:
    """Micro-batches of a step of as many as the configuration has, the last ones of it."""
    steps = engine._training.gradient_accumulation_steps
    for index in range(count):
        engine.backward(engine.forward(_batch()), target_tokens=TOKENS, last=index == steps - 1)


def _batch() -> Batch:
    """One document of so few tokens that activations disappear beside the parameters."""
    tokens = torch.arange(TOKENS)
    return Batch(
        encoder_ids=tokens,
        decoder_input_ids=tokens,
        labels=tokens,
        encoder_positions=tokens,
        decoder_positions=tokens,
        encoder_cu_seqlens=boundaries([TOKENS]),
        decoder_cu_seqlens=boundaries([TOKENS]),
        denoiser_ids=torch.zeros_like(tokens),
        encoder_lengths=(TOKENS,),
        decoder_lengths=(TOKENS,),
    )
