"""The optimizers: a row of facts for each, by which the configuration, the engines and the memory estimate go.

Any other name is `module:name`, the user's own optimizer; engine/user_optimizer.py says what it must be.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    `moments`: how many of `types.MOMENTS` it keeps for each trained parameter. `matrix_moments`: how many for a matrix
    of a layer (`types.is_hidden_matrix`), where it steps these otherwise, in a group of parameters with `is_matrix`;
    None: as all others. `not_deepspeeds`: why DeepSpeed cannot have this optimizer, and what to set instead; empty
    where it can.
    """

    name: str
    moments: int = 2
    matrix_moments: int | None = None
    not_deepspeeds: str = ""


OPTIMIZERS: dict[str, OptimizerRow] = {
    row.name: row
    for row in (
        OptimizerRow("adamw"),
        OptimizerRow(
            "muon",
            matrix_moments=1,
            not_deepspeeds="DeepSpeed's Muon orthogonalizes gradients before their norm is taken, so that clipping and "
            "monitors would act on other numbers: set distributed_type=fsdp or ddp, or optimizer=adamw",
        ),
    )
}


def row_of(name: str) -> OptimizerRow:
    """The row of `training.optimizer`; one row stands for all optimizers of users, however many moments they keep."""
    return OPTIMIZERS.get(name, OptimizerRow("module:name"))
