"""The tensors of a checkpoint, whichever engine wrote them, read by ranges of elements and without that engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.engine.record import EngineRecord, read_record
from ds_encdec.engines import STATE_FORMATS, load
from ds_encdec.types import CheckpointError, SavedState, StateKind, WeightSource


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of a flattened tensor.

    `copy(kind, out, first)` fills `out` with those of the tensor of that kind from the fragment's element `first` on.
    """

    start: int
    stop: int
    copy: Callable[[StateKind, Tensor, int], None]


class FragmentedState:
    """`types.SavedState` over `folder`, whose tensors lie in fragments, those of `KIND.NAME` in any order."""

    def __init__(
        self,
        record: EngineRecord,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        fragments: Mapping[str, list[Fragment]],
    ) -> None:
        """Raises CheckpointError where fragments of one tensor do not cover it, each element once."""
        self.applied_steps = record.applied_steps
        self.loss_scaler: Mapping[str, float | int] | None = record.loss_scaler
        self.shapes = shapes
        self._folder = folder
        self._fragments = {key: sorted(found, key=lambda one: one.start) for key, found in fragments.items()}
        for key, found in self._fragments.items():
            numel = prod(shapes.get(key.partition(".")[2], ()))
            starts, stops = [one.start for one in found], [one.stop for one in found]
            for start, reached in zip([*starts, numel], [0, *stops], strict=True):
                if start != reached:
                    raise CheckpointError(f"{folder}: of {key} only {reached} of {numel} elements are there, each once")

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """See types.SavedState."""
        fragments = self._fragments.get(f"{kind}.{name}")
        if fragments is None:
            raise CheckpointError(
                f"{self._folder} has no {kind} of a parameter {name!r}; it was made by another architecture."
            )
        stop = fragments[-1].stop if stop is None else stop
        out = torch.empty(stop - start)
        for fragment in fragments[bisect_right(fragments, start, key=lambda one: one.start) - 1 :]:
            first, last = max(start, fragment.start), min(stop, fragment.stop)
            if first >= last:
                break
            fragment.copy(kind, out[first - start : last - start], first - fragment.start)
        return out


def open_saved_state(checkpoint: Path, *, verified: bool = False) -> SavedState:
    """The weights and AdamW state in a committed checkpoint.

    All its files are hashed first, because opening unpickles some; `verified` says that the caller did that. Raises
    CheckpointError, naming the file, for a checkpoint that is damaged or of an unknown format.
    """
    if not verified:
        verify_checkpoint(checkpoint)
    written_as = read_record(checkpoint).format
    if written_as not in STATE_FORMATS:
        raise CheckpointError(f"{checkpoint}: engine.json names an unknown format, {written_as!r}.")
    state: SavedState = load(STATE_FORMATS[written_as].state_reader)(checkpoint)
    return state


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
