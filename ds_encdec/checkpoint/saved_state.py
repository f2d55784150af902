"""Reads ranges of a checkpoint's tensors without the engine that wrote them; zero_state.py reads DeepSpeed's files.
This module reads torch.distributed.checkpoint's on one rank and without a process group. `dcp/.metadata` is a pickle,
of which only the few plain classes are loaded that DCP itself puts there. It lists every tensor as *chunks*, each a
block of the full tensor, with the place of each in a `.distcp` file. A chunk is an archive of `torch.save`: a zip file
whose entry `…/data/0` is the tensor's memory, stored as it is. torch's own reader loads whole chunks; this one reads
only the bytes of the range, straight into the result, so that many ranks can share the files of few."""

import os
import pickle
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _ReaderView

from ds_encdec.base.types import CheckpointError, SavedState, StateKind, WeightSource
from ds_encdec.engine.protocol import DCP_FOLDER, EngineRecord, read_record

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")  # header before an entry of a zip archive (PKWARE's APPNOTE 4.3.7)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of a flattened tensor. `copy(kind, out, first)` fills `out` from element `first` on."""

    start: int
    stop: int
    copy: Callable[[StateKind, Tensor, int], None]


class FragmentedState:
    """`types.SavedState` over `folder`; `fragments` has those of each `KIND.NAME`, in any order."""

    def __init__(
        self,
        record: EngineRecord,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        fragments: Mapping[str, list[Fragment]],
    ) -> None:
        """Raises CheckpointError unless a tensor's fragments cover each element exactly once."""
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
                f"{self._folder} has no {kind} of a parameter {name!r}: another architecture or optimizer made it."
            )
        stop = fragments[-1].stop if stop is None else stop
        out = torch.empty(stop - start)
        for fragment in fragments[bisect_right(fragments, start, key=lambda one: one.start) - 1 :]:
            first, last = max(start, fragment.start), min(stop, fragment.stop)
            if first >= last:
                break
            fragment.copy(kind, out[first - start : last - start], first - fragment.start)
        return out


def saved_weights(saved: SavedState) -> WeightSource:
    """Return the float32 weights of `saved`, read on demand. Raises CheckpointError for an unknown name."""

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
            if not isinstance(metadata, Metadata):
                raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not the metadata of a checkpoint.")
            tensors = {
                key: entry
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            fragments = {key: list(_fragments(folder, key, tensor, metadata)) for key, tensor in tensors.items()}
            shapes = {
                key.removeprefix("weight."): tuple(tensors[key].size)
                # The planner's table keeps the order of the saved state dict; the other is ordered by writing ranks.
                for key in metadata.planner_data or tensors
                if key.startswith("weight.")
            }
        except CheckpointError:
            raise
        except Exception as error:  # an unpickler raises anything, and classes may hold anything
            raise CheckpointError(f"{path} is not readable: {error!r}") from error
        super().__init__(read_record(checkpoint), folder, shapes, fragments)


def _fragments(folder: Path, key: str, tensor: TensorStorageMetadata, metadata: Metadata) -> Iterator[Fragment]:
    dtype = tensor.properties.dtype
    if dtype != torch.float32 and not (dtype == torch.bfloat16 and key.startswith("weight.")):  # a frozen weight
        raise CheckpointError(f"{folder}: {key} is {dtype}, not float32.")
    row = prod(tensor.size[1:])
    for block in tensor.chunks:
        if (numel := prod(block.sizes)) == 0:
            continue
        if block.sizes[1:] != tensor.size[1:]:
            raise CheckpointError(f"{folder}: {key} is cut along other dimensions than its first.")
        place: Any = metadata.storage_data[MetadataIndex(key, block.offsets)]
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{folder / '.metadata'} names a file outside its folder: {place.relative_path!r}.")
        yield Fragment(
            block.offsets[0] * row,
            block.offsets[0] * row + numel,
            _chunk_reader(folder / place.relative_path, place.offset, place.length, numel, dtype),
        )


def _chunk_reader(
    path: Path, offset: int, num_bytes: int, numel: int, dtype: torch.dtype
) -> Callable[[StateKind, Tensor, int], None]:
    """Return the `copy` of a `Fragment`: `numel` elements in the archive at `offset` of the file `path`."""

    @cache  # until the chunk is read again, its archive need not be opened again
    def first_byte() -> int:
        with open(path, "rb") as file:
            view = cast(IO[bytes], _Archive(file, offset, num_bytes))
            entries = [entry for entry in ZipFile(view).infolist() if entry.filename.endswith("/data/0")]
            if [(one.compress_type, one.file_size) for one in entries] != [(ZIP_STORED, dtype.itemsize * numel)]:
                raise EOFError("not one plain contiguous tensor")
            view.seek(entries[0].header_offset)
            *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
            # The elements lie behind the entry's local header, a name and an extra field.
            return offset + entries[0].header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes

    def copy(_: StateKind, out: Tensor, first: int) -> None:
        read = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
        try:
            with open(path, "rb") as file:
                file.seek(first_byte() + read.itemsize * first)
                if file.readinto(memoryview(read.view(torch.uint8).numpy())) != read.nbytes:  # type: ignore[arg-type]
                    raise EOFError("it is too short")
        # The last two come from names of no encoding and later versions of the format.
        except (OSError, EOFError, BadZipFile, struct.error, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: a tensor in it is not readable: {error}") from error
        if read is not out:
            out.copy_(read)

    return copy


# Classes that DCP's writer puts into `.metadata`, by module: data, and constructors of data.
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


class _MetadataUnpickler(pickle.Unpickler):
    """Builds only classes in `_PLAIN`, so that opening a file runs no code of the file's choice."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not save")
        return super().find_class(module, name)


def _member(enumeration: type[Enum], name: str) -> Enum:
    """Stand in for `getattr`, by which Python 3.11.2 and its neighbours pickle a member. Raises UnpicklingError."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise pickle.UnpicklingError(
            f"it names {name} of {enumeration}, which torch.distributed.checkpoint does not save"
        )
    return enumeration[name]


class _Archive(_ReaderView):
    """A part of a file, as torch reads it, with positions that may be counted from its end."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(*(offset, whence) if whence != os.SEEK_END else (self.len + offset, os.SEEK_SET))
