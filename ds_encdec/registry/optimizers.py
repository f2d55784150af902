"""Lists the optimizers, a row of facts each, for the configuration, the engines and the memory estimate. Any other name
is `module:name`, the user's own optimizer; engine/user_code.py has its requirements."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer. `moments`: how many of `types.MOMENTS` it keeps for each trained parameter; `matrix_moments`: for
    a layer's matrix, if it steps these differently, in a parameter group with `is_matrix`. `not_deepspeeds`: why
    DeepSpeed cannot use it, and the setting to take instead; empty if it can."""

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
    """Return the row of `training.optimizer`; one row stands for all users' optimizers, whatever they keep."""
    return OPTIMIZERS.get(name, OptimizerRow("module:name"))
