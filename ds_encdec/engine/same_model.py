"""Whether a checkpoint is of the model that an engine has built."""

from __future__ import annotations

from collections.abc import Mapping

from ds_encdec.types import CheckpointError, SavedState


def check_same_model(saved: SavedState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming a difference, unless `saved` has the parameters `shapes` and no others."""
    differing = sorted(
        name for name in saved.shapes.keys() | shapes.keys() if saved.shapes.get(name) != shapes.get(name)
    )
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"the checkpoint is of another model: {name} has {_shape(saved.shapes.get(name))} there and "
            f"{_shape(shapes.get(name))} in this run's model (parameters that differ: {len(differing)})"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no counterpart" if shape is None else f"shape {list(shape)}"
