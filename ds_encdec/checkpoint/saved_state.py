"""Open the tensors of a checkpoint, whichever engine wrote them, without that engine."""

from __future__ import annotations

from math import prod
from pathlib import Path

from torch import Tensor

from ds_encdec.checkpoint.dcp_state import DcpState
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.checkpoint.zero_state import ZeroState
from ds_encdec.engine.record import read_record
from ds_encdec.types import CheckpointError, SavedState, WeightSource


def open_saved_state(checkpoint: Path, *, verified: bool = False) -> SavedState:
    """The weights and AdamW state in a committed checkpoint.

    All its files are hashed first, because opening unpickles some; `verified` says that the caller did that. Raises
    CheckpointError, naming the file, for a checkpoint that is damaged or of an unknown format.
    """
    if not verified:
        verify_checkpoint(checkpoint)
    match read_record(checkpoint).format:
        case "deepspeed":
            return ZeroState(checkpoint)
        case "dcp":
            return DcpState(checkpoint)
        case unknown:
            raise CheckpointError(f"{checkpoint}: engine.json names an unknown format, {unknown!r}.")


def saved_weights(saved: SavedState) -> WeightSource:
    """The float32 weights of `saved`, each read when it is asked for. Raises CheckpointError for one it has not."""

    def lookup(name: str, rows: slice = slice(None), /) -> Tensor:
        if name not in saved.shapes:
            raise CheckpointError(f"The checkpoint has no parameter {name!r}; it was made by another architecture.")
        length, *rest = saved.shapes[name]
        first, last, _ = rows.indices(length)
        row = prod(rest)
        return saved.read("weight", name, first * row, last * row).view(last - first, *rest)

    return lookup
