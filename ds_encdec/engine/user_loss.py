"""The user's loss, `training.loss: module:name`, which training alone optimises, and which is tried on six rows first.

It maps logits, float32 [N, vocabulary], and labels, int64 [N], to float32 [N], each by its own row alone: packing and
memory decide which tokens, and how many, one call gets. Autograd computes its gradient.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ds_encdec.base.plugins import load_plugin, whose_fault
from ds_encdec.base.types import ConfigError
from ds_encdec.model.loss import OwnLoss

_FIELD = "training.loss"


@cache
def load_loss(name: str) -> OwnLoss:
    """Import the loss `name` and try it, once per process. Raises ConfigError if it fails, or is no loss."""
    loss = load_plugin(_FIELD, name, "losses")
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 11, generator=generator), torch.arange(6)
    whole = _tried(name, loss, logits, labels)
    pieces = torch.cat([_tried(name, loss, *some) for some in zip(logits.split(4), labels.split(4), strict=True)])
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            f"{_FIELD}={name} gives a token another loss, or gradient, by the tokens beside it, which depend on the "
            "packing. Return each token's loss by its own row, without a mean over them"
        )
    return cast(OwnLoss, loss)


def _tried(name: str, loss: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of these rows beside their gradients, [N, 1 + vocabulary]."""
    leaf = logits.clone().requires_grad_()
    try:
        losses = loss(leaf, labels)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{_FIELD}={name} fails: {whose_fault(error)}") from error
    if not isinstance(losses, Tensor) or losses.shape != labels.shape or not losses.requires_grad:
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"{_FIELD}={name} returns {shape} for {len(labels)} tokens. Return one number for each, [{len(labels)}], "
            "with its gradient to the logits"
        )
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return torch.cat([losses.detach().float()[:, None], gradient], dim=1)
