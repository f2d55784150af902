"""Read torch.distributed.checkpoint's files by element ranges, on one rank and without a process group.

`dcp/.metadata` is a pickle, of which only the few plain classes that DCP itself puts there are let in. It lists every
tensor as *chunks*, each a block of the full tensor, and where in which `.distcp` file each lies. A chunk is what
`torch.save` writes: a zip archive whose entry `…/data/0` is the tensor's memory, stored as it is. torch's own reader
loads whole chunks; here only the bytes of the range are read, straight into the result, so that many ranks can share
what few have written.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _ReaderView

from ds_encdec.checkpoint.saved_state import Fragment, FragmentedState
from ds_encdec.engine.record import DCP_FOLDER, read_record
from ds_encdec.types import CheckpointError, StateKind


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The archive that holds `numel` elements: bytes [offset, offset + num_bytes) of `file`."""

    file: Path
    offset: int
    num_bytes: int
    numel: int


class DcpState(FragmentedState):
    """`types.SavedState` over `dcp/` in a verified checkpoint. Raises CheckpointError for any other files."""

    def __init__(self, checkpoint: Path) -> None:
        folder = checkpoint / DCP_FOLDER
        metadata = _read_metadata(folder / ".metadata")
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
            chunk = _Chunk(folder / place.relative_path, place.offset, place.length, numel)
            start = block.offsets[0] * prod(tensor.size[1:])
            found.append(Fragment(start, start + numel, partial(self._copy, chunk)))
        return found

    def _copy(self, chunk: _Chunk, _: StateKind, out: Tensor, first: int) -> None:
        """Read into `out` the chunk's elements from `first` on."""
        try:
            with open(chunk.file, "rb") as file:
                file.seek(self._data_offset(chunk) + 4 * first)
                if file.readinto(memoryview(out.view(torch.uint8).numpy())) != 4 * len(out):  # type: ignore[arg-type]
                    raise EOFError("it is too short")
        except (OSError, EOFError, RuntimeError) as error:
            raise CheckpointError(f"{chunk.file}: a tensor in it is not readable: {error}") from error


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


def _read_metadata(path: Path) -> Metadata:
    """The list of all tensors and their chunks. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # an unpickler raises anything
        raise CheckpointError(f"{path} is not readable: {error!r}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not the metadata of a checkpoint.")
    return metadata


def _data_offset(chunk: _Chunk) -> int:
    """The byte of its file at which the chunk's elements begin. Raises OSError, EOFError or RuntimeError for others.

    For its record of a tensor's memory `torch.save` has no compression, so what has its size is it.
    """
    with open(chunk.file, "rb") as file:
        archive = torch._C.PyTorchFileReader(_ReaderView(file, chunk.offset, chunk.num_bytes))  # type: ignore[call-overload]
        if archive.get_record_size("data/0") != 4 * chunk.numel:
            raise EOFError("not one plain contiguous tensor")
        return chunk.offset + int(archive.get_record_offset("data/0"))
