"""What runs inside the ranks for the FSDP2 engine: cases by name, many per start, each returning plain data."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft  # noqa: F401  # once, before the ranks are forked: it takes seconds
import torch
import torch.distributed as dist
from device_waits import device_waits
from engine_steps import Case, Collectives, copied_weights, run_all, skipping_steps, train_step
from flash_on_cpus import attention_of_gpus
from packed_batches import random_batch
from small_run import MODEL, SHORT_ACCUMULATION, SHORT_MODEL, lane_batches, run_config, weights
from torch._dynamo.utils import counters

from ds_encdec.base.types import CheckpointError, ConfigError, DsEncDecError, StateKind, WeightSource
from ds_encdec.checkpoint.saved_state import DcpState
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.fsdp2 import FSDP2Engine
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engine.staging import StagingArea
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import quantized_matrices
from ds_encdec.model.parameter_count import parameter_shapes


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    results = run_all(cases, globals())
    results["imported deepspeed"] = "deepspeed" in sys.modules
    return results


def fsdp_config(**overrides: Any) -> FullConfig:
    kind = "ddp" if overrides.get("sharding_stage") == "zero0" else "fsdp"
    return run_config(**{"distributed_type": kind, "deepspeed_extra": {}} | overrides)


def make_engine(
    config: FullConfig, source: WeightSource | None = weights, model: Qwen3Seq2SeqConfig = MODEL
) -> FSDP2Engine:
    context = RunContext(discover(os.environ), torch.device("cpu"), resolve_engine(config), HostCollectives())
    engine = create_engine(config, context, model, source, 1)
    assert isinstance(engine, FSDP2Engine)
    return engine


def short_engine(source: WeightSource | None = weights, **overrides: Any) -> FSDP2Engine:
    """An engine for `short_step`: exact comparisons need no long steps, and no second layer."""
    return make_engine(fsdp_config(gradient_accumulation_steps=SHORT_ACCUMULATION, **overrides), source, SHORT_MODEL)


def short_step(engine: FSDP2Engine, step: int, **how: Any) -> dict[str, Any]:
    return train_step(engine, step, SHORT_ACCUMULATION, **how)


def full_state(engine: FSDP2Engine) -> dict[str, torch.Tensor]:
    """`KIND.NAME` → the full tensor."""
    found = {f"weight.{name}": module.unpacked() for name, module in quantized_matrices(engine.model).items()}
    for name, parameter in engine._parameters.items():
        found[f"weight.{name}"] = parameter.detach().full_tensor().clone()
        state = engine.optimizer.state.get(parameter, {})
        for kind in (kind for kind in ("exp_avg", "exp_avg_sq") if kind in state):
            found[f"{kind}.{name}"] = state[kind].full_tensor().clone()
    return found


def full_weights(engine: FSDP2Engine) -> dict[str, torch.Tensor]:
    state = full_state(engine)
    return {key.removeprefix("weight."): tensor for key, tensor in state.items() if key.startswith("weight.")}


def shared_folder(directory: str) -> Path:
    folder = Path(directory)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return folder


def trajectory(steps: int, **overrides: Any) -> dict[str, Any]:
    """Train, and evaluate before and after. `graphs`: of compiled layers, how many there are after each step."""
    counters.clear()
    engine = make_engine(fsdp_config(**overrides))
    held_out = random_batch(10_000, MODEL.vocab_size)
    before = engine.evaluate(held_out)
    graphs, trained = [], []
    for step in range(steps):
        trained.append(train_step(engine, step))
        graphs.append(counters["stats"]["unique_graphs"])
    after = engine.evaluate(held_out)
    result = {
        "steps": trained,
        "graphs": graphs,
        "eval": [float(before.total), float(after.total)],
        "by_denoiser": after.by_denoiser,
        "tokens_by_denoiser": after.tokens_by_denoiser,
        "loss_dtype": str(after.total.dtype),
        "weights": full_weights(engine),
        "merged": {name: parameter.clone() for name, parameter in engine.full_parameters()},
    }
    engine.close()
    return result


def compiled_trajectory(steps: int, **overrides: Any) -> dict[str, Any]:
    """`trajectory` of compiled layers, whose graphs run as they are captured: what inductor makes of them is tested
    in tests/model, and takes minutes here.
    """
    capture = partial(torch.compile, backend="aot_eager")
    with attention_of_gpus(), mock.patch.object(torch, "compile", lambda forward, options: capture(forward)):
        return trajectory(steps, **overrides)


def skipping(copy: bool, **overrides: Any) -> dict[str, Any]:
    """A run with a step that is vetoed and one that has no finite gradient; `saving` never sees them.

    `copy` is of no account here.
    """
    engine = short_engine(**overrides)
    steps = skipping_steps(lambda step, **how: short_step(engine, step, **how))
    state = full_state(engine)
    engine.close()
    return {"steps": steps, "state": state}


def saving(directory: str, copy: bool, **overrides: Any) -> dict[str, Any]:
    """Two steps, a save, two more; the same two after loading it into a new engine, and into this one.

    With `copy` the files are written by a thread while training goes on.
    """
    folder = shared_folder(directory)
    engine = short_engine(**overrides)
    begun = [short_step(engine, step) for step in (0, 1)]
    saved_state = full_state(engine)
    files: list[Path] = []
    staged = engine.stage(folder, copy=copy)
    writer = threading.Thread(target=lambda: files.extend(staged.write()))
    if not copy:
        writer.run()
    copied = copied_weights(engine, fsdp_config(**overrides), SHORT_MODEL)
    straight = [short_step(engine, 2)]
    if copy:
        writer.start()
    straight.append(short_step(engine, 3))
    if copy:
        writer.join()
    straight_state = full_state(engine)
    dist.barrier()
    engine.evaluate(random_batch(1, MODEL.vocab_size))  # leaves parameters gathered
    again = [_resume(engine, folder), full_state(engine)]
    engine.close()
    fresh = short_engine(source=weights if "lora" in overrides else None, **overrides)  # the base of adapters
    resumed = [_resume(fresh, folder), full_state(fresh)]
    fresh.close()
    return {
        "files": [str(path.relative_to(folder)) for path in files],
        "num_bytes": staged.num_bytes,
        "saved": saved_state,
        "copied": copied,
        "begun": begun,
        "straight": [straight, straight_state],
        "again": again,
        "resumed": resumed,
    }


def _resume(engine: FSDP2Engine, folder: Path) -> list[dict[str, Any]]:
    engine.load(DcpState(folder))
    return [short_step(engine, step) for step in (2, 3)]


def reloading(directory: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """What an engine holds after loading what another start of ranks has saved."""
    engine = short_engine(source=None, **overrides)
    engine.load(DcpState(Path(directory)))
    state = full_state(engine)
    rate = short_step(engine, 2)["learning_rate"]
    engine.close()
    return {"state": state, "learning_rate": rate}


def untrained_state() -> dict[str, torch.Tensor]:
    engine = short_engine()
    tensors = {key: tensor.full_tensor() for key, tensor in engine.stage(Path(), copy=True).write.args[0].items()}
    engine.close()
    return tensors


class FakeState:
    """A SavedState of zeros."""

    applied_steps = 3

    def __init__(self, shapes: dict[str, tuple[int, ...]], unreadable_on: int | None = None) -> None:
        self.shapes = shapes
        self.loss_scaler = {"scale": 1024.0}
        self._unreadable_on = unreadable_on

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if dist.get_rank() == self._unreadable_on:
            raise CheckpointError(f"{kind} of {name} is damaged")
        assert stop is not None
        return torch.zeros(stop - start)


def refused_loads() -> dict[str, str]:
    """What each rank says to states that cannot be loaded."""
    engine = short_engine()
    shapes = dict(parameter_shapes(SHORT_MODEL))
    lacking = {name: shape for name, shape in shapes.items() if name != "decoder.norm.weight"}
    states = {
        "lacking": FakeState(lacking),
        "other shape": FakeState(shapes | {"decoder.norm.weight": (33,)}),
        "more": FakeState(shapes | {"lora.weight": (3,)}),
        "unreadable": FakeState(shapes, unreadable_on=dist.get_world_size() - 1),
        "whole": FakeState(shapes),
    }
    messages = {}
    for name, state in states.items():
        try:
            engine.load(state)
            messages[name] = "loaded"
        except CheckpointError as error:
            messages[name] = str(error)
    messages["handed on"] = str(engine.stage(Path(), copy=False).write.args[2].loss_scaler)
    engine.close()
    return messages


def waits(**overrides: Any) -> dict[str, int]:
    """How often a step of several micro-batches waits for its device."""
    engine = short_engine(**overrides)
    short_step(engine, 0)
    lanes = lane_batches(1, dist.get_world_size(), SHORT_ACCUMULATION)[dist.get_rank() :: dist.get_world_size()]
    with device_waits() as counted:
        for index, batch in enumerate(lanes):
            engine.backward(engine.forward(batch), target_tokens=100, last=index == len(lanes) - 1)
        engine.step()
    engine.close()
    return dict(counted)


def host_copies(directory: str) -> dict[str, str]:
    """Where the tensors of a save are, whether writing them asks for a GPU, and what is said where memory is short."""
    folder = shared_folder(directory)
    engine = short_engine()
    live = engine._parameters["shared.weight"].to_local().data_ptr()

    def staged(copy: bool) -> tuple[StagedSave, int]:
        save = engine.stage(folder, copy=copy)
        return save, save.write.args[0]["weight.shared.weight"].to_local().data_ptr()

    _, at_first = staged(copy=False)
    background, kept = staged(copy=True)
    _, afterwards = staged(copy=False)
    found = {
        "at first": "live" if at_first == live else "elsewhere",
        "in the background": "kept" if kept != live else "live",
        "at once, afterwards": "kept" if afterwards == kept else "elsewhere",
    }
    loader = "torch.distributed.checkpoint.filesystem._OverlappingCpuLoader"
    with mock.patch("torch.cuda.is_available", return_value=True), mock.patch(loader, side_effect=AssertionError):
        background.write()
    found["written"] = "without a GPU"
    failing = mock.patch.object(StagingArea, "_copy", side_effect=MemoryError("no more"))
    with failing if dist.get_rank() == 1 else nullcontext():
        try:
            engine.stage(folder, copy=True)
            found["no memory on rank 1"] = "staged"
        except DsEncDecError as error:
            found["no memory on rank 1"] = f"{type(error).__name__}: {error}"
    engine.close()
    return found


def unreadable_weights(problem: str) -> str:
    """What each rank says when the last one cannot read the source's third parameter."""
    third = list(parameter_shapes(SHORT_MODEL))[2]

    def damaged(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        if name != third or dist.get_rank() != dist.get_world_size() - 1:
            return weights(name, rows)
        if problem == "shape":
            return torch.zeros(3, 5)
        raise CheckpointError(f"{name} is damaged")

    try:
        short_engine(source=damaged)
    except CheckpointError as error:
        return str(error)
    return "built"


def indivisible_ranks() -> str:
    try:
        short_engine(sharding_stage="zero3_hybrid", hybrid_shard_size=3)
    except ConfigError as error:
        return str(error)
    return "built"


def only_decay() -> dict[str, Any]:
    """One step without any target: the gradient is zero, so weights move by weight decay alone."""
    engine = short_engine(lr_scheduler_type="constant", warmup_steps=0)
    empty = random_batch(5, MODEL.vocab_size, examples=0)
    for last in (False, True):
        engine.backward(engine.forward(empty), target_tokens=0, last=last)
    result = engine.step()
    moved = full_weights(engine)
    engine.close()
    return {"learning_rate": result.learning_rate, "grad_norm": float(result.grad_norm), "weights": moved}


def communication(**overrides: Any) -> dict[str, Any]:
    """Collectives of the micro-batches, two, of an optimizer step; and what a rank of this engine asks its source for,
    and holds of each parameter and moment.
    """
    asked: dict[str, int] = {}

    def recorded(name: str, rows: slice = slice(None), /) -> torch.Tensor:
        found = weights(name, rows)
        asked[name] = found.numel()
        return found

    engine = short_engine(source=recorded, **overrides)
    short_step(engine, 0)
    tensors = engine.stage(Path(), copy=False).write.args[0]
    result = {
        "asked": asked,
        "held": {name: parameter.to_local().numel() for name, parameter in engine.model.named_parameters()},
        "state": {key: tensor.to_local().numel() for key, tensor in tensors.items()},
        "tied": engine.model.lm_head.weight is engine.model.shared.weight,
        "dtypes": {str(parameter.dtype) for parameter in engine.model.parameters()},
    }
    with Collectives() as counted:
        for last in (False, True):
            loss = engine.forward(random_batch(int(last), MODEL.vocab_size))
            engine.backward(loss, target_tokens=100, last=last)
    engine.step()
    engine.close()
    return result | {"calls": dict(counted.calls), "bytes": dict(counted.bytes)}


def full_disk(directory: str) -> str:
    """What each rank says when files may not grow beyond 20 kB."""
    folder = shared_folder(directory)
    engine = short_engine()
    staged = engine.stage(folder, copy=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        staged.write()
        message = "written"
    except OSError as error:
        message = f"OSError: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    engine.close()
    return message
