"""Measures what DeepSpeed engines really hold on a rank: runs inside the ranks of test_zero_memory_ranks.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_steps import Case, run_all
from packed_batches import boundaries
from torch import Tensor
from tracked import tracking
from zero_memory_run import ACCUMULATION, MODEL, TOKENS, memory_config

from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine
from ds_encdec.engine.select import create_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model import precision
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.types import Batch

CPU = torch.device("cpu")


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """See engine_steps.run_all."""
    # A CPU without bfloat16 instructions multiplies in float32 copies of the weights, which are no part of the engine.
    precision._EMULATED_ON_CPU = frozenset()
    gc.freeze()  # the many collections need not go through what imports have made
    return run_all(cases, globals())


def measured(**overrides: Any) -> dict[str, int]:
    """Bytes at the moments of the second step of an engine configured so, and of a save."""
    left_over = _all_tensor_bytes()
    engine = _engine(**overrides)
    for index in range(ACCUMULATION):
        _micro_batch(engine, last=index == ACCUMULATION - 1)
    engine.step()
    with tracking(engine.model, engine._engine.basic_optimizer, CPU) as tracked:
        for _ in range(ACCUMULATION - 1):
            _micro_batch(engine, last=False)
        loss = engine.forward(_batch())
        gc.collect()
        tracked.end_phase("forward")
        engine.backward(loss, target_tokens=TOKENS, last=True)
        del loss
        gc.collect()
        tracked.end_phase("backward")
        engine.step()
        tracked.end_phase("step")
    saved_bytes = engine.stage(Path("never-written"), copy=False).num_bytes
    engine.close()
    del engine
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


def _micro_batch(engine: DeepSpeedEngine, *, last: bool) -> None:
    engine.backward(engine.forward(_batch()), target_tokens=TOKENS, last=last)


def _engine(**overrides: Any) -> DeepSpeedEngine:
    context = RunContext(discover(os.environ), CPU, "deepspeed", HostCollectives())
    engine = create_engine(memory_config(**overrides), context, MODEL, _weights, ACCUMULATION)
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def _weights(name: str, rows: slice = slice(None), /) -> Tensor:
    """A WeightSource of numbers that every dtype holds."""
    return torch.full(parameter_shapes(MODEL)[name], 1 / 16)[rows]


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
