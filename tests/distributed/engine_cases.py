"""What runs inside the ranks: cases by name, many per start, each returning plain data to the test."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import peft  # noqa: F401  # once, before the ranks are forked: it takes seconds
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from engine_plan import LANES, LAST_STEP, SAVED_STEP
from engine_steps import Case, Collectives, copied_weights, run_all, skipping_steps, train_step
from flash_on_cpus import attention_of_gpus
from packed_batches import random_batch
from small_run import MODEL, SHORT_ACCUMULATION, SHORT_MODEL, lane_batches, run_config, weights
from torch._dynamo.utils import counters

from ds_encdec.base.types import CheckpointError, SavedState, StateKind, WeightSource
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.deepspeed.private import shards
from ds_encdec.engine.deepspeed.zero import DeepSpeedEngine
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engine.sharded_engine import compute_dtype
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.parameter_count import parameter_shapes


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """Run (name, function of this file, arguments) one after the other; what failed is returned as its traceback."""
    return run_all(cases, globals())


def make_engine(
    config: FullConfig, source: WeightSource | None = weights, model: Qwen3Seq2SeqConfig = MODEL
) -> DeepSpeedEngine:
    context = RunContext(discover(os.environ), torch.device("cpu"), resolve_engine(config), HostCollectives())
    engine = create_engine(config, context, model, source, config.training.gradient_accumulation_steps)
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def full_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Every parameter in full, float32 master where there is one."""
    parameters = {name: parameter for parameter, name in engine._engine.param_names.items()}
    frozen = {}
    for name in [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        parameter = parameters.pop(name)
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            frozen[name] = parameter.detach().float().clone()
        assert (parameter.grad, parameter.dtype) == (None, compute_dtype(engine._training))
    if engine._engine.zero_optimization():
        masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    else:
        masters = {
            piece.name: shard.weights.view(-1)[piece.offset : piece.offset + piece.length].view_as(
                parameters[piece.name]
            )
            for shard in shards(engine._engine)
            for piece in shard.pieces
        }
    return frozen | {name: master.detach().float().clone() for name, master in masters.items()}


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
        "merged": {name: parameter.clone() for name, parameter in engine.full_parameters()},
    }
    engine.close()
    return result


def short_engine(source: WeightSource | None = weights, **overrides: Any) -> DeepSpeedEngine:
    """An engine for `short_step`: exact comparisons need no long steps, and no second layer."""
    return make_engine(run_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides), source, SHORT_MODEL)


def communication(**overrides: Any) -> dict[str, int]:
    """Bytes of the collectives of a later optimizer step, by their names."""
    engine = short_engine(**overrides)
    for step in range(3):
        with Collectives() as counted:
            short_step(engine, step)
    engine.close()
    return dict(counted.bytes)


def short_step(engine: Engine, step: int, **how: Any) -> dict[str, Any]:
    return train_step(engine, step, SHORT_ACCUMULATION, **how)


def compiling(**overrides: Any) -> dict[str, Any]:
    """Two steps, what graphs of layers they took, and how many views of gathered weights the last one kept."""
    engine = make_engine(run_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides))
    counters.clear()
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        whole = {weight.untyped_storage().data_ptr() for weight in engine._engine.module.parameters() if weight.numel()}
        kept += not isinstance(tensor, torch.nn.Parameter) and tensor.untyped_storage().data_ptr() in whole
        return tensor

    with attention_of_gpus():
        steps = [short_step(engine, 0)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            steps.append(short_step(engine, 1))
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    result = {"steps": steps, "weights": full_weights(engine), "kept": kept, "graphs": graphs, "breaks": breaks}
    engine.close()
    return result


def skipping(**overrides: Any) -> dict[str, Any]:
    """A run with a step that is vetoed and one that has no finite gradient; `resuming` never sees them."""
    engine = short_engine(**overrides)
    steps = skipping_steps(lambda step, **how: short_step(engine, step, **how))
    weights = full_weights(engine)
    short_step(engine, 98, veto=lambda norm: True)
    parts = [vars(parameter).get("_hp_mapping") for parameter in engine._engine.module.parameters()]
    kept = [sums for part in parts if part is not None for sums in (part.gradient_dict or {}).values()]
    engine.close()
    return {"steps": steps, "weights": weights, "kept": len(kept) - kept.count(None)}


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
    begun = [short_step(first, step) for step in (0, 1)]
    files = save(first, folder)
    saved_weights = full_weights(first)
    copied = copied_weights(first, run_config(**overrides), SHORT_MODEL)
    straight = [short_step(first, step) for step in (2, 3)]
    straight_weights = full_weights(first)
    first.load(ZeroState(folder))
    rolled_back_weights = full_weights(first)
    repeated = [short_step(first, step) for step in (2, 3)]
    repeated_weights = full_weights(first)
    first.close()
    second = short_engine(source=weights if "lora" in overrides else None, **overrides)  # the base of adapters
    second.load(ZeroState(folder))
    loaded_steps = adam_steps(second)
    resumed = [short_step(second, step) for step in (2, 3)]
    resumed_weights = full_weights(second)
    second.close()
    return {
        "files": files,
        "saved": saved_weights,
        "copied": copied,
        "rolled back": rolled_back_weights,
        "adam steps": loaded_steps,
        "begun": begun,
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
    third = list(dict(parameter_shapes(SHORT_MODEL)))[2]

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


class Watched:
    """A SavedState that counts the elements it gave away, and fails on one rank where told to."""

    def __init__(self, saved: SavedState, *, fails_on: int | None = None) -> None:
        self.applied_steps, self.loss_scaler, self.shapes = saved.applied_steps, saved.loss_scaler, saved.shapes
        self.elements_read: Counter[str] = Counter()
        self.longest_read = 0
        self._saved = saved
        self._fails = fails_on == dist.get_rank()

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if self._fails:
            raise CheckpointError(f"{name} is damaged")
        values = self._saved.read(kind, name, start, stop)
        self.elements_read[kind] += len(values)
        self.longest_read = max(self.longest_read, len(values))
        return values


def lane_engine(source: WeightSource | None, overrides: dict[str, Any]) -> DeepSpeedEngine:
    """An engine whose steps are made of the same lanes on any number of ranks."""
    return make_engine(run_config(gradient_accumulation_steps=LANES // dist.get_world_size(), **overrides), source)


def lane_steps(engine: Engine, first: int, last: int) -> list[dict[str, Any]]:
    return [train_step(engine, step, LANES // dist.get_world_size()) for step in range(first, last)]


def leaving(directory: str, **overrides: Any) -> dict[str, Any]:
    """Train, save, train on: the uninterrupted run."""
    engine = lane_engine(weights, overrides)
    lane_steps(engine, 0, SAVED_STEP)
    save(engine, Path(directory))
    saved = full_weights(engine)
    steps = lane_steps(engine, SAVED_STEP, LAST_STEP)
    result = {"saved": saved, "steps": steps, "weights": full_weights(engine)}
    engine.close()
    return result


def arriving(source: str, directory: str, **overrides: Any) -> dict[str, Any]:
    """Load what another run left in `source`, save it again at once, and train on."""
    engine = lane_engine(None, overrides)
    saved = Watched(ZeroState(Path(source)))
    engine.load(saved)
    counted = adam_steps(engine)
    save(engine, Path(directory))
    steps = lane_steps(engine, SAVED_STEP, LAST_STEP)
    result = {
        "elements read": saved.elements_read,
        "longest read": saved.longest_read,
        "adam steps": counted,
        "weight decays": [group["weight_decay"] for group in engine._engine.basic_optimizer.param_groups],
        "steps": steps,
        "weights": full_weights(engine),
    }
    engine.close()
    return result


def staging(directory: str, **overrides: Any) -> dict[str, Any]:
    """One state written at once, from a copy two steps later in a thread, and again after going back to it."""
    folders = [Path(directory) / name for name in ("at once", "later", "again")]
    if dist.get_rank() == 0:
        for folder in folders:
            folder.mkdir(parents=True)
    engine = short_engine(**overrides)
    short_step(engine, 0)
    now = engine.stage(folders[0], copy=False)
    now.write()
    staged = engine.stage(folders[1], copy=True)
    first = short_step(engine, 1)
    thread = Thread(target=staged.write)
    thread.start()
    short_step(engine, 2)
    thread.join()
    engine.load(ZeroState(folders[0]))
    again = engine.stage(folders[2], copy=True)  # into the same buffers
    repeated = short_step(engine, 1)
    files = again.write()
    dist.barrier()
    engine.close()
    sizes = sum(path.stat().st_size for path in files)
    return {
        "bytes": (now.num_bytes, staged.num_bytes, again.num_bytes),
        "written": sizes,
        "first": first,
        "repeated": repeated,
    }


def refused_loads(directory: str, **overrides: Any) -> dict[str, str]:
    """What each rank says to a checkpoint of another model, to one that rank 1 cannot read, and to a whole one."""
    folder = Path(directory)
    engine = make_engine(run_config(**overrides))
    save(engine, folder)
    other = Watched(ZeroState(folder))
    other.shapes = {name: shape for name, shape in other.shapes.items() if name != "encoder.norm.weight"}

    def message(saved: SavedState) -> str:
        try:
            engine.load(saved)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    messages = {
        "other model": message(other),
        "damaged on rank 1": message(Watched(ZeroState(folder), fails_on=1)),
        "whole": message(ZeroState(folder)),
    }
    engine.close()
    return messages


def unwritable(directory: str, **overrides: Any) -> dict[str, Any]:
    """A rank that cannot write says so by itself, and nobody waits for it."""
    folder = Path(directory)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    engine = short_engine(**overrides)
    staged = engine.stage(folder, copy=False)
    (folder / "zero").mkdir(exist_ok=True)
    name = f"zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
    if dist.get_rank() == 1:
        (folder / "zero" / name).symlink_to("/dev/full")
    try:
        staged.write()
        error = None
    except OSError as raised:
        error = raised.errno
    dist.barrier()
    steps = [short_step(engine, 0)["applied"]]
    engine.close()
    return {"errno": error, "steps": steps}


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


def summed_gradient(**overrides: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient over two lanes: two micro-batches of one rank, or one of each of two."""
    accumulation = 2 // dist.get_world_size()
    engine = make_engine(run_config(gradient_accumulation_steps=accumulation, **overrides), model=SHORT_MODEL)
    lanes = lane_batches(0, dist.get_world_size(), accumulation)
    mine = lanes[dist.get_rank() :: dist.get_world_size()]
    for batch in mine:
        loss = engine.forward(batch)
        engine.backward(loss, target_tokens=sum(lane.target_tokens for lane in lanes), last=batch is mine[-1])
    parameters = engine.model.named_parameters()
    result = {name: safe_get_full_grad(parameter).float().clone() for name, parameter in parameters}
    engine.close()
    return result


def shard_sizes() -> dict[str, Any]:
    """What a rank holds of each parameter under ZeRO-3, right after the engine was built."""
    engine = make_engine(run_config(sharding_stage="zero3"))
    shards = {name: parameter.ds_tensor.numel() for name, parameter in engine.model.named_parameters()}
    resident = {name: parameter.numel() for name, parameter in engine.model.named_parameters()}
    full = {name: parameter.ds_numel for name, parameter in engine.model.named_parameters()}
    tied = engine.model.lm_head.weight is engine.model.shared.weight
    engine.close()
    return {"shards": shards, "resident": resident, "full": full, "tied": tied}
