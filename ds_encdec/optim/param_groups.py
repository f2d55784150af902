"""Which parameters decay: matrices do, norms and biases do not."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, with and without weight decay, for `torch.optim` and DeepSpeed alike.

    Decided by the module a parameter belongs to and by its name, never by its shape: under ZeRO-3 every
    parameter has shape [0] until it is gathered. Each parameter appears once, also when modules share
    it; frozen ones do not appear, nor does an empty group. Embeddings decay.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            # By class name: every model family brings its own RMSNorm, none of which share a base class.
            decays = not type(module).__name__.endswith("Norm") and name != "bias"
            (decay if decays else no_decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
