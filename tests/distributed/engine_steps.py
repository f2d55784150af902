"""What the cases of every engine share inside the ranks: running them by name, and one optimizer step."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from small_run import ACCUMULATION, lane_batches
from torch.utils._python_dispatch import TorchDispatchMode

from ds_encdec.base.types import Batch, LossSum, StepResult
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import Engine, Veto
from ds_encdec.engine.sharded_engine import compute_dtype, unsharded_copy
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

Case = tuple[str, str, dict[str, Any]]
"""Name, function, arguments."""


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


def train_on(
    engine: Any, mine: Sequence[Batch], target_tokens: int, veto: Veto | None = None, poison: bool = False
) -> tuple[float, StepResult]:
    """One optimizer step of an engine, or of the oracle, on the lanes of a rank; the sum of their losses, NaN with
    `poison`."""
    total = 0.0
    for index, batch in enumerate(mine):
        loss = engine.forward(batch)
        total += float(loss.total.detach())
        if poison:
            loss = LossSum(loss.total * float("nan"), loss.by_denoiser, loss.tokens_by_denoiser)
        engine.backward(loss, target_tokens=target_tokens, last=index == len(mine) - 1)
    return total, engine.step(veto)


def train_step(
    engine: Engine, step: int, accumulation: int = ACCUMULATION, veto: Veto | None = None, poison: bool = False
) -> dict[str, Any]:
    """One optimizer step on the lanes of this rank. `poison` makes one rank's loss NaN."""
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


class Collectives(TorchDispatchMode):
    """Counts the collectives called inside, by name, and the bytes of the tensors that they gather or reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            self.calls[name] += 1
            self.bytes[name] += max(
                sum(tensor.nbytes for tensor in (argument if isinstance(argument, list) else [argument]))
                for argument in args
                if isinstance(argument, torch.Tensor | list)
            )
        return func(*args, **(kwargs or {}))


def skipping_steps(step: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps 0 to 3, one that is vetoed after the second and one without a finite gradient after the third."""
    given = [(0, {}), (1, {}), (98, {"veto": lambda norm: True}), (2, {}), (99, {"poison": True}), (3, {})]
    return [step(number, **how) for number, how in given]


def copied_weights(engine: Any, config: FullConfig, model_config: Qwen3Seq2SeqConfig) -> dict[str, torch.Tensor]:
    """The weights of a plain copy of the engine's model, for which no random number is drawn."""
    drawn = torch.get_rng_state()
    copy = unsharded_copy(engine, model_config, compute_dtype(config.training), HostCollectives())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert copy.lm_head.weight is copy.shared.weight
    return {name: parameter.detach().clone() for name, parameter in copy.named_parameters()}
