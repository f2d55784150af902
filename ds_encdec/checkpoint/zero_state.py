"""Opens the tensors of a checkpoint, and reads those in DeepSpeed's files, of any ZeRO stage, without DeepSpeed.

No code that a file names is run. The files are mapped, not read: a range costs only its own bytes. Their layout
(DeepSpeed 0.19.8, runtime/zero; compare its utils/zero_to_fp32.py):

| stage | file, one per rank from stage 1 | flat float32 tensors in it |
|---|---|---|
| 0 | `mp_rank_00_model_states.pt` | each parameter; in 16 bit its master, or one tensor with those of a group |
| 1, 2 | `*zero_pp_rank_R_…_optim_states.pt` | of each group laid end to end and cut into equal parts, part R |
| 3 | the same | of each sub-group: of every parameter, cut into equal parts with padding, part R |

Beside each are its `exp_avg` and `exp_avg_sq`, of the same length. Rank 0's model states have names and shapes, in the
order of the parameters. Frozen parameters have only weights, in the compute dtype: in rank 0's model states, or under
stage 3, cut like all parameters, in every rank's."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_encdec.base.types import MOMENTS, CheckpointError, SavedState, StateKind
from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.checkpoint.saved_state import DcpState, Fragment, FragmentedState
from ds_encdec.engine.protocol import TAG, EngineRecord, Piece, end_to_end, own_parts, read_record
from ds_encdec.registry.engines import STATE_FORMATS, ByEngine

_Tensors = Mapping[str, Tensor]  # flat tensors of one length: `weight`, and the moments if there are any
# A piece of a parameter, and the part of a file that has it at the piece's offset.
_Placed = tuple[Piece, Callable[[], _Tensors]]


class ZeroState(FragmentedState):
    """`types.SavedState` of a checkpoint that the DeepSpeed engine wrote. Its hashes were checked before."""

    def __init__(self, checkpoint: Path) -> None:
        record, folder = read_record(checkpoint), checkpoint / TAG
        with _layout_checked(folder):
            shapes, pieces = _read_layout(folder, record)
        fragments: dict[str, list[Fragment]] = {name: [] for name in shapes}
        for piece, part in pieces:
            fragments[piece.name].append(
                Fragment(piece.start, piece.start + piece.length, partial(self._copy, piece, part))
            )
        by_key = {f"{kind}.{name}": found for kind in ("weight", *MOMENTS) for name, found in fragments.items()}
        super().__init__(record, folder, shapes, by_key)

    def _copy(self, piece: Piece, part: Callable[[], _Tensors], kind: StateKind, out: Tensor, first: int) -> None:
        tensors = part()
        if kind in tensors:
            out.copy_(tensors[kind].narrow(0, piece.offset + first, len(out)))
        elif self.applied_steps > 0:
            raise CheckpointError(f"{self._folder} has no {kind} of {piece.name}")
        else:
            out.zero_()


def _read_layout(folder: Path, record: EngineRecord) -> tuple[dict[str, tuple[int, ...]], list[_Placed]]:
    stage = int(record.sharding_stage.removeprefix("zero").removesuffix("_hybrid"))
    states = _load(_model_states(folder, stage, 0))
    module: Mapping[str, Tensor] = states["module"]
    frozen = {name: tuple(shape) for name, shape in (states.get("frozen_param_shapes") or {}).items()}
    named = states["param_shapes"] if stage else [{name: module[name].shape for name in own} for own in record.groups]
    shapes = frozen | {name: tuple(shape) for group in named for name, shape in group.items()}
    groups = [{name: prod(shape) for name, shape in group.items()} for group in named]
    if stage == 0:
        pieces = _replicated(module, states["optimizer"], groups)
    else:
        pieces = (_cut_parameters if stage == 3 else _cut_groups)(_Parts(folder, stage, record.world_size), groups)
    frozen_pieces = _frozen(folder, record, stage, {name: prod(shape) for name, shape in frozen.items()})
    # The module's own dict has the model's order; a tied parameter stands in it under every name.
    return {name: shapes[name] for name in module if name in shapes}, [*pieces, *frozen_pieces]


def _model_states(folder: Path, stage: int, rank: int) -> Path:
    return folder / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt")


def _frozen(folder: Path, record: EngineRecord, stage: int, numels: Mapping[str, int]) -> Iterator[_Placed]:
    @cache  # a file is opened when one of its parameters is read
    def opened(rank: int) -> Mapping[str, Tensor]:
        path = _model_states(folder, stage, rank)
        with _layout_checked(path):
            found: Mapping[str, Tensor] = _load(path)["frozen_param_fragments"]
            return {name: found[name].reshape(-1) for name in numels}

    for rank in range(record.world_size if stage == 3 else 1):
        for name, numel in numels.items():
            pieces = own_parts({name: numel}, rank, record.world_size) if stage == 3 else end_to_end({name: numel})
            for piece in pieces:
                yield piece, lambda rank=rank, name=name: {"weight": opened(rank)[name]}  # type: ignore[misc]


class _Parts:
    """The optimizer states of all ranks, stages 1 to 3: one file per rank, opened on demand. A rank loads from few
    files. The first rank's gives the layout of all, since a group's parts have the same size: `sizes`, the elements of
    a part of each group, padding included, and `alignments`, the padding behind each parameter of each group, empty if
    they are not aligned."""

    def __init__(self, folder: Path, stage: int, world_size: int) -> None:
        self._stage, self.world_size = stage, world_size
        self._files: list[Path] = []
        paths = list(folder.iterdir())
        for rank in range(world_size):
            ending = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"  # bf16_… in bfloat16
            found = [path for path in paths if path.name.endswith(ending)]
            if len(found) != 1:
                raise CheckpointError(f"{folder}: {len(found)} files of optimizer states of rank {rank}, not one")
            self._files += found
        self._opened = {0: self._open(0)}

    def part(self, rank: int, group: int) -> _Tensors:
        """Return rank `rank`'s part of a group. Raises CheckpointError."""
        if rank not in self._opened:
            with _layout_checked(self._files[rank]):
                self._opened[rank] = self._open(rank)
        return self._opened[rank][group]

    def _open(self, rank: int) -> list[_Tensors]:
        states = _load(self._files[rank])["optimizer_state_dict"]
        if self._stage == 3:
            weights, base = states["fp32_flat_groups"], states["optimizer_state_dict"]
        else:
            weights, base = states["single_partition_of_fp32_groups"], states["base_optimizer_state"]
        # Otherwise parts are saved with their padding: in stage 3, and by BF16_Optimizer, which has no "zero_stage".
        is_cut = self._stage < 3 and "zero_stage" in states
        paddings = states["group_paddings"] if is_cut else [0] * len(weights)
        sizes = [weight.numel() + padding for weight, padding in zip(weights, paddings, strict=True)]
        if rank == 0:
            self.sizes, self.alignments = sizes, states.get("param_alignment_paddings") or [[] for _ in sizes]
        if sizes != self.sizes:
            raise ValueError(f"parts of {sizes} elements, and of {self.sizes} on rank 0")
        return [{"weight": weight} | moments for weight, moments in zip(weights, _moments(base), strict=True)]


@contextmanager
def _layout_checked(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: not laid out as DeepSpeed 0.19 does it ({error!r})") from None


def _replicated(
    module: Mapping[str, Tensor], optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, int]]
) -> Iterator[_Placed]:
    """Stage 0: everything in full. `optimizer`: torch's state dict, in 16 bit inside that of DeepSpeed's wrapper."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    if "fp32_groups_flat" in optimizer:  # FP16_Optimizer
        weights, held = list(optimizer["fp32_groups_flat"]), groups
    else:
        masters = (
            chain.from_iterable(optimizer["fp32_groups"])
            if "fp32_groups" in optimizer
            else map(module.get, chain.from_iterable(groups))
        )
        weights, held = list(masters), [{name: numel} for group in groups for name, numel in group.items()]
    for weight, moments, within in zip(weights, _moments(base), held, strict=True):
        tensors = {"weight": weight.reshape(-1)} | {kind: moment.reshape(-1) for kind, moment in moments.items()}
        for piece in end_to_end(within):
            yield piece, partial(dict, tensors)


def _cut_groups(parts: _Parts, groups: Sequence[Mapping[str, int]]) -> Iterator[_Placed]:
    # Stages 1 and 2 cut also inside parameters.
    for index, (numels, size, alignment) in enumerate(zip(groups, parts.sizes, parts.alignments, strict=True)):
        for whole in end_to_end(numels, alignment):
            begin, end = whole.offset, min(whole.offset + whole.length, parts.world_size * size)
            for rank in range(begin // size, -(-end // size)):
                first, last = max(begin, rank * size), min(end, (rank + 1) * size)
                yield (
                    Piece(whole.name, first - begin, last - first, first - rank * size),
                    partial(parts.part, rank, index),
                )


def _cut_parameters(parts: _Parts, groups: Sequence[Mapping[str, int]]) -> Iterator[_Placed]:
    return (
        (piece, partial(parts.part, rank, index))
        for index, (numels, _) in enumerate(zip(groups, parts.sizes, strict=True))
        for rank in range(parts.world_size)
        for piece in own_parts(numels, rank, parts.world_size)
    )


def _moments(base: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    # Of each of the optimizer's tensors, in its order; empty for one that was never stepped.
    states = (base["state"].get(number, {}) for group in base["param_groups"] for number in group["params"])
    return [{kind: state[kind] for kind in MOMENTS if kind in state} for state in states]


class _Inert:
    """Replaces DeepSpeed's classes, and `getattr`, by which Python 3.11.2 and its neighbours pickle enumerations."""

    def __new__(cls, *arguments: object) -> Self:
        return super().__new__(cls)


def _load(path: Path) -> Any:
    """Load a file of `torch.save` with mapped tensors, running only torch's own rebuilding of tensors."""
    try:
        if any(entry.compress_type for entry in ZipFile(path).infolist()):  # a small file could fill the memory
            raise ValueError("it is compressed, which torch.save never does")
        foreign = get_unsafe_globals_in_checkpoint(path)
        if refused := [name for name in foreign if not name.startswith("deepspeed.") and name != "builtins.getattr"]:
            raise CheckpointError(
                f"{path}: names {', '.join(refused)}, which DeepSpeed does not save. It was not opened."
            )
        with safe_globals([(_Inert, name) for name in foreign]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, BadZipFile, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


_READERS: ByEngine[Callable[[Path], SavedState]] = ByEngine(deepspeed=ZeroState, fsdp=DcpState)


def open_saved_state(checkpoint: Path, *, verified: bool = False) -> SavedState:
    """Open the weights and optimizer state in a committed checkpoint, whose files are hashed first unless `verified`.
    Opening unpickles some. Raises CheckpointError, naming the file, for damage or an unknown format."""
    if not verified:
        verify_checkpoint(checkpoint)
    written_as = read_record(checkpoint).format
    if written_as not in STATE_FORMATS:
        raise CheckpointError(f"{checkpoint}: engine.json names an unknown format, {written_as!r}.")
    return _READERS[STATE_FORMATS[written_as].name](checkpoint)
