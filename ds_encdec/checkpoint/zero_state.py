"""The weights and AdamW state in DeepSpeed's own files, whatever ZeRO stage and number of ranks wrote them.

Nothing of DeepSpeed is needed, and nothing that a file names is run. The files are mapped, not read: a range costs its
own bytes. Where things stand in them (DeepSpeed 0.19.8, runtime/zero; compare its utils/zero_to_fp32.py):

| stage | file, one per rank from stage 1 | flat float32 tensors in it |
|---|---|---|
| 0 | `mp_rank_00_model_states.pt` | each parameter; in 16 bit its master, or one tensor with those of a group |
| 1, 2 | `*zero_pp_rank_R_…_optim_states.pt` | of each group laid end to end and cut into equal parts, part R |
| 3 | the same | of each sub-group: of every parameter, cut into equal parts with padding, part R |

Beside each stand its `exp_avg` and `exp_avg_sq`, of the same length. Names and shapes, in the order in which the
parameters were laid out, are in the model states of rank 0.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_encdec.engine.record import TAG, EngineRecord, read_record
from ds_encdec.types import CheckpointError, StateKind

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fragment:
    """Elements [start, start + length) of a parameter: from `offset` on in each of the flat `tensors`."""

    start: int
    length: int
    tensors: Mapping[str, Tensor]
    offset: int


class ZeroState:
    """`types.SavedState` of a checkpoint that the DeepSpeed engine wrote. Its hashes were checked before."""

    def __init__(self, checkpoint: Path) -> None:
        """Map the files. Raises CheckpointError, naming the file, for one that is missing or of another layout."""
        record = read_record(checkpoint)
        self.applied_steps = record.applied_steps
        self.loss_scaler: Mapping[str, float | int] | None = record.loss_scaler
        self.shapes: Mapping[str, _Shape]
        self._folder = checkpoint / TAG
        try:
            self.shapes, found = _read_layout(self._folder, record)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{self._folder}: not laid out as DeepSpeed 0.19 does it ({error!r})") from None
        self._fragments: dict[str, list[_Fragment]] = {name: [] for name in self.shapes}
        for name, fragment in found:
            self._fragments[name].append(fragment)
        self._check_coverage()

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """See types.SavedState. Moments before the first step are zeros."""
        if name not in self.shapes:
            raise CheckpointError(f"{self._folder} has no parameter {name!r}; it was made by another architecture.")
        stop = prod(self.shapes[name]) if stop is None else stop
        values = torch.zeros(stop - start)
        for fragment in self._fragments[name]:
            first, last = max(start, fragment.start), min(stop, fragment.start + fragment.length)
            if first >= last:
                continue
            if kind in fragment.tensors:
                source = fragment.tensors[kind].narrow(0, fragment.offset + first - fragment.start, last - first)
                values[first - start : last - start] = source
            elif self.applied_steps > 0:
                raise CheckpointError(f"{self._folder} has no {kind} of {name}")
        return values

    def _check_coverage(self) -> None:
        for name, shape in self.shapes.items():
            fragments = sorted(self._fragments[name], key=lambda fragment: fragment.start)
            reached = 0
            for fragment in fragments:
                if fragment.start != reached:
                    break
                reached += fragment.length
            if reached != prod(shape):
                raise CheckpointError(f"{self._folder}: of {name} only {reached} of {prod(shape)} elements are there")


def _read_layout(folder: Path, record: EngineRecord) -> tuple[dict[str, _Shape], list[tuple[str, _Fragment]]]:
    """The shapes in the model's order, and where the elements of each parameter are."""
    stage = int(record.sharding_stage.removeprefix("zero").removesuffix("_hybrid"))
    states = _load(folder / ("zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt"))
    module: Mapping[str, Tensor] = states["module"]
    if stage == 0:
        groups = [{name: tuple(module[name].shape) for name in names} for names in record.groups]
        fragments = list(_replicated(module, states["optimizer"], groups))
    else:
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in states["param_shapes"]]
        cut = _cut_parameters if stage == 3 else _cut_groups
        fragments = [
            fragment
            for rank in range(record.world_size)
            for fragment in cut(_optimizer_states(folder, rank), groups, rank, record.world_size)
        ]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    # The module's own dict has the model's order; a tied parameter stands in it under every name.
    return {name: shapes[name] for name in module if name in shapes}, fragments


def _replicated(
    module: Mapping[str, Tensor], optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, _Shape]]
) -> Iterator[tuple[str, _Fragment]]:
    """Stage 0: everything in full. `optimizer`: torch's state dict, in 16 bit inside that of DeepSpeed's wrapper."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    names = [name for group in groups for name in group]
    if "fp32_groups_flat" in optimizer:  # FP16_Optimizer
        weights, held = list(optimizer["fp32_groups_flat"]), groups
    else:
        masters = (
            chain.from_iterable(optimizer["fp32_groups"]) if "fp32_groups" in optimizer else map(module.get, names)
        )
        weights, held = list(masters), [{name: shape} for group in groups for name, shape in group.items()]
    for weight, moments, within in zip(weights, _moments(base), held, strict=True):
        tensors = {"weight": weight.reshape(-1)} | {kind: moment.reshape(-1) for kind, moment in moments.items()}
        for name, begin, numel in _laid_out(within):
            yield name, _Fragment(0, numel, tensors, begin)


def _cut_groups(
    states: Mapping[str, Any], groups: Sequence[Mapping[str, _Shape]], rank: int, world_size: int
) -> Iterator[tuple[str, _Fragment]]:
    """Stages 1 and 2: a group's parameters end to end, cut into `world_size` parts regardless of where one begins."""
    weights = states["single_partition_of_fp32_groups"]
    # BF16_Optimizer, which has no "zero_stage", saves its parts with their padding at the end, and never aligns.
    paddings = states["group_paddings"] if "zero_stage" in states else [0] * len(groups)
    alignments = states.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    parts = zip(weights, _moments(states["base_optimizer_state"]), paddings, groups, alignments, strict=True)
    for weight, moments, padding, group, alignment in parts:
        size = weight.numel() + padding
        for name, begin, numel in _laid_out(group, alignment):
            first, last = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
            if first < last:
                yield name, _Fragment(first - begin, last - first, {"weight": weight} | moments, first - rank * size)


def _cut_parameters(
    states: Mapping[str, Any], groups: Sequence[Mapping[str, _Shape]], rank: int, world_size: int
) -> Iterator[tuple[str, _Fragment]]:
    """Stage 3: each parameter cut into equal parts, the last ones padded; part `rank` of each, end to end."""
    parts = zip(states["fp32_flat_groups"], _moments(states["optimizer_state_dict"]), groups, strict=True)
    for weight, moments, group in parts:
        offset = 0
        for name, _, numel in _laid_out(group):
            size = -(-numel // world_size)
            start = min(rank * size, numel)
            yield name, _Fragment(start, min(size, numel - start), {"weight": weight} | moments, offset)
            offset += size


def _laid_out(group: Mapping[str, _Shape], paddings: Sequence[int] = ()) -> Iterator[tuple[str, int, int]]:
    """Name, offset and number of elements of parameters laid end to end, each with its padding behind it."""
    offset = 0
    for index, (name, shape) in enumerate(group.items()):
        yield name, offset, prod(shape)
        offset += prod(shape) + (paddings[index] if paddings else 0)


def _moments(base: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Adam's two moments of each of the optimizer's tensors, in its order; nothing of one that was never stepped."""
    states = (base["state"].get(number, {}) for group in base["param_groups"] for number in group["params"])
    return [{kind: state[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in state} for state in states]


def _optimizer_states(folder: Path, rank: int) -> Mapping[str, Any]:
    found = list(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))  # bf16_… in bfloat16
    if len(found) != 1:
        raise CheckpointError(f"{folder}: {len(found)} files of optimizer states of rank {rank}, instead of one")
    states: Mapping[str, Any] = _load(found[0])["optimizer_state_dict"]
    return states


class _Inert:
    """Stands in for DeepSpeed's own classes (loss scalers, enumerations, addresses) when a file is opened."""

    def __new__(cls, *arguments: object) -> _Inert:
        """Take whatever the class itself would; keep nothing."""
        return super().__new__(cls)


def _load(path: Path) -> Any:
    """The content of a file of `torch.save`, its tensors mapped. Runs nothing but torch's own rebuilding of tensors."""
    try:
        foreign = get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in foreign if not name.startswith("deepspeed.")]
        if refused:
            raise CheckpointError(
                f"{path}: names {', '.join(refused)}, which DeepSpeed does not save. It was not opened."
            )
        with safe_globals([(_Inert, name) for name in foreign]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
