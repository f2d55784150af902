"""The user's optimizer, `training.optimizer: module:name`: a `torch.optim.Optimizer`, or a function that returns one.

It is called with the parameter groups, each with its own `weight_decay`, `lr`, and `training.optimizer_args`. Engines
cut parameters anywhere, so it must step each number by that number's gradient and state alone, as AdamW, Lion and SGD
do, and Muon, LAMB and Adafactor do not. Checkpoints hold `exp_avg` and `exp_avg_sq`, shaped as the parameter and zero
at first, and a counter, `step`; it may lack any of them, and keeps nothing else, also outside its states. All of this
is tried on six numbers before the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_encdec.base.plugins import load_plugin, whose_fault
from ds_encdec.base.types import MOMENTS, ConfigError, StateKind
from ds_encdec.config.schema import TrainingConfig

_FIELD = "training.optimizer"
_tried: dict[tuple[str, str, str], KeptState] = {}


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of a parameter: names of its `moments`, and `counter`, `step` before the first step, if any."""

    moments: tuple[StateKind, ...]
    counter: Any

    def zero(self, weights: Tensor) -> dict[str, Any]:
        """Make the state of `weights` before the first step."""
        state: dict[str, Any] = {}
        if self.counter is not None:
            # Not a copy: torch's fake tensors (memory/trace.py) refuse copies of a real one.
            counter, is_tensor = self.counter, isinstance(self.counter, Tensor)
            state["step"] = torch.zeros((), dtype=counter.dtype, device=counter.device) if is_tensor else counter
        return state | {kind: torch.zeros_like(weights, requires_grad=False) for kind in self.moments}


def build(groups: list[dict[str, Any]], training: TrainingConfig, device: torch.device) -> torch.optim.Optimizer:
    """Make the optimizer of `groups`. Raises ConfigError if it is not one, or fails."""
    return _make(groups, training.optimizer, {"lr": training.learning_rate, **training.optimizer_args})


def try_optimizer(name: str, arguments: Mapping[str, Any], device: str = "cpu") -> KeptState:
    """Return the state that optimizer `name` keeps, tried once per process. ConfigError if engines cannot use it."""
    key = (name, repr(sorted(arguments.items())), device)
    if key not in _tried:
        _tried[key] = _try(name, arguments, device)
    return _tried[key]


def _try(name: str, arguments: Mapping[str, Any], device: str) -> KeptState:
    """Step six numbers: whole, in parts, and resumed from a saved state."""
    (whole,), optimizer = _stepped(name, arguments, [_numbers(device)])
    kept = _kept(name, optimizer)
    # DeepSpeed steps flat shards, FSDP2 rows of matrices.
    for cut in (_numbers(device).split([4, 2]), [_numbers(device).view(2, 3)]):
        parts, _ = _stepped(name, arguments, cut)
        if not _same(whole, torch.cat([part.flatten() for part in parts])):
            raise ConfigError(
                f"{_FIELD}={name} steps a number by others of its parameter too, or matrices by another rule, and "
                "engines cut parameters anywhere. Take one that steps each number by its own gradient and state"
            )
    (resumed,), _ = _stepped(name, arguments, [_numbers(device)], resumed_with=kept)
    if not _same(whole, resumed):
        raise ConfigError(
            f"{_FIELD}={name} steps otherwise from states that are zero at first, or in a new optimizer that is given "
            "the states of another, as in a resumed run. Begin exp_avg and exp_avg_sq as zeros, step as 0, keep "
            "nothing outside of the states, and step what is in param_groups"
        )
    return kept


def _numbers(device: str) -> Tensor:
    return torch.tensor([0.5, -1.0, 2.0, -0.25, 1.5, -3.0], device=device)


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


def _stepped(
    name: str, arguments: Mapping[str, Any], numbers: Sequence[Tensor], resumed_with: KeptState | None = None
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Step each of `numbers`, a parameter, twice. With `resumed_with`, a new optimizer steps each time, from these
    states, and is made of other parameters than it steps."""
    parameters = [nn.Parameter(part.clone()) for part in numbers]

    def new() -> torch.optim.Optimizer:
        first = [nn.Parameter(part.clone()) for part in numbers] if resumed_with is not None else parameters
        made = _make([{"params": first, "weight_decay": 0.1}], name, {"lr": 1e-3, **arguments})
        now = dict(zip(first, parameters, strict=True))
        for group in made.param_groups:  # DeepSpeed, too, puts other parameters into the groups
            group["params"] = [now[parameter] for parameter in group["params"]]
        return made

    optimizer = new()
    before = _settings(optimizer)
    if resumed_with is not None:
        optimizer.state.update({parameter: resumed_with.zero(parameter) for parameter in parameters})
    try:
        for shift in (0.2, 0.7):
            for parameter in parameters:
                parameter.grad = parameter.detach().square() - shift
            optimizer.step()
            if resumed_with is not None:
                states, optimizer = optimizer.state, new()
                optimizer.state.update(states)
    except Exception as error:
        raise ConfigError(f"{_FIELD}={name} does not step: {whose_fault(error)}") from error
    if before != _settings(optimizer):
        raise ConfigError(
            f"{_FIELD}={name} counts in its groups, which checkpoints do not hold. Keep `step` in its states"
        )
    return [parameter.detach() for parameter in parameters], optimizer


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _kept(name: str, optimizer: torch.optim.Optimizer) -> KeptState:
    """Return the state that `optimizer` keeps for its first parameter. ConfigError if checkpoints cannot hold it."""
    parameter = optimizer.param_groups[0]["params"][0]
    state = dict(optimizer.state[parameter])
    counter = state.pop("step", None)
    others = [key for key, value in state.items() if not (key in MOMENTS and _is_like(value, parameter))]
    if others or not _counts(counter):
        raise ConfigError(
            f"{_FIELD}={name} keeps {', '.join(others) or 'a step that is no number'}, and checkpoints hold exp_avg, "
            "exp_avg_sq (float32, shaped as the parameter) and a number, step. Give its states these names"
        )
    zero = torch.zeros_like(counter) if isinstance(counter, Tensor) else None if counter is None else type(counter)(0)
    return KeptState(tuple(kind for kind in MOMENTS if kind in state), zero)


def _make(groups: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    factory = load_plugin(_FIELD, name, "optimizers")
    try:
        made = factory(groups, **arguments)
    except Exception as error:  # whatever the user's code raises
        passed = ", ".join(["groups", *arguments])
        raise ConfigError(f"{_FIELD}={name} cannot be made of ({passed}): {whose_fault(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{_FIELD}={name} makes no torch.optim.Optimizer but a {type(made).__name__}")
    return made


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype)


def _counts(counter: object) -> bool:
    return counter is None or isinstance(counter, int | float) or (isinstance(counter, Tensor) and counter.ndim == 0)
