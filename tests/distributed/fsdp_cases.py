"""What runs inside the ranks of FSDP2 alone, without deepspeed; see engine_cases.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import accumulate, full_state, saved_state, shared_folder, short_engine, short_step, trajectory
from engine_steps import Case, Collectives, run_all
from flash_on_cpus import attention_of_gpus
from packed_batches import random_batch
from small_run import MODEL, weights

from ds_encdec.base.types import ConfigError, DsEncDecError
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.engine.sharded_engine import StagingArea


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """Run (name, function of this file or engine_cases.py, arguments); what failed is returned as its traceback."""
    results = run_all(cases, vars(engine_cases) | globals())
    results["imported deepspeed"] = "deepspeed" in sys.modules
    return results


def compiled_trajectory(steps: int, **overrides: Any) -> dict[str, Any]:
    """`trajectory` of compiled layers, whose graphs run as they are captured: what inductor makes of them is tested
    in tests/model, and takes minutes here.
    """
    capture = partial(torch.compile, backend="aot_eager")
    with attention_of_gpus(), mock.patch.object(torch, "compile", lambda forward, options: capture(forward)):
        return trajectory(steps, **overrides)


def reloading(directory: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """What an engine holds after loading what another start of ranks has saved."""
    engine = short_engine(source=None, **overrides)
    engine.load(saved_state(Path(directory)))
    state = full_state(engine)
    rate = short_step(engine, 2)["learning_rate"]
    engine.close()
    return {"state": state, "learning_rate": rate}


def untrained_state(**overrides: Any) -> dict[str, torch.Tensor]:
    engine = short_engine(**overrides)
    tensors = {key: tensor.full_tensor() for key, tensor in engine.stage(Path(), copy=True).write.args[0].items()}
    engine.close()
    return tensors


def host_copies(directory: str, **overrides: Any) -> dict[str, str]:
    """Where the tensors of a save are, whether writing them asks for a GPU, and what is said where memory is short."""
    folder = shared_folder(directory)
    engine = short_engine(**overrides)
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


def indivisible_ranks(**overrides: Any) -> dict[str, str]:
    try:
        short_engine(**overrides)
    except ConfigError as error:
        return {"refused": str(error)}
    return {}


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
        accumulate(engine, [random_batch(seed, MODEL.vocab_size) for seed in (0, 1)])
    engine.step()
    engine.close()
    return result | {"calls": dict(counted.calls), "bytes": dict(counted.bytes)}
