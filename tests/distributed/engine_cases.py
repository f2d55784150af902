"""What runs inside the ranks of either engine: cases by name, many per start, each returning plain data to the test."""

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import peft  # noqa: F401  # once, before the ranks are forked: it takes seconds
import torch
import torch.distributed as dist
from small_run import (
    ACCUMULATION,
    LANES,
    MODEL,
    SHORT_ACCUMULATION,
    SHORT_MODEL,
    lane_batches,
    model_of,
    random_batch,
    run_config,
    train_on,
    weights,
)
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.base.types import MOMENTS, Batch, CheckpointError, SavedState, StateKind, WeightSource
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.engine.protocol import DCP_FOLDER, Veto
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engine.sharded_engine import compute_dtype, unsharded_copy
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import quantized_matrices
from ds_encdec.model.parameter_count import parameter_shapes

Case = tuple[str, str, dict[str, Any]]  # name, function, arguments


def run_all(cases: Sequence[Case], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Run the cases one after the other; results by name, of what failed its traceback."""
    results: dict[str, Any] = {}
    for name, function, arguments in cases:
        try:
            results[name] = functions[function](**arguments)
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], flush=True)
    return results


def make_engine(config: FullConfig, source: WeightSource | None = weights, model: Qwen3Seq2SeqConfig = MODEL) -> Any:
    context = RunContext(discover(os.environ), torch.device("cpu"), resolve_engine(config), HostCollectives())
    return create_engine(config, context, model, source, config.training.gradient_accumulation_steps)


def short_engine(source: WeightSource | None = weights, **overrides: Any) -> Any:
    """An engine for `short_step`: exact comparisons need no long steps, and no second layer."""
    return make_engine(run_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides), source, SHORT_MODEL)


def train_step(
    engine: Any, step: int, accumulation: int = ACCUMULATION, veto: Veto | None = None, poison: bool = False
) -> dict[str, Any]:
    """One optimizer step on the lanes of this rank. `poison` makes one rank's loss infinite."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lanes = lane_batches(step, world_size, accumulation)
    target_tokens = sum(batch.target_tokens for batch in lanes)
    mine, result = train_on(engine, lanes[rank::world_size], target_tokens, veto, poison and rank == 0)
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return {
        "loss": float(total) / target_tokens,
        "grad_norm": float(result.grad_norm),
        "grad_norm_dtype": str(result.grad_norm.dtype),
        "learning_rate": result.learning_rate,
        "applied": result.applied,
    }


def short_step(engine: Any, step: int, **how: Any) -> dict[str, Any]:
    return train_step(engine, step, SHORT_ACCUMULATION, **how)


def shared_folder(directory: str | Path) -> Path:
    """The folder, which rank 0 makes."""
    folder = Path(directory)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def save(engine: Any, folder: Path) -> list[str]:
    """Write a checkpoint of `engine`; the names of this rank's files. Back when all ranks have written."""
    files = engine.stage(shared_folder(folder), copy=False).write()
    dist.barrier()
    return [str(path.relative_to(folder)) for path in files]


def saved_state(folder: Path) -> SavedState:
    return DcpState(folder) if (folder / DCP_FOLDER).exists() else ZeroState(folder)


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter in full, float32 master where there is one."""
    state = full_state(engine)
    return {key.removeprefix("weight."): tensor for key, tensor in state.items() if key.startswith("weight.")}


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """`KIND.NAME` → the full tensor: the weights, and under FSDP2 the moments."""
    if not isinstance(engine, FSDP2Engine):
        from deepspeed_cases import master_weights  # which imports deepspeed

        return {f"weight.{name}": weight for name, weight in master_weights(engine).items()}
    found = {f"weight.{name}": module.unpacked() for name, module in quantized_matrices(engine.model).items()}
    for name, parameter in engine._parameters.items():
        found[f"weight.{name}"] = parameter.detach().full_tensor().clone()
        state = engine.optimizer.state.get(parameter, {})
        for kind in (kind for kind in MOMENTS if kind in state):
            found[f"{kind}.{name}"] = state[kind].full_tensor().clone()
    return found


def trajectory(steps: int, layers: str | None = None, **overrides: Any) -> dict[str, Any]:
    """Train, and evaluate before and after. `graphs`: of compiled layers, how many there are after each step."""
    counters.clear()
    config = run_config(**overrides)
    engine = make_engine(config, model=model_of(config, layers))
    held_out = random_batch(10_000, MODEL.vocab_size)
    before = next(engine.evaluate([held_out]))
    graphs, trained = [], []
    for step in range(steps):
        trained.append(train_step(engine, step))
        graphs.append(counters["stats"]["unique_graphs"])
    after = next(engine.evaluate([held_out]))
    result = {
        "digests": [engine.replica_digest()],
        "steps": trained,
        "graphs": graphs,
        "eval": [float(before.total), float(after.total)],
        "sums": after.sums,
        "counts": after.counts,
        "loss_dtype": str(after.total.dtype),
        "weights": full_weights(engine),
        "merged": {name: parameter.clone() for name, parameter in engine.full_parameters()},
    }
    engine.close()
    return result


def skipping(**overrides: Any) -> dict[str, Any]:
    """Four steps, with one that is vetoed and one that has no finite gradient between; `saving` never sees them."""
    engine = short_engine(**overrides)
    given = [(0, {}), (1, {}), (98, {"veto": lambda norm: True}), (2, {}), (99, {"poison": True}), (3, {})]
    steps = [short_step(engine, number, **how) for number, how in given]
    state, digest = full_state(engine), engine.replica_digest()
    short_step(engine, 98, veto=lambda norm: True)
    parts = [vars(parameter).get("_hp_mapping") for parameter in engine.model.parameters()]
    kept = [sums for part in parts if part is not None for sums in (part.gradient_dict or {}).values()]
    engine.close()
    return {"steps": steps, "state": state, "digests": [digest], "kept": len(kept) - kept.count(None)}


def saving(directory: str, copy: bool, **overrides: Any) -> dict[str, Any]:
    """Two steps, a save, two more; the same two after loading it into this engine, and into a new one.

    With `copy` the files are written by a thread while training goes on.
    """
    folder = shared_folder(directory)
    engine = short_engine(**overrides)
    begun = [short_step(engine, step) for step in (0, 1)]
    saved = full_state(engine)
    files: list[Path] = []
    staged = engine.stage(folder, copy=copy)
    writer = Thread(target=lambda: files.extend(staged.write()))
    if not copy:
        writer.run()
    copied = copied_weights(engine, run_config(**overrides))
    straight = [short_step(engine, 2)]
    if copy:
        writer.start()
    straight.append(short_step(engine, 3))
    if copy:
        writer.join()
    straight_state = full_state(engine)
    dist.barrier()
    list(engine.evaluate([random_batch(1, MODEL.vocab_size)]))  # leaves parameters gathered
    digests = [engine.replica_digest()]
    again = _load_and_go_on(engine, folder)
    engine.close()
    fresh = short_engine(source=weights if "lora" in overrides else None, **overrides)  # the base of adapters
    resumed = _load_and_go_on(fresh, folder)
    digests.append(fresh.replica_digest())
    fresh.close()
    return {
        "digests": digests,
        "files": [str(path.relative_to(folder)) for path in files],
        "num_bytes": staged.num_bytes,
        "saved": saved,
        "copied": copied,
        "begun": begun,
        "straight": (straight, straight_state),
        "again": again,
        "resumed": resumed,
    }


def copied_weights(engine: Any, config: FullConfig) -> dict[str, torch.Tensor]:
    """The weights of a plain copy of the engine's model, for which no random number is drawn."""
    drawn = torch.get_rng_state()
    copy = unsharded_copy(engine, SHORT_MODEL, compute_dtype(config.training), HostCollectives())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert copy.lm_head.weight is copy.shared.weight
    return {name: parameter.detach().clone() for name, parameter in copy.named_parameters()}


def _load_and_go_on(engine: Any, folder: Path) -> tuple[Any, Any, Any]:
    """The state that was loaded, two steps, and the state after them."""
    engine.load(saved_state(folder))
    loaded = full_state(engine)
    return loaded, [short_step(engine, step) for step in (2, 3)], full_state(engine)


def arriving(source: str, directory: str, **overrides: Any) -> dict[str, Any]:
    """Load what any engine's `saving` has left in `source`, save it at once, and take the two steps behind it."""
    accumulation = LANES // dist.get_world_size()
    config = run_config(gradient_accumulation_steps=accumulation, **overrides)
    engine = make_engine(config, None, SHORT_MODEL)
    saved = Watched(saved_state(Path(source)))
    engine.load(saved)
    optimizer = engine.optimizer if isinstance(engine, FSDP2Engine) else engine._engine.basic_optimizer
    result = {
        "weights read": saved.elements_read["weight"],
        "longest read": saved.longest_read,
        "counters": [float(state["step"]) for state in optimizer.state.values() if "step" in state],
        "weight decays": [group["weight_decay"] for group in optimizer.param_groups],
        "files": save(engine, Path(directory)),
        "digests": [engine.replica_digest()],
        "steps": [train_step(engine, step, accumulation) for step in (2, 3)],
        "weights": full_weights(engine),
    }
    result["digests"].append(engine.replica_digest())
    engine.close()
    return result


def resuming_changed(directory: str, then: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Two steps, a save, and two more of a run configured as `then` says."""
    folder = Path(directory)
    first = short_engine(**overrides)
    for step in (0, 1):
        short_step(first, step)
    save(first, folder)
    first.close()
    second = short_engine(source=None, **overrides | then)
    second.load(saved_state(folder))
    steps = [short_step(second, step) for step in (2, 3)]
    result = {"steps": steps, "weights": full_weights(second)}
    second.close()
    return result


def unreadable_weights(failing: int, **overrides: Any) -> str:
    """What each rank says when the rank `failing` cannot read the source's third parameter."""
    third = list(parameter_shapes(SHORT_MODEL))[2]

    def damaged(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        if name == third and dist.get_rank() == failing:
            raise CheckpointError(f"{name} is damaged")
        return weights(name, rows)

    try:
        short_engine(source=damaged, **overrides)
    except CheckpointError as error:
        return f"refused: {error}"
    return "built"


class Watched:
    """A SavedState that counts the elements it gave away, and fails on one rank where told to."""

    def __init__(self, saved: SavedState, *, fails_on: int | None = None, **changed: Any) -> None:
        self.applied_steps, self.loss_scaler, self.shapes = saved.applied_steps, saved.loss_scaler, saved.shapes
        self.elements_read: Counter[str] = Counter()
        self.longest_read = 0
        self._saved = saved
        self._fails = fails_on == dist.get_rank()
        vars(self).update(changed)

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if self._fails:
            raise CheckpointError(f"{name} is damaged")
        values = self._saved.read(kind, name, start, stop)
        self.elements_read[kind] += len(values)
        self.longest_read = max(self.longest_read, len(values))
        return values


def refused_loads(directory: str, **overrides: Any) -> dict[str, Any]:
    """What each rank says to states that cannot be loaded, and to one that can."""
    folder = Path(directory)
    engine = short_engine(**overrides)
    save(engine, folder)
    saved = saved_state(folder)
    shapes = dict(saved.shapes)
    lacking = {name: shape for name, shape in shapes.items() if name != "decoder.norm.weight"}
    states = {
        "lacking": Watched(saved, shapes=lacking),
        "other shape": Watched(saved, shapes=shapes | {"decoder.norm.weight": (33,)}),
        "more": Watched(saved, shapes=shapes | {"lora.weight": (3,)}),
        "unreadable": Watched(saved, fails_on=dist.get_world_size() - 1),
        "whole": saved,
    }
    found: dict[str, Any] = {}
    for name, state in states.items():
        try:
            engine.load(state)
            found[name] = "loaded"
        except CheckpointError as error:
            found[name] = f"refused: {error}"
    engine.close()
    return found


def only_decay(**overrides: Any) -> dict[str, Any]:
    """One step without any target: the gradient is zero, so weights move by weight decay alone."""
    engine = short_engine(**overrides, lr_scheduler_type="constant", warmup_steps=0)
    empty = random_batch(5, MODEL.vocab_size, examples=0)
    accumulate(engine, [empty, empty], target_tokens=0)
    result = engine.step()
    moved = full_weights(engine)
    engine.close()
    return {"learning_rate": result.learning_rate, "grad_norm": float(result.grad_norm), "weights": moved}


def own_batches() -> list[Batch]:
    """This rank's micro-batches of a later step."""
    return lane_batches(4, dist.get_world_size(), SHORT_ACCUMULATION)[dist.get_rank() :: dist.get_world_size()]


def accumulate(engine: Any, batches: list[Batch], target_tokens: int = 100) -> None:
    """The forward and backward passes of a step, without reading anything."""
    for index, batch in enumerate(batches):
        engine.backward(next(engine.losses([batch])), num_losses=target_tokens, last=index == len(batches) - 1)


def waits(**overrides: Any) -> dict[str, int]:
    """How often a step of several micro-batches waits for its device: the fourth, with an evaluation behind it."""
    engine = short_engine(**overrides)
    for step in range(3):  # DeepSpeed's timer starts with the third, ZeRO-3's prefetcher knows its order
        short_step(engine, step)
    batches = own_batches()
    with device_waits() as counted:
        accumulate(engine, batches)
        engine.step()
        next(engine.evaluate([batches[0]]))
    engine.close()
    return {name: count for name, count in counted.items() if count}


class _Reads(TorchDispatchMode):
    """Counts operations whose result, or its size, the host needs at once."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._counted[name] += name in ("_local_scalar_dense", "nonzero")
        return func(*args, **kwargs or {})


class _Copies(TorchFunctionMode):
    """Counts functions that copy between the host and a device, and return when that is done."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self._counted[name] += name in ("cpu", "tolist", "numpy", "tensor", "as_tensor", "new_tensor")
        return func(*args, **kwargs or {})


@contextmanager
def device_waits() -> Iterator[Counter[str]]:
    """Inside, what a host would wait for on a GPU is counted by name, without one."""
    counted: Counter[str] = Counter()
    watched: Any = nullcontext()
    if "deepspeed" in sys.modules:  # which must not be imported for FSDP2
        from deepspeed.accelerator import get_accelerator

        watched = patch.object(get_accelerator(), "synchronize", lambda *_: counted.update(["synchronize"]))
    with _Copies(counted), _Reads(counted), watched:
        yield counted
