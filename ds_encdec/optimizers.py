"""The optimizers: a row of facts for each, by which the configuration, the engines and the memory estimate go.

Any other name is `module:name`, an optimizer of the user's own; engine/user_optimizer.py says what it must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_encdec.engines import load


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    `moments`: how many of `types.MOMENTS` it keeps for each trained parameter. `matrix_moments`: how many for a matrix
    of a layer (`types.is_hidden_matrix`), where it steps these otherwise, in a group of parameters with `is_matrix`;
    None: as all others. `build`: dotted name of (groups, TrainingConfig, device) → torch.optim.Optimizer.
    `not_deepspeeds`: why DeepSpeed cannot have this optimizer, and what to set instead; empty where it can.
    """

    name: str
    title: str
    build: str
    moments: int = 2
    matrix_moments: int | None = None
    not_deepspeeds: str = ""


OPTIMIZERS: dict[str, OptimizerRow] = {
    row.name: row
    for row in (
        OptimizerRow("adamw", "AdamW", build="ds_encdec.engine.muon:adamw"),
        OptimizerRow(
            "muon",
            "Muon",
            build="ds_encdec.engine.muon:muon",
            matrix_moments=1,
            not_deepspeeds="DeepSpeed's Muon orthogonalizes gradients before their norm is taken, so that clipping and "
            "monitors would act on other numbers: set distributed_type=fsdp or ddp, or optimizer=adamw",
        ),
    )
}

_USERS = OptimizerRow("module:name", "an optimizer of your own", build="ds_encdec.engine.user_optimizer:build")
_TRY = "ds_encdec.engine.user_optimizer:try_optimizer"
_tried: dict[tuple[str, str, str], Any] = {}


def row_of(name: str) -> OptimizerRow:
    """The row of `training.optimizer`; one row stands for all optimizers of users, however many moments they keep."""
    return OPTIMIZERS.get(name, _USERS)


def tried(name: str, arguments: Mapping[str, Any], device: str = "cpu") -> Any:
    """Try an optimizer of the user's own, once for all who ask; returns its engine.kept_state.KeptState.

    Imports torch. Raises ConfigError for one that engines cannot have.
    """
    key = (name, repr(sorted(arguments.items())), device)
    if key not in _tried:
        _tried[key] = load(_TRY)(name, arguments, device)
    return _tried[key]


def moments_kept(name: str, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many moments are kept for each parameter but the layers' matrices, and how many for these.

    An optimizer of the user's own is tried for it.
    """
    row = row_of(name)
    moments = row.moments if name in OPTIMIZERS else len(tried(name, arguments).moments)
    return moments, moments if row.matrix_moments is None else row.matrix_moments
