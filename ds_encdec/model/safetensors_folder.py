"""Reading and writing folders of safetensors one tensor at a time, so that no whole model is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_encdec.config.plain_files import read_json
from ds_encdec.types import CheckpointError, WeightSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, in one file or sharded, read lazily.

    Raises CheckpointError if there are no safetensors, or an index names a shard that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = self._read_index()

    def tensor(self, name: str, rows: slice = slice(None), /) -> Tensor:
        """One tensor (or `rows` of it) on the CPU, in the dtype it is stored in. Reads no more than is asked for.

        Raises CheckpointError if there is none.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder} has no tensor {name}; is it the model its config.json describes?")
        with self._open(self._file_of[name]) as file:
            return file.get_tensor(name) if rows == slice(None) else file.get_slice(name)[rows]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the folder has these tensors in these shapes. Reads the files' headers alone."""
        if missing := sorted(shapes.keys() - self._file_of.keys()):
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} of the model's {len(shapes)} tensors, {missing[0]} among them; "
                "is it the model its config.json describes?"
            )
        for file_name in sorted({self._file_of[name] for name in shapes}):
            with self._open(file_name) as file:
                held = set(file.keys())
                for name in (name for name in shapes if self._file_of[name] == file_name):
                    self._check_tensor(file, file_name, name, shapes[name], held)

    def _check_tensor(self, file: Any, file_name: str, name: str, shape: tuple[int, ...], held: set[str]) -> None:
        if name not in held:
            raise CheckpointError(f"{self._folder / file_name} has no {name}, which {INDEX_FILE} says is there")
        found = tuple(file.get_slice(name).get_shape())
        if found != tuple(shape):
            raise CheckpointError(
                f"{self._folder / file_name}: {name} has shape {found}, but the folder's config.json asks for {shape}"
            )

    def _read_index(self) -> dict[str, str]:
        if (index := self._folder / INDEX_FILE).is_file():
            try:
                file_of: dict[str, str] = read_json(index)["weight_map"]
                if not all(isinstance(shard, str) and Path(shard).name == shard for shard in file_of.values()):
                    raise ValueError("weight_map: a shard is no file name")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} is damaged: {error!r}. Copy it there again") from error
            for shard in sorted(set(file_of.values())):
                if not (self._folder / shard).is_file():
                    raise CheckpointError(f"{index} names the shard {shard}, which is missing. Copy it there again")
            return file_of
        if (self._folder / SINGLE_FILE).is_file():
            with self._open(SINGLE_FILE) as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        raise CheckpointError(f"{self._folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (other formats are not read)")

    def _open(self, name: str) -> Any:
        # Anew for each tensor: a file kept open stays mapped, and all of it that was read counts as our memory.
        try:
            return safe_open(self._folder / name, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / name} is damaged: {error}. Copy it there again") from error


def write_safetensors_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    weights: WeightSource,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write the parameters named in `shapes` to `folder` in `dtype`, in their order, with an index if sharded.

    Tensors are fetched, converted and written one after the other: peak memory is that of the largest one (and of what
    `weights` needs to make it). A shard holds at most `max_shard_bytes`, unless a single tensor is larger.
    """
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: dtype.itemsize * prod(shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        _write_file(folder / file, names, shapes, weights, dtype)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    path: Path, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], weights: WeightSource, dtype: torch.dtype
) -> None:
    """One file in the safetensors format: length of the header (8 bytes), JSON header, tensors back to back.

    safetensors' own writer wants all tensors of a file, and a second copy of each, in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + dtype.itemsize * prod(shapes[name])
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            tensor = weights(name).detach().to(dtype).contiguous()
            if tuple(tensor.shape) != tuple(shapes[name]):
                raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the model wants {shapes[name]}")
            file.write(tensor.view(torch.uint8).numpy().data)
