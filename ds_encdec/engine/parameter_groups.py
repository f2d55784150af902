"""The parameter groups of an optimizer: matrices decay, norms and biases do not."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_encdec.base.types import is_hidden_matrix


def parameter_groups(model: nn.Module, weight_decay: float, *, matrices_apart: bool = False) -> list[dict[str, Any]]:
    """Two optimizer groups, with and without weight decay, for `torch.optim` and DeepSpeed alike.

    Decided by the module a parameter belongs to and by its name, never by its shape: under ZeRO-3 every
    parameter has shape [0] until it is gathered. Each parameter appears once, also when modules share
    it; frozen ones do not appear, nor does an empty group. Embeddings decay. With
    `matrices_apart` a third group, with `is_matrix`, has the hidden matrices, which the first then lacks.
    """
    decays: dict[nn.Parameter, bool] = {}
    hidden: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                # Norms are found by class name: every family brings its own RMSNorm, and these share no base class.
                decays.setdefault(parameter, not type(module).__name__.endswith("Norm") and name != "bias")
                if matrices_apart and is_hidden_matrix(f"{path}.{name}"):
                    hidden.add(parameter)
    kinds = (
        ({"weight_decay": weight_decay}, [one for one, found in decays.items() if found and one not in hidden]),
        ({"weight_decay": 0.0}, [one for one, found in decays.items() if not found]),
        ({"weight_decay": weight_decay, "is_matrix": True}, [one for one in decays if one in hidden]),
    )
    return [{"params": parameters, **settings} for settings, parameters in kinds if parameters]
