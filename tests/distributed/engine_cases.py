"""What runs inside the ranks: cases by name, many per start, each returning plain data to the test."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from packed_batches import random_batch
from small_run import ACCUMULATION, MODEL, SHORT_ACCUMULATION, lane_batches, run_config, weights

from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.deepspeed_zero import DeepSpeedEngine
from ds_encdec.engine.protocol import Engine, Veto
from ds_encdec.engine.select import create_engine
from ds_encdec.launch.world import discover
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.types import CheckpointError, LossSum, WeightSource


def run_cases(cases: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Run (name, function, arguments) one after the other; what failed is returned as its traceback."""
    results: dict[str, Any] = {}
    for name, function, arguments in cases:
        try:
            results[name] = globals()[function](**arguments)
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], flush=True)
    return results


def make_engine(config: FullConfig, source: WeightSource | None = weights) -> DeepSpeedEngine:
    world = discover(os.environ)
    engine = create_engine(
        config, world, torch.device("cpu"), MODEL, source, config.training.gradient_accumulation_steps
    )
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def train_step(
    engine: Engine, step: int, accumulation: int = ACCUMULATION, veto: Veto | None = None, poison: bool = False
) -> dict[str, Any]:
    """One optimizer step on the lanes of this rank. `poison` makes one rank's loss NaN."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lanes = lane_batches(step, world_size, accumulation)
    target_tokens = sum(batch.target_tokens for batch in lanes)
    mine = lanes[rank::world_size]
    total = torch.zeros(())
    for index, batch in enumerate(mine):
        loss = engine.forward(batch)
        total += loss.total.detach()
        if poison and rank == 0:
            loss = LossSum(loss.total * float("nan"), loss.by_denoiser, loss.tokens_by_denoiser)
        engine.backward(loss, target_tokens=target_tokens, last=index == len(mine) - 1)
    result = engine.step(veto)
    dist.all_reduce(total)
    return {
        "loss": float(total) / target_tokens,
        "grad_norm": float(result.grad_norm),
        "grad_norm_dtype": str(result.grad_norm.dtype),
        "learning_rate": result.learning_rate,
        "applied": result.applied,
    }


def full_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Every parameter in full, float32 master where there is one."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine._engine.zero_optimization() else parameter
        found[name] = master.detach().float().clone()
    return found


def trajectory(steps: int, **overrides: Any) -> dict[str, Any]:
    """Train, and evaluate before and after."""
    engine = make_engine(run_config(**overrides))
    held_out = random_batch(10_000, MODEL.vocab_size)
    before = engine.evaluate(held_out)
    trained = [train_step(engine, step) for step in range(steps)]
    after = engine.evaluate(held_out)
    result = {
        "steps": trained,
        "eval": [float(before.total), float(after.total)],
        "by_denoiser": after.by_denoiser,
        "tokens_by_denoiser": after.tokens_by_denoiser,
        "weights": full_weights(engine),
    }
    engine.close()
    return result


def short_engine(source: WeightSource | None = weights, **overrides: Any) -> DeepSpeedEngine:
    """An engine for `short_step`: exact comparisons need no long steps."""
    return make_engine(run_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides), source)


def short_step(engine: Engine, step: int, **how: Any) -> dict[str, Any]:
    return train_step(engine, step, SHORT_ACCUMULATION, **how)


def skipping(how: str, **overrides: Any) -> dict[str, Any]:
    """A run that skips its third step, against one that never saw it."""
    outcomes = []
    for skips in (True, False):
        engine = short_engine(**overrides)
        steps = [short_step(engine, step) for step in (0, 1)]
        if skips:
            veto = (lambda norm: True) if how == "veto" else None
            steps.append(short_step(engine, 99, veto=veto, poison=how == "nan"))
        steps += [short_step(engine, step) for step in (2, 3)]
        outcomes.append({"steps": steps, "weights": full_weights(engine)})
        engine.close()
    return {"skipped": outcomes[0], "clean": outcomes[1]}


def save(engine: DeepSpeedEngine, folder: Path) -> list[str]:
    """Write a checkpoint of `engine`; the names of this rank's files. Back when all ranks have written."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    files = engine.stage(folder, copy=False).write()
    dist.barrier()
    return [str(path.relative_to(folder)) for path in files]


def adam_steps(engine: DeepSpeedEngine) -> list[float]:
    """Adam's own counter of everything that this rank's optimizer holds."""
    return [float(state["step"]) for state in engine._engine.basic_optimizer.state.values()]


def resuming(directory: str, **overrides: Any) -> dict[str, Any]:
    """Four steps in one go, against two, a save, and two more: of a new engine, and again of the first one."""
    folder = Path(directory)
    first = short_engine(**overrides)
    for step in (0, 1):
        short_step(first, step)
    files = save(first, folder)
    saved_weights = full_weights(first)
    straight = [short_step(first, step) for step in (2, 3)]
    straight_weights = full_weights(first)
    first.load(ZeroState(folder))
    rolled_back_weights = full_weights(first)
    repeated = [short_step(first, step) for step in (2, 3)]
    repeated_weights = full_weights(first)
    first.close()
    second = short_engine(source=None, **overrides)
    second.load(ZeroState(folder))
    loaded_steps = adam_steps(second)
    resumed = [short_step(second, step) for step in (2, 3)]
    resumed_weights = full_weights(second)
    second.close()
    return {
        "files": files,
        "saved": saved_weights,
        "rolled back": rolled_back_weights,
        "adam steps": loaded_steps,
        "straight": (straight, straight_weights),
        "resumed": (resumed, resumed_weights),
        "repeated": (repeated, repeated_weights),
    }


def resuming_changed(directory: str, then: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Two steps, a save, and two more of a run configured as `then` says."""
    folder = Path(directory)
    first = short_engine(**overrides)
    for step in (0, 1):
        short_step(first, step)
    save(first, folder)
    first.close()
    second = short_engine(source=None, **overrides | then)
    second.load(ZeroState(folder))
    steps = [short_step(second, step) for step in (2, 3)]
    result = {"steps": steps, "weights": full_weights(second)}
    second.close()
    return result


def untrained(source: str, **overrides: Any) -> dict[str, Any]:
    """The float32 weights of an engine that has not trained, and how often its source was asked for a parameter."""
    asked: list[str] = []

    def recorded(name: str) -> torch.Tensor:
        asked.append(name)
        return weights(name).bfloat16() if source == "bf16" else weights(name)

    engine = short_engine(source=recorded, **overrides)
    result = {"weights": full_weights(engine), "asked": asked}
    engine.close()
    return result


def unreadable_weights(problem: str, **overrides: Any) -> dict[str, str]:
    """What each rank says when rank 0 cannot read the source's third parameter."""
    third = list(dict(parameter_shapes(MODEL)))[2]

    def damaged(name: str) -> torch.Tensor:
        if name != third:
            return weights(name)
        if problem == "shape":
            return torch.zeros(3, 5)
        raise CheckpointError(f"{name} is damaged")

    try:
        short_engine(source=damaged, **overrides)
    except CheckpointError as error:
        return {"message": str(error)}
    return {"message": "built"}


def refused_loads(directory: str, **overrides: Any) -> dict[str, str]:
    """The messages for a missing checkpoint, and for one of another world size."""
    folder = Path(directory)
    engine = make_engine(run_config(**overrides))
    messages = {}

    def message() -> str:
        try:
            engine.load(folder)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    messages["missing"] = message()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    engine.save(folder)
    layout = folder / "zero" / "layout.json"
    if dist.get_rank() == 0:
        layout.write_text(json.dumps({**json.loads(layout.read_text()), "world size": 64}))
    dist.barrier()
    messages["world size"] = message()
    engine.close()
    return messages


def only_decay(**overrides: Any) -> dict[str, Any]:
    """One step without any target: the gradient is zero, so weights move by weight decay alone."""
    engine = make_engine(run_config(**overrides, lr_scheduler_type="constant", warmup_steps=0))
    empty = random_batch(5, MODEL.vocab_size, examples=0)
    for last in (False, True):
        engine.backward(engine.forward(empty), target_tokens=0, last=last)
    result = engine.step()
    moved = full_weights(engine)
    engine.close()
    return {"learning_rate": result.learning_rate, "grad_norm": float(result.grad_norm), "weights": moved}


def shard_sizes() -> dict[str, Any]:
    """What a rank holds of each parameter under ZeRO-3, right after the engine was built."""
    engine = make_engine(run_config(sharding_stage="zero3"))
    shards = {name: parameter.ds_tensor.numel() for name, parameter in engine.model.named_parameters()}
    resident = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
    full = {name: parameter.ds_numel for name, parameter in engine.model.named_parameters()}
    tied = engine.model.lm_head.weight is engine.model.shared.weight
    engine.close()
    return {"shards": shards, "resident": resident, "full": full, "tied": tied}
