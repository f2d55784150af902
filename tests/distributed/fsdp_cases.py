"""What runs inside the ranks of FSDP2 alone, without deepspeed; see engine_cases.py."""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import Case, accumulate, run_all, short_engine, short_step, trajectory
from flash_on_cpus import attention_of_gpus
from small_run import MODEL, random_batch, weights
from torch.distributed import checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.base.types import DsEncDecError
from ds_encdec.engine.staging import StagingArea


def run_cases(cases: Sequence[Case]) -> dict[str, Any]:
    """Run (name, function of this file or engine_cases.py, arguments); what failed is returned as its traceback."""
    results = run_all(cases, vars(engine_cases) | globals())
    results["imported deepspeed"] = "deepspeed" in sys.modules
    return results


def compiled_trajectory(steps: int, **overrides: Any) -> dict[str, Any]:
    """`trajectory` of compiled layers, whose graphs run as they are captured: what inductor makes of them is tested
    in tests/model, and takes minutes here."""
    capture = partial(torch.compile, backend="aot_eager")
    with attention_of_gpus(), mock.patch.object(torch, "compile", lambda forward, options: capture(forward)):
        return trajectory(steps, **overrides)


def lacking_memory(**overrides: Any) -> list[str]:
    """What each rank says when rank 1 has no memory for the copies of a save, and when it has none as it writes."""
    engine, found = short_engine(**overrides), []
    for owner, name in ((StagingArea, "_copy"), (dcp.FileSystemWriter, "write_data")):
        failing = mock.patch.object(owner, name, side_effect=MemoryError("no more"))
        with TemporaryDirectory() as folder, failing if dist.get_rank() == 1 else nullcontext():
            try:
                engine.stage(Path(folder), copy=True).write()
            except DsEncDecError as error:
                found.append(f"{type(error).__name__}: {error}")
    engine.close()
    return found


class Collectives(TorchDispatchMode):
    """Counts the collectives called inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def communication(**overrides: Any) -> dict[str, Any]:
    """Collectives of the micro-batches, two, of an optimizer step; and what a rank of this engine asks its source for,
    and holds of each parameter and moment."""
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
    return result | {"calls": dict(counted.calls)}
