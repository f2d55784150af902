"""The parameter groups of an optimizer: matrices decay, norms and biases do not."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_encdec.base.types import is_hidden_matrix


def parameter_groups(model: nn.Module, weight_decay: float, *, matrices_apart: bool = False) -> list[dict[str, Any]]:
    """Return the optimizer's groups: with and without weight decay and, if `matrices_apart`, hidden matrices, marked
    `is_matrix`. A parameter's module and name decide, never its shape, under ZeRO-3 [0] until it is gathered.
    Embeddings decay, shared parameters appear once, and frozen ones and empty groups are left out."""
    decays: dict[nn.Parameter, bool] = {}
    hidden: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                # Norms are known by class name: every model family has its own RMSNorm, without a common base class.
                decays.setdefault(parameter, not type(module).__name__.endswith("Norm") and name != "bias")
                if matrices_apart and is_hidden_matrix(f"{path}.{name}"):
                    hidden.add(parameter)
    kinds = (
        ({"weight_decay": weight_decay}, [one for one, decay in decays.items() if decay and one not in hidden]),
        ({"weight_decay": 0.0}, [one for one, decay in decays.items() if not decay]),
        ({"weight_decay": weight_decay, "is_matrix": True}, [one for one in decays if one in hidden]),
    )
    return [{"params": parameters, **settings} for settings, parameters in kinds if parameters]
