"""An optimizer of the user's own, `training.optimizer: module:name`.

It is a subclass of `torch.optim.Optimizer`, or a function that returns one, and is called with the groups of
parameters, `lr`, and what `training.optimizer_args` names; each group has its own `weight_decay`. Engines cut
parameters anywhere, so each number must be stepped by its own gradient and state alone, as AdamW, Lion and SGD do it,
and Muon, LAMB and Adafactor do not. Of what it keeps for a parameter, checkpoints hold `exp_avg` and `exp_avg_sq`,
shaped as the parameter, and a counter, `step`; it may do without any of them, and keeps nothing else.

All of this is tried on six numbers before the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.kept_state import KeptState
from ds_encdec.plugins import load_plugin, whose_fault
from ds_encdec.types import MOMENTS, ConfigError

_FIELD = "training.optimizer"


def build(groups: list[dict[str, Any]], training: TrainingConfig, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimizer of `groups`. Raises ConfigError where it is not one, or fails."""
    return _make(groups, training.optimizer, {"lr": training.learning_rate, **training.optimizer_args})


def try_optimizer(name: str, arguments: Mapping[str, Any], device: str) -> KeptState:
    """Step six numbers on `device` with the optimizer `name`. Raises ConfigError for one that engines cannot have."""
    whole, kept = _stepped(name, arguments, device, [6])
    pieces, _ = _stepped(name, arguments, device, [4, 2])
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7, equal_nan=True):
        raise ConfigError(
            f"{_FIELD}={name} steps a number by others of its parameter too, and engines cut parameters anywhere. Take "
            "one that steps each number by its own gradient and state"
        )
    return kept


def _stepped(name: str, arguments: Mapping[str, Any], device: str, sizes: list[int]) -> tuple[Tensor, KeptState]:
    """Six numbers after two steps, as parameters of `sizes`; and what is kept for the first of these."""
    numbers = torch.tensor([0.5, -1.0, 2.0, -0.25, 1.5, -3.0], device=device)
    parameters = [nn.Parameter(part.clone()) for part in numbers.split(sizes)]
    optimizer = _make([{"params": parameters, "weight_decay": 0.1}], name, {"lr": 1e-3, **arguments})
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        for shift in (0.2, 0.7):
            for parameter in parameters:
                parameter.grad = parameter.detach().square() - shift
            optimizer.step()
    except Exception as error:
        raise ConfigError(f"{_FIELD}={name} does not step: {whose_fault(error)}") from error
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if before != after:
        raise ConfigError(
            f"{_FIELD}={name} counts in its groups, which checkpoints do not hold. Keep `step` in its states"
        )
    state = dict(optimizer.state[parameters[0]])
    counter = state.pop("step", None)
    others = [key for key, value in state.items() if not (key in MOMENTS and _is_like(value, parameters[0]))]
    if others or not _counts(counter):
        raise ConfigError(
            f"{_FIELD}={name} keeps {', '.join(others) or 'a step that is no number'}, and checkpoints hold exp_avg, "
            "exp_avg_sq (float32, shaped as the parameter) and a number, step. Give its states these names"
        )
    zero = torch.zeros_like(counter) if isinstance(counter, Tensor) else None if counter is None else type(counter)(0)
    kept = KeptState(tuple(kind for kind in MOMENTS if kind in state), zero)
    return torch.cat([parameter.detach() for parameter in parameters]), kept


def _make(groups: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    factory = load_plugin(_FIELD, name, "optimizers")
    try:
        made = factory(groups, **arguments)
    except Exception as error:  # whatever the user's code raises
        given = ", ".join(["groups", *arguments])
        raise ConfigError(f"{_FIELD}={name} cannot be made of ({given}): {whose_fault(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{_FIELD}={name} makes no torch.optim.Optimizer but a {type(made).__name__}")
    return made


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype)


def _counts(counter: object) -> bool:
    return counter is None or isinstance(counter, int | float) or (isinstance(counter, Tensor) and counter.ndim == 0)
