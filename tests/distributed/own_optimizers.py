"""An optimizer of a user's own, as `training.optimizer: own_optimizers:Momentum` finds it in a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Momentum(torch.optim.Optimizer):
    """Steps by the mean of gradients: one moment, a counter that is a number, decoupled weight decay."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter))
                state["step"] += 1
                mean: Tensor = state["exp_avg"].lerp_(parameter.grad, 1 - self.beta)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean, alpha=-group["lr"] / (1 - self.beta ** state["step"]))
