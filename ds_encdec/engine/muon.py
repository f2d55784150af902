"""Muon: the hidden matrices of a sharded model step by their orthogonalized momentum, everything else by AdamW.

Five steps of Newton and Schulz bring all singular values of the momentum near 1 (Keller Jordan,
https://kellerjordan.github.io/posts/muon/). The result is scaled as in "Muon is Scalable for LLM Training" (arXiv
2502.16982, section 2.2), so that it moves weights about as far as AdamW does, at AdamW's learning rates and weight
decay. The momentum, `exp_avg`, is the matrix's only state.

That takes whole matrices, of which each rank has some rows. Matrices of one shape are worked on in rounds of as many as
there are ranks: each rank gathers one, orthogonalizes it, and returns to every rank its rows of the result.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import sqrt
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ds_encdec.config.schema import TrainingConfig
from ds_encdec.engine.sharded_engine import compute_dtype
from ds_encdec.model.precision import product_dtype

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
"""The quintic's coefficients, which lift small singular values fastest and leave all between 0.7 and 1.2, and steps."""
_EPSILON = 1e-7


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's rows of each. Gradients must be off, or each is a node of autograd's graph."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class LocalAdamW(torch.optim.AdamW):
    """AdamW that steps this rank's rows as plain tensors: DTensor looks at each of a list's, which takes longer."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill `lists`, of parameters, gradients and states, as AdamW does."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = local_tensors(tensors)
        return has_complex


class Muon(LocalAdamW):
    """AdamW, but for groups with `is_matrix`, whose states have `exp_avg` alone. `dtype`: of products and messages."""

    def __init__(
        self, groups: list[dict[str, Any]], dtype: torch.dtype, device: torch.device, momentum: float, **of_adamw: Any
    ) -> None:
        super().__init__(groups, **of_adamw)
        self._device, self._momentum = device, momentum
        self._dtype = product_dtype(torch.empty(0, dtype=dtype, device=device))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See torch.optim.Optimizer. Collective."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group.get("is_matrix")]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("is_matrix"):
                for matrices in _rounds(one for one in group["params"] if one.grad is not None):
                    self._step_together(matrices, group)

    def _step_together(self, matrices: list[DTensor], group: dict[str, Any]) -> None:
        """One round: as many matrices of one shape as there are ranks, or fewer."""
        directions = [self._direction(matrix) for matrix in matrices]
        updates = orthogonalized_on_ranks(matrices[0], directions)
        # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side); AdamW's updates have about 0.2.
        rate = 0.2 * sqrt(max(matrices[0].shape)) * group["lr"]
        for matrix, update in zip(matrices, updates, strict=True):
            local = matrix.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.to(local.device, local.dtype), alpha=-rate)

    def _direction(self, matrix: DTensor) -> Tensor:
        """Take the gradient into the momentum; returns this rank's rows of Nesterov's look ahead."""
        gradient = cast(DTensor, matrix.grad).to_local()
        mean = self.state[matrix]["exp_avg"].to_local().lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(mean, self._momentum).to(self._device, self._dtype)


def adamw(groups: list[dict[str, Any]], training: TrainingConfig, device: torch.device) -> LocalAdamW:
    """Make AdamW for sharded parameters."""
    return LocalAdamW(groups, **_of_adamw(training))


def muon(groups: list[dict[str, Any]], training: TrainingConfig, device: torch.device) -> LocalAdamW:
    """Make Muon for sharded parameters, or AdamW where no matrix is trained."""
    if not any(group.get("is_matrix") for group in groups):
        return adamw(groups, training, device)
    return Muon(groups, compute_dtype(training), device, training.muon_momentum, **_of_adamw(training))


def _of_adamw(training: TrainingConfig) -> dict[str, Any]:
    betas = (training.adam_beta1, training.adam_beta2)
    return {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon, "fused": True}


def _rounds(matrices: Iterable[DTensor]) -> Iterator[list[DTensor]]:
    """Matrices of one shape, in groups of as many as there are ranks in their mesh."""
    for _, alike in groupby(sorted(matrices, key=lambda matrix: tuple(matrix.shape)), key=lambda matrix: matrix.shape):
        found = list(alike)
        ranks = found[0].device_mesh.size()
        yield from (found[start : start + ranks] for start in range(0, len(found), ranks))


def orthogonalized_on_ranks(like: DTensor, directions: list[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices that are sharded like `like`, each on another rank.

    `directions`: this rank's rows of each, of at most as many as there are ranks. Returns its rows of the results.
    Collective. Replicas share the matrices out among themselves, then tell each other what became of them.
    """
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
    elif mine:
        mine = [orthogonalized(mine[0])]
    if replicas == 1:
        return mine
    held = directions[0].new_zeros(shards, rows, width)
    for place, update in zip(held, mine, strict=False):
        place.copy_(update)
    gathered = held.new_empty(replicas * shards, rows, width)
    dist.all_gather_into_tensor(gathered, held, group=mesh.get_group(0))
    return list(gathered[: len(directions)])


def _exchanged(sent: Tensor, received: list[int], given: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `given` rows of `sent` to each rank of `group` in turn, and return the rows that they send."""
    out = sent.new_empty(sum(received), sent.shape[1])
    dist.all_to_all_single(out, sent.contiguous(), received, given, group=group)
    return out


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near 1, in its dtype; overwrites `matrix` [n, m]."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.div_(matrix.norm().clamp(min=_EPSILON))  # which is no smaller than the largest singular value
    x = x.T if is_tall else x
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
