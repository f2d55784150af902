"""Muon steps hidden matrices of a sharded model by their orthogonalized momentum, all other parameters by AdamW.

Newton-Schulz steps bring all singular values of the momentum, a matrix's only state, near 1 (Keller Jordan,
https://kellerjordan.github.io/posts/muon/). The result is scaled for AdamW's learning rates and weight decay (arXiv
2502.16982, section 2.2). In rounds over matrices of one shape, each rank gathers one, orthogonalizes it, and returns to
every rank its rows."""

from itertools import groupby, islice
from math import sqrt
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.sharded_engine import compute_dtype, local_part
from ds_encdec.engine.user_code import build_optimizer
from ds_encdec.model.precision import product_dtype
from ds_encdec.registry.optimizers import OPTIMIZERS

_STEPS = 5  # of the quintic, whose coefficients lift small singular values fastest and leave all in [0.7, 1.2]


class LocalAdamW(torch.optim.AdamW):
    """Steps this rank's rows as plain tensors: AdamW's operations on lists of DTensors take longer."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


class Muon(LocalAdamW):
    """Steps groups marked `is_matrix` by Muon, others by AdamW; products and messages are in `dtype`."""

    def __init__(
        self, groups: list[dict[str, Any]], dtype: torch.dtype, device: torch.device, momentum: float, **of_adamw: Any
    ) -> None:
        super().__init__(groups, **of_adamw)
        self._device, self._momentum = device, momentum
        self._dtype = product_dtype(torch.empty(0, dtype=dtype, device=device))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all groups; see torch.optim.Optimizer. Collective."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group.get("is_matrix")]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("is_matrix"):
                stepped = sorted((one for one in group["params"] if one.grad is not None), key=attrgetter("shape"))
                for _, alike in groupby(stepped, key=attrgetter("shape")):
                    while matrices := list(islice(alike, dist.get_world_size())):  # one for each rank of the mesh
                        self._step_together(matrices, group["lr"], group["weight_decay"])

    def _step_together(self, matrices: list[DTensor], lr: float, weight_decay: float) -> None:
        directions = []
        for matrix in matrices:
            gradient = cast(DTensor, matrix.grad).to_local()
            mean = self.state[matrix]["exp_avg"].to_local().lerp_(gradient, 1 - self._momentum)
            # This rank's rows of Nesterov's look-ahead.
            directions.append(gradient.lerp(mean, self._momentum).to(self._device, self._dtype))
        # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side); AdamW's updates have about 0.2.
        rate = 0.2 * sqrt(max(matrices[0].shape)) * lr
        for matrix, update in zip(matrices, _orthogonalized_on_ranks(matrices[0], directions), strict=True):
            local = matrix.to_local()
            local.mul_(1 - lr * weight_decay)
            local.add_(update.to(local.device, local.dtype), alpha=-rate)


def build_sharded(
    groups: list[dict[str, Any]], training: TrainingConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Make the optimizer of `training` for sharded parameters: AdamW for Muon, too, if no matrix is trained."""
    if training.optimizer not in OPTIMIZERS:
        return build_optimizer(groups, training)
    of_adamw: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "fused": True,
    }
    if not any(group.get("is_matrix") for group in groups):
        return LocalAdamW(groups, **of_adamw)
    return Muon(groups, compute_dtype(training), device, training.muon_momentum, **of_adamw)


def _orthogonalized_on_ranks(like: DTensor, directions: list[Tensor]) -> list[Tensor]:
    """Return this rank's rows of matrices sharded like `like`, each orthogonalized on another rank. Collective.
    `directions`: this rank's rows of each, of at most one matrix for each rank."""
    mesh, rows, (height, width) = like.device_mesh, len(directions[0]), like.shape
    shards, shard = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    replicas, replica = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
    most = -(-height // shards)  # rows are cut as torch.chunk does
    heights = [min(max(height - index * most, 0), most) for index in range(shards)]
    mine = directions[replica * shards : (replica + 1) * shards]
    if mine and shards > 1:
        owns = shard < len(mine)
        here, there = [rows * (index < len(mine)) for index in range(shards)], [count * owns for count in heights]
        group = mesh.get_group(mesh.ndim - 1)
        whole = _exchanged(torch.cat(mine), there, here, group)
        back = _exchanged(orthogonalized(whole) if owns else whole, here, there, group)
        mine = list(back.view(len(mine), rows, width))
    else:
        mine = [orthogonalized(whole) for whole in mine]
    if replicas == 1:
        return mine
    local = directions[0].new_zeros(shards, rows, width)
    for place, update in zip(local, mine, strict=False):
        place.copy_(update)
    gathered = local.new_empty(replicas * shards, rows, width)
    dist.all_gather_into_tensor(gathered, local, group=mesh.get_group(0))
    return list(gathered[: len(directions)])


def _exchanged(rows: Tensor, rows_received: list[int], rows_sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(rows_received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), rows_received, rows_sent, group=group)
    return out


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return `matrix` [n, m] with all singular values near 1, in its dtype; overwrites `matrix`."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.div_(matrix.norm().clamp(min=1e-7))  # the norm is at least the largest singular value
    x = x.T if is_tall else x
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if is_tall else x
