"""The optimizer and the loss that a user wrote, `module:name`, each tried on a few numbers before the model is built.

docs/library.md lists what they must do. Engines cut parameters anywhere, and packing and memory decide which tokens one
call of the loss gets: the optimizer must step each number, and the loss treat each row, by itself. Checkpoints hold no
states but `exp_avg`, `exp_avg_sq` and `step`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_encdec.base.plugins import load_plugin, whose_fault
from ds_encdec.base.types import MOMENTS, ConfigError, StateKind
from ds_encdec.config.schema import TrainingConfig
from ds_encdec.model.loss import OwnLoss
from ds_encdec.registry.optimizers import OPTIMIZERS, row_of


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


_tried: dict[tuple[str, str, str], KeptState] = {}


def kept_state(training: TrainingConfig, device: torch.device, *, is_matrix: bool = False) -> KeptState:
    """Return the state that the optimizer of `training` keeps for a parameter; AdamW counts its steps on `device`.
    Raises ConfigError for a user's optimizer that engines cannot use."""
    if training.optimizer not in OPTIMIZERS:
        return try_optimizer(training.optimizer, training.optimizer_args, device.type)
    row = row_of(training.optimizer)
    if is_matrix:
        return KeptState(MOMENTS[: row.matrix_moments], None)
    return KeptState(MOMENTS[: row.moments], torch.zeros((), device=device))


def build_optimizer(groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
    """Make the user's optimizer of `groups`. Raises ConfigError if it is not one, or fails."""
    return _make(groups, training.optimizer, {"lr": training.learning_rate, **training.optimizer_args})


def try_optimizer(name: str, arguments: Mapping[str, Any], device: str = "cpu") -> KeptState:
    """Return the state that optimizer `name` keeps. Once per process it steps six numbers: whole, in parts, and resumed
    from a saved state. Raises ConfigError if engines cannot use it."""
    key = (name, repr(sorted(arguments.items())), device)
    if key in _tried:
        return _tried[key]
    numbers = torch.tensor([0.5, -1.0, 2.0, -0.25, 1.5, -3.0], device=device)
    (whole,), optimizer = _stepped(name, arguments, [numbers])
    kept = _kept(name, optimizer)
    for cut in (numbers.split([4, 2]), [numbers.view(2, 3)]):  # DeepSpeed steps flat shards, FSDP2 rows of matrices
        parts, _ = _stepped(name, arguments, cut)
        if not _same(whole, torch.cat([part.flatten() for part in parts])):
            raise ConfigError(
                f"training.optimizer={name} updates a number from other numbers of its parameter, or treats matrices "
                "differently. Engines split parameters anywhere: use one that updates each number from its own "
                "gradient and state"
            )
    (resumed,), _ = _stepped(name, arguments, [numbers], resumed_with=kept)
    if not _same(whole, resumed):
        raise ConfigError(
            f"training.optimizer={name} gives other results if its states start at zero, or if its saved states are "
            "loaded into a new optimizer, as on a resume. Start exp_avg, exp_avg_sq and step at 0, keep nothing "
            "outside the states, and step the parameters in param_groups"
        )
    _tried[key] = kept
    return kept


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
        raise ConfigError(f"training.optimizer={name} does not step: {whose_fault(error)}") from error
    return [parameter.detach() for parameter in parameters], optimizer


def _kept(name: str, optimizer: torch.optim.Optimizer) -> KeptState:
    parameter = optimizer.param_groups[0]["params"][0]
    state = dict(optimizer.state[parameter])
    counter, like = state.pop("step", None), (parameter.shape, parameter.dtype)
    others = [
        key
        for key, value in state.items()
        if key not in MOMENTS or not isinstance(value, Tensor) or (value.shape, value.dtype) != like
    ]
    counts = counter is None or isinstance(counter, int | float) or (isinstance(counter, Tensor) and not counter.ndim)
    if others or not counts:
        raise ConfigError(
            f"training.optimizer={name} keeps {', '.join(others) or 'a step that is not a number'}, but "
            "checkpoints hold exp_avg, exp_avg_sq (float32, shaped as the parameter) and a number, step. Give its "
            "states these names"
        )
    zero = torch.zeros_like(counter) if isinstance(counter, Tensor) else None if counter is None else type(counter)(0)
    return KeptState(tuple(kind for kind in MOMENTS if kind in state), zero)


def _make(groups: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    factory = load_plugin("training.optimizer", name, "optimizers")
    try:
        made = factory(groups, **arguments)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"training.optimizer={name} cannot be made from ({', '.join(['groups', *arguments])}): {whose_fault(error)}"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"training.optimizer={name} returns a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


@cache
def load_loss(name: str) -> OwnLoss:
    """Import the loss `name` and try it, once per process. Raises ConfigError if it fails, or is no loss."""
    loss = load_plugin("training.loss", name, "losses")
    logits, labels = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    whole = _losses(name, loss, logits, labels)
    pieces = torch.cat([_losses(name, loss, *some) for some in zip(logits.split(4), labels.split(4), strict=True)])
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            f"training.loss={name}: a token's loss, or its gradient, depends on the tokens beside it, and so on the "
            "packing. Return each token's loss by its own row, without a mean over them"
        )
    return cast(OwnLoss, loss)


def _losses(name: str, loss: Any, logits: Tensor, labels: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    try:
        losses = loss(leaf, labels)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"training.loss={name} fails: {whose_fault(error)}") from error
    if not isinstance(losses, Tensor) or losses.shape != labels.shape or not losses.requires_grad:
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"training.loss={name} returns {shape} for {len(labels)} tokens. Return one number for each, "
            f"[{len(labels)}], with its gradient to the logits"
        )
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return torch.cat([losses.detach().float()[:, None], gradient], dim=1)
