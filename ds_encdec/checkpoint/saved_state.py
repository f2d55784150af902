"""The tensors of a checkpoint, whichever engine wrote them, read by ranges of elements and without that engine.

torch.distributed.checkpoint's files are read here on one rank and without a process group. `dcp/.metadata` is a pickle,
of which only the few plain classes that DCP itself puts there are let in. It lists every tensor as *chunks*, each a
block of the full tensor, and where in which `.distcp` file each lies. A chunk is what `torch.save` writes: a zip
archive whose entry `…/data/0` is the tensor's memory, stored as it is. torch's own reader loads whole chunks; here only
the bytes of the range are read, straight into the result, so that many ranks can share what few have written.

DeepSpeed's own files may be of any ZeRO stage and number of ranks. Nothing of DeepSpeed is needed, and nothing that a
file names is run. The files are mapped, not read: a range costs its own bytes. Where things stand in them (DeepSpeed
0.19.8, runtime/zero; compare its utils/zero_to_fp32.py):

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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import Enum
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _ReaderView
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_encdec.checkpoint.manifest import verify_checkpoint
from ds_encdec.engine.protocol import DCP_FOLDER, TAG, EngineRecord, Piece, end_to_end, own_parts, read_record
from ds_encdec.engines import STATE_FORMATS, load
from ds_encdec.types import MOMENTS, CheckpointError, SavedState, StateKind, WeightSource

_Chunk = tuple[Path, int, int, int]
"""The file of a chunk's archive, its first byte there, its size in bytes, and the number of its elements."""
_Tensors = Mapping[str, Tensor]
"""Flat tensors of one length that belong together: `weight`, and the moments where there are any."""
_Placed = tuple[Piece, Callable[[], _Tensors]]
"""A piece of a parameter, and the part of a file in which it begins at its offset."""


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
    return cast(SavedState, load(STATE_FORMATS[written_as].state_reader)(checkpoint))


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


class DcpState(FragmentedState):
    """`types.SavedState` over `dcp/` in a verified checkpoint. Raises CheckpointError for any other files."""

    def __init__(self, checkpoint: Path) -> None:
        folder = checkpoint / DCP_FOLDER
        path = folder / ".metadata"
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # an unpickler raises anything
            raise CheckpointError(f"{path} is not readable: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not the metadata of a checkpoint.")
        tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._data_offset = cache(_data_offset)  # until a chunk is read again, its archive need not be opened again
        fragments = {key: self._fragments_of(folder, key, tensor, metadata) for key, tensor in tensors.items()}
        # The planner's table keeps the order of the state dict that was saved; the other goes by the ranks that wrote.
        shapes = {
            key.removeprefix("weight."): tuple(tensors[key].size)
            for key in metadata.planner_data or tensors
            if key.startswith("weight.")
        }
        super().__init__(read_record(checkpoint), folder, shapes, fragments)

    def _fragments_of(
        self, folder: Path, key: str, tensor: TensorStorageMetadata, metadata: Metadata
    ) -> list[Fragment]:
        """The chunks of one tensor; empty ones (ranks without a row) are left out."""
        if tensor.properties.dtype != torch.float32:
            raise CheckpointError(f"{folder}: {key} is {tensor.properties.dtype}, not float32.")
        found = []
        for block in tensor.chunks:
            if (numel := prod(block.sizes)) == 0:
                continue
            if block.sizes[1:] != tensor.size[1:]:
                raise CheckpointError(f"{folder}: {key} is cut along other dimensions than its first.")
            place: Any = metadata.storage_data[MetadataIndex(key, block.offsets)]
            if Path(place.relative_path).name != place.relative_path:
                raise CheckpointError(
                    f"{folder / '.metadata'} names a file outside its folder: {place.relative_path!r}."
                )
            chunk = (folder / place.relative_path, place.offset, place.length, numel)
            start = block.offsets[0] * prod(tensor.size[1:])
            found.append(Fragment(start, start + numel, partial(self._copy, chunk)))
        return found

    def _copy(self, chunk: _Chunk, _: StateKind, out: Tensor, first: int) -> None:
        """Read into `out` the chunk's elements from `first` on."""
        try:
            with open(chunk[0], "rb") as file:
                file.seek(self._data_offset(*chunk) + 4 * first)
                if file.readinto(memoryview(out.view(torch.uint8).numpy())) != 4 * len(out):  # type: ignore[arg-type]
                    raise EOFError("it is too short")
        except (OSError, EOFError, RuntimeError) as error:
            raise CheckpointError(f"{chunk[0]}: a tensor in it is not readable: {error}") from error


_PLAIN = {
    "torch": {"Size", "float64", "float32", "float16", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its place in Python 3.13
}
"""The classes that DCP's writer puts into `.metadata`, by module: data, and what only makes data."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what `_PLAIN` names and nothing else, so that opening a file runs no code of the file's choice."""

    def find_class(self, module: str, name: str) -> Any:
        """Look a class up, as pickle does. Raises pickle.UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not save")
        return super().find_class(module, name)


def _member(enumeration: type[Enum], name: str) -> Enum:
    """Stands in for `getattr`, by which Python 3.11.2 and its neighbours pickle a member. Raises UnpicklingError."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise pickle.UnpicklingError(
            f"it names {name} of {enumeration}, which torch.distributed.checkpoint does not save"
        )
    return enumeration[name]


def _data_offset(path: Path, offset: int, num_bytes: int, numel: int) -> int:
    """The byte of its file at which a chunk's elements begin. Raises OSError, EOFError or RuntimeError for others.

    For its record of a tensor's memory `torch.save` has no compression, so what has its size is it.
    """
    with open(path, "rb") as file:
        archive = torch._C.PyTorchFileReader(_ReaderView(file, offset, num_bytes))  # type: ignore[call-overload]
        if archive.get_record_size("data/0") != 4 * numel:
            raise EOFError("not one plain contiguous tensor")
        return offset + int(archive.get_record_offset("data/0"))


class ZeroState(FragmentedState):
    """`types.SavedState` of a checkpoint that the DeepSpeed engine wrote. Its hashes were checked before."""

    def __init__(self, checkpoint: Path) -> None:
        """Map the files. Raises CheckpointError, naming the file, for one that is missing or of another layout."""
        record, folder = read_record(checkpoint), checkpoint / TAG
        with _layout_checked(folder):
            shapes, pieces = _read_layout(folder, record)
        fragments: dict[str, list[Fragment]] = {name: [] for name in shapes}
        for piece, part in pieces:
            copy = partial(self._copy, piece, part)
            fragments[piece.name].append(Fragment(piece.start, piece.start + piece.length, copy))
        kinds = ("weight", *MOMENTS)
        super().__init__(
            record, folder, shapes, {f"{kind}.{name}": fragments[name] for kind in kinds for name in shapes}
        )

    def _copy(self, piece: Piece, part: Callable[[], _Tensors], kind: StateKind, out: Tensor, first: int) -> None:
        """Copy into `out` what `part` has of `piece` from `first` on. Moments before the first step are zeros."""
        tensors = part()
        if kind in tensors:
            out.copy_(tensors[kind].narrow(0, piece.offset + first, len(out)))
        elif self.applied_steps > 0:
            raise CheckpointError(f"{self._folder} has no {kind} of {piece.name}")
        else:
            out.zero_()


def _read_layout(folder: Path, record: EngineRecord) -> tuple[dict[str, tuple[int, ...]], list[_Placed]]:
    """The shapes in the model's order, and where the elements of each parameter are."""
    stage = int(record.sharding_stage.removeprefix("zero").removesuffix("_hybrid"))
    states = _load(folder / ("zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt"))
    module: Mapping[str, Tensor] = states["module"]
    named = states["param_shapes"] if stage else [{name: module[name].shape for name in own} for own in record.groups]
    shapes = {name: tuple(shape) for group in named for name, shape in group.items()}
    groups = [{name: prod(shape) for name, shape in group.items()} for group in named]
    if stage == 0:
        pieces = list(_replicated(module, states["optimizer"], groups))
    else:
        pieces = list(_cut(_Parts(folder, stage, record.world_size), groups, by_parameter=stage == 3))
    # The module's own dict has the model's order; a tied parameter stands in it under every name.
    return {name: shapes[name] for name in module if name in shapes}, pieces


class _Parts:
    """The optimizer states of all ranks, stages 1 to 3: one file per rank, opened when something of it is asked for.

    All parts of a group have the same size, so the first rank's file says where everything stands in the others. What
    a rank loads comes out of few of them, and each of hundreds of ranks would open hundreds of files.
    """

    def __init__(self, folder: Path, stage: int, world_size: int) -> None:
        self._stage = stage
        self.world_size = world_size
        self._files: list[Path] = []
        paths = list(folder.iterdir())
        for rank in range(world_size):
            ending = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"  # bf16_… in bfloat16
            found = [path for path in paths if path.name.endswith(ending)]
            if len(found) != 1:
                raise CheckpointError(
                    f"{folder}: {len(found)} files of optimizer states of rank {rank}, instead of one"
                )
            self._files += found
        self._opened: dict[int, list[_Tensors]] = {}
        self.sizes: Sequence[int] = ()
        """Elements of a part of each group, padding included."""
        self.alignments: Sequence[Sequence[int]] = ()
        """Padding behind each parameter of each group; none: not aligned."""
        self._open(0)

    def part(self, rank: int, group: int) -> _Tensors:
        """Rank `rank`'s part of a group. Raises CheckpointError."""
        if rank not in self._opened:
            with _layout_checked(self._files[rank]):
                self._open(rank)
        return self._opened[rank][group]

    def _open(self, rank: int) -> None:
        states = _load(self._files[rank])["optimizer_state_dict"]
        if self._stage == 3:
            weights, base = states["fp32_flat_groups"], states["optimizer_state_dict"]
            paddings = [0] * len(weights)
        else:
            weights, base = states["single_partition_of_fp32_groups"], states["base_optimizer_state"]
            # BF16_Optimizer, which has no "zero_stage", saves its parts with their padding at the end, never aligned.
            paddings = states["group_paddings"] if "zero_stage" in states else [0] * len(weights)
        sizes = [weight.numel() + padding for weight, padding in zip(weights, paddings, strict=True)]
        if rank == 0:
            self.sizes, self.alignments = sizes, states.get("param_alignment_paddings") or [[] for _ in sizes]
        if sizes != self.sizes:
            raise ValueError(f"parts of {sizes} elements, and of {self.sizes} on rank 0")
        parts = zip(weights, _moments(base), strict=True)
        self._opened[rank] = [{"weight": weight} | moments for weight, moments in parts]


@contextmanager
def _layout_checked(path: Path) -> Iterator[None]:
    """Raise CheckpointError, naming `path`, where the code inside stumbles over another layout."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: not laid out as DeepSpeed 0.19 does it ({error!r})") from None


def _replicated(
    module: Mapping[str, Tensor], optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, int]]
) -> Iterator[_Placed]:
    """Stage 0: everything in full. `optimizer`: torch's state dict, in 16 bit inside that of DeepSpeed's wrapper."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    names = [name for group in groups for name in group]
    if "fp32_groups_flat" in optimizer:  # FP16_Optimizer
        weights, held = list(optimizer["fp32_groups_flat"]), groups
    else:
        masters = (
            chain.from_iterable(optimizer["fp32_groups"]) if "fp32_groups" in optimizer else map(module.get, names)
        )
        weights, held = list(masters), [{name: numel} for group in groups for name, numel in group.items()]
    for weight, moments, within in zip(weights, _moments(base), held, strict=True):
        tensors = {"weight": weight.reshape(-1)} | {kind: moment.reshape(-1) for kind, moment in moments.items()}
        for piece in end_to_end(within):
            yield piece, partial(dict, tensors)


def _cut(parts: _Parts, groups: Sequence[Mapping[str, int]], *, by_parameter: bool) -> Iterator[_Placed]:
    """Stages 1 and 2: a group's parameters end to end, cut into equal parts regardless of where one begins.

    Stage 3 cuts `by_parameter`: a rank's part of each, end to end.
    """
    ranks = parts.world_size
    for index, (numels, size, alignment) in enumerate(zip(groups, parts.sizes, parts.alignments, strict=True)):
        for rank in range(ranks * by_parameter):
            yield from ((piece, partial(parts.part, rank, index)) for piece in own_parts(numels, rank, ranks))
        for name, _, numel, begin in map(astuple, () if by_parameter else end_to_end(numels, alignment)):
            end = min(begin + numel, ranks * size)
            for rank in range(begin // size, -(-end // size)):
                first, last = max(begin, rank * size), min(end, (rank + 1) * size)
                piece = Piece(name, first - begin, last - first, first - rank * size)
                yield piece, partial(parts.part, rank, index)


def _moments(base: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Adam's two moments of each of the optimizer's tensors, in its order; nothing of one that was never stepped."""
    states = (base["state"].get(number, {}) for group in base["param_groups"] for number in group["params"])
    return [{kind: state[kind] for kind in MOMENTS if kind in state} for state in states]


class _Inert:
    """Stands in for DeepSpeed's own classes (loss scalers, enumerations, addresses) when a file is opened.

    And for `getattr`, by which Python 3.11.2 and its neighbours pickle a member of an enumeration.
    """

    def __new__(cls, *arguments: object) -> _Inert:
        """Take whatever the class itself would; keep nothing."""
        return super().__new__(cls)


def _load(path: Path) -> Any:
    """The content of a file of `torch.save`, its tensors mapped. Runs nothing but torch's own rebuilding of tensors."""
    try:
        foreign = get_unsafe_globals_in_checkpoint(path)
        refused = [name for name in foreign if not name.startswith("deepspeed.") and name != "builtins.getattr"]
        if refused:
            raise CheckpointError(
                f"{path}: names {', '.join(refused)}, which DeepSpeed does not save. It was not opened."
            )
        with safe_globals([(_Inert, name) for name in foreign]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
