"""Read torch.distributed.checkpoint's files by element ranges, on one rank and without a process group.

`dcp/.metadata` is a pickle, of which only the few plain classes that DCP itself puts there are let in. It lists every
tensor as *chunks*, each a block of the full tensor, and where in which `.distcp` file each lies. A chunk is what
`torch.save` writes: a zip archive whose entry `…/data/0` is the tensor's memory, stored as it is. torch's own reader
loads whole chunks; here only the bytes of the range are read, straight into the result, so that many ranks can share
what few have written.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ds_encdec.engine.record import DCP_FOLDER, read_record
from ds_encdec.types import CheckpointError, StateKind

_ZIP_HEADER = struct.Struct("<26xHH")
"""A zip entry's local header: 26 bytes that do not matter here, length of the name, length of the extra field."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements [start, stop) of a flattened tensor, and the archive that holds them."""

    start: int
    stop: int
    file: Path
    offset: int
    """Of the archive in the file, in bytes."""
    num_bytes: int
    """Of the archive."""


class DcpState:
    """`types.SavedState` over `dcp/` in a verified checkpoint. Raises CheckpointError for any other files."""

    def __init__(self, checkpoint: Path) -> None:
        record = read_record(checkpoint)
        self.applied_steps = record.applied_steps
        self.loss_scaler: Mapping[str, float | int] | None = record.loss_scaler
        self._folder = checkpoint / DCP_FOLDER
        metadata = _read_metadata(self._folder / ".metadata")
        tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._chunks = {key: self._chunks_of(key, tensor, metadata) for key, tensor in tensors.items()}
        # The planner's table keeps the order of the state dict that was saved; the other goes by the ranks that wrote.
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key.removeprefix("weight."): tuple(tensors[key].size)
            for key in metadata.planner_data or tensors
            if key.startswith("weight.")
        }
        self._data_offsets: dict[_Chunk, int] = {}

    def read(self, kind: StateKind, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """See types.SavedState."""
        key = f"{kind}.{name}"
        if key not in self._chunks:
            raise CheckpointError(
                f"{self._folder} has no {kind} of a parameter {name!r}; it is another architecture's."
            )
        chunks = self._chunks[key]
        stop = chunks[-1].stop if stop is None else stop
        out = torch.empty(stop - start, dtype=torch.float32)
        filled = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        first = bisect_right(chunks, start, key=lambda chunk: chunk.start) - 1
        for chunk in chunks[first:]:
            lower, upper = max(start, chunk.start), min(stop, chunk.stop)
            if lower >= upper:
                break
            self._read_into(filled[4 * (lower - start) : 4 * (upper - start)], chunk, 4 * (lower - chunk.start))
        return out

    def _chunks_of(self, key: str, tensor: TensorStorageMetadata, metadata: Metadata) -> list[_Chunk]:
        """The chunks of one tensor in their order; empty ones (ranks without a row) left out."""
        if tensor.properties.dtype != torch.float32:
            raise CheckpointError(f"{self._folder}: {key} is {tensor.properties.dtype}, not float32.")
        row = prod(tensor.size[1:])
        found = []
        for block in tensor.chunks:
            if prod(block.sizes) == 0:
                continue
            if block.sizes[1:] != tensor.size[1:]:
                raise CheckpointError(f"{self._folder}: {key} is cut along other dimensions than its first.")
            place: Any = metadata.storage_data[MetadataIndex(key, block.offsets)]
            start = block.offsets[0] * row
            file = self._file(place.relative_path)
            found.append(_Chunk(start, start + prod(block.sizes), file, place.offset, place.length))
        found.sort(key=lambda chunk: chunk.start)
        starts, stops = [chunk.start for chunk in found], [chunk.stop for chunk in found]
        if [*starts, prod(tensor.size)] != [0, *stops]:
            raise CheckpointError(f"{self._folder}: the chunks of {key} do not cover it once.")
        return found

    def _file(self, name: str) -> Path:
        """The `.distcp` file of this name. Raises CheckpointError for a path that leads out of the folder."""
        if Path(name).name != name:
            raise CheckpointError(f"{self._folder / '.metadata'} names a file outside its folder: {name!r}.")
        return self._folder / name

    def _read_into(self, target: memoryview, chunk: _Chunk, first_byte: int) -> None:
        """Fill `target` with the chunk's bytes from `first_byte` on."""
        try:
            with open(chunk.file, "rb") as file:
                if chunk not in self._data_offsets:
                    self._data_offsets[chunk] = _data_offset(file, chunk)
                file.seek(self._data_offsets[chunk] + first_byte)
                if file.readinto(target) != len(target):
                    raise EOFError("it is too short")
        except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
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
"""What DCP's writer puts into `.metadata`, by module: data, and what only makes data."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what `_PLAIN` names and nothing else, so that opening a file runs no code of the file's choice."""

    def find_class(self, module: str, name: str) -> Any:
        """As pickle's. Raises pickle.UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not save")
        return super().find_class(module, name)


def _member(enumeration: type[Enum], name: str) -> Enum:
    """In the place of `getattr`, by which Python 3.11.2 and its neighbours pickle a member. Raises UnpicklingError."""
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


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of an open file, as a file of their own.

    Not torch's `_ReaderView`, which `zipfile` cannot use: it turns the sign of an offset from the end around.
    """

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._position = position + (0, self._position, self._length)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As of any raw file, never past the window's end."""
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._position)])  # type: ignore[attr-defined]
        self._position += count
        return int(count)


def _data_offset(file: BinaryIO, chunk: _Chunk) -> int:
    """Where in the open `file` the chunk's elements begin. Raises zipfile.BadZipFile for any other archive."""
    with zipfile.ZipFile(_Window(file, chunk.offset, chunk.num_bytes)) as archive:
        entry = next((entry for entry in archive.infolist() if entry.filename.endswith("/data/0")), None)
    if entry is None or (entry.compress_type, entry.file_size) != (zipfile.ZIP_STORED, 4 * (chunk.stop - chunk.start)):
        raise zipfile.BadZipFile("not one plain contiguous tensor")
    header = chunk.offset + entry.header_offset
    file.seek(header)
    name_bytes, extra_bytes = _ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size))
    return header + _ZIP_HEADER.size + name_bytes + extra_bytes
