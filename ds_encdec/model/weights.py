"""Weights of the encoder-decoder: random, from the folder of a decoder, or from one of our own. Random weights have a
generator for each parameter, keyed by (seed, name): they do not depend on ranks, the order of construction, or the
device. Encoder and decoder layers both copy a decoder's layers, final norms its final norm, and they share its
embedding, whose new rows (sentinels, mode tokens, rows beyond its size) are drawn from the normal distribution of the
trained ones, dimension by dimension. Folders are read and written one tensor at a time: no whole model is in memory."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_encdec.base.types import CheckpointError, WeightSource
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import Depth
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.registry.families import Family

VOCABULARY_PARAMETERS = ("shared.weight", "lm_head.weight")  # parameters with one row for each token id
_STATISTICS_ROWS = 2048  # rows of the embedding read and converted to float64 at one time

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def keyed_seed(seed: int, name: str) -> int:
    """Return a seed for torch's generators, for the purpose `name` of a run seeded with `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def keyed_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded with `keyed_seed`."""
    return torch.Generator().manual_seed(keyed_seed(seed, name))


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite, by one pass that allocates nothing; a sum could overflow."""
    return tensor.numel() == 0 or all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist()))


def refuse_non_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError unless the parameter `name` is finite in the dtype in which it is to be written."""
    if not is_finite(tensor):
        raise CheckpointError(
            f"{name} is not written: it has elements that are NaN, infinite, or too large for {tensor.dtype}. Take an "
            "earlier checkpoint, or --dtype float32."
        )


def random_weights(config: Qwen3Seq2SeqConfig, seed: int) -> WeightSource:
    """Return Qwen3's initialisation: norms 1, biases 0, matrices N(0, `initializer_range`); float32."""
    shapes = parameter_shapes(config)

    def weights(name: str, rows: slice = slice(None), /) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0)[rows]
        # A generator cannot start in the middle: the whole is drawn, and only its rows are kept.
        drawn = torch.empty(shape).normal_(0.0, config.initializer_range, generator=keyed_generator(seed, name))
        return drawn if rows == slice(None) else drawn[rows].clone()

    return weights


def stored_weights(
    folder: Path,
    config: Qwen3Seq2SeqConfig,
    added_ids: Collection[int],
    *,
    stored_rows: int,
    seed: int,
    origin: tuple[Family, Depth] | None = None,
    encoder_norm: str = "encoder.norm.weight",
) -> WeightSource:
    """Return the parameters of `config`'s model from `folder`, in the dtype stored there. `stored_rows`: rows of the
    stored embedding (and of an untied head). Rows from there to `vocab_size`, and `added_ids`, are drawn with the mean
    and standard deviation of the trained ones. `origin`: the family of the decoder in the folder, and the layers to
    take of it; None: the folder is one of our own, in which `encoder_norm` is the encoder's final norm. Checks names
    and shapes of all tensors now (CheckpointError), and reads each tensor when it is used."""
    source = SafetensorsFolder(folder)
    # The trained rows are those below all new ones.
    total_rows = max(stored_rows, config.vocab_size)
    added = {row for row in added_ids if row < stored_rows}.union(range(stored_rows, total_rows))
    new_rows = torch.tensor(sorted(added), dtype=torch.int64)
    shapes = {
        name: (stored_rows, *shape[1:]) if name in VOCABULARY_PARAMETERS else shape
        for name, shape in parameter_shapes(config).items()
    }

    stored = _as_ours(source, shapes, origin, encoder_norm)

    def extended(name: str, rows: slice = slice(None), /) -> Tensor:
        if name not in VOCABULARY_PARAMETERS or not len(new_rows):
            return stored(name, rows)
        start, stop, _ = rows.indices(total_rows)
        source_rows = stored(name, slice(min(start, stored_rows), min(stop, stored_rows)))
        result = source_rows.new_empty(stop - start, source_rows.shape[1])
        result[: len(source_rows)] = source_rows
        del source_rows  # the statistics read the rows again: one embedding less at the peak
        wanted = (new_rows >= start) & (new_rows < stop)
        if wanted.any():
            mean, std = _row_statistics(stored, name, int(new_rows[0]), result.shape[1])
            drawn = torch.randn(len(new_rows), len(mean), generator=keyed_generator(seed, f"{name}: added rows"))
            result[new_rows[wanted] - start] = (mean + std * drawn[wanted]).to(result.dtype)
        return result

    return extended


def _row_statistics(weights: WeightSource, name: str, count: int, width: int) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(2, width, dtype=torch.float64)
    for start in range(0, count, _STATISTICS_ROWS):
        values = weights(name, slice(start, min(start + _STATISTICS_ROWS, count))).double()
        sums += torch.stack((values.sum(0), values.square().sum(0)))
    mean, of_squares = sums / count
    return mean.float(), (of_squares - mean.square()).clamp_min(0.0).sqrt().float()


class SafetensorsFolder:
    """Reads the tensors of a Hugging Face folder, sharded or not, lazily. CheckpointError for missing shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if (folder / SINGLE_FILE).is_file():  # as in transformers, it takes precedence over an index
            with self._open(SINGLE_FILE) as file:
                self._file_of: dict[str, str] = dict.fromkeys(file.keys(), SINGLE_FILE)
            return
        index = folder / INDEX_FILE
        if not index.is_file():
            raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (other formats are not read)")
        try:
            self._file_of = read_json(index)["weight_map"]
            if not all(isinstance(shard, str) and Path(shard).name == shard for shard in self._file_of.values()):
                raise ValueError("weight_map: a shard is no file name")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}. Copy it again.") from error
        if missing := sorted(shard for shard in set(self._file_of.values()) if not (folder / shard).is_file()):
            raise CheckpointError(f"{index} names the shard {missing[0]}, which is missing. Copy it again.")

    def tensor(self, name: str, rows: slice = slice(None), /) -> Tensor:
        """Return one tensor (or `rows` of it) on the CPU, as stored."""
        with self._open(self._file_of[name]) as file:
            return file.get_tensor(name) if rows == slice(None) else file.get_slice(name)[rows]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the headers have these tensors in these shapes, as plain floating point."""
        if missing := sorted(shapes.keys() - self._file_of.keys()):
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} of the model's {len(shapes)} tensors, such as {missing[0]}. "
                "Is it the model that its config.json describes?"
            )
        for file_name in sorted({self._file_of[name] for name in shapes}):
            with self._open(file_name) as file:
                names = set(file.keys())
                where = self._folder / file_name
                for name in (name for name in shapes if self._file_of[name] == file_name):
                    if name not in names:
                        raise CheckpointError(f"{where} has no {name}, which {INDEX_FILE} expects there.")
                    part = file.get_slice(name)
                    if (dtype := part.get_dtype()) not in _DTYPE_NAMES.values():
                        raise CheckpointError(
                            f"{where}: {name} is stored as {dtype}, not F32, BF16 or F16. Take the unquantized folder."
                        )
                    if (shape := tuple(part.get_shape())) != shapes[name]:
                        raise CheckpointError(
                            f"{where}: {name} has shape {shape}, not {shapes[name]} as in config.json"
                        )

    def refuse_others(self, known: Collection[str], part: str) -> None:
        """Raise CheckpointError for weights in `part` of the model of a kind that no name in `known` has: a model with
        them computes something else. Counts of layers may differ."""
        kinds = {re.sub(r"\d+", "*", name) for name in known}
        for name in sorted(self._file_of):
            if name.startswith(part) and name.endswith((".weight", ".bias")) and re.sub(r"\d+", "*", name) not in kinds:
                raise CheckpointError(
                    f"{self._folder} has {name}, for which the layers that its config.json describes have no place."
                )

    def refuse_another_head(self, embedding: str) -> None:
        """Raise CheckpointError if a head has other first rows than the `embedding` that it is tied to."""
        names = {"lm_head.weight", embedding} & self._file_of.keys()
        if len(names) == 2 and not torch.equal(*(self.tensor(name, slice(0, 256)) for name in names)):
            raise CheckpointError(
                f"{self._folder} has an lm_head.weight of its own, but config.json ties it to the embedding: set "
                "tie_word_embeddings to false there to keep it."
            )

    def _open(self, name: str) -> Any:
        # Opened for each tensor: an open file stays mapped, and all pages read count as our memory.
        try:
            return safe_open(self._folder / name, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / name} is damaged: {error}. Copy it again.") from error


def _as_ours(
    source: SafetensorsFolder,
    shapes: Mapping[str, tuple[int, ...]],
    origin: tuple[Family, Depth] | None,
    encoder_norm: str,
) -> WeightSource:
    """Return our parameters of these `shapes`, each from its place among the tensors of `source`."""

    def place(name: str) -> tuple[str, int]:
        if origin is None:
            return encoder_norm if name == "encoder.norm.weight" else name, 0
        (family, depth), side = origin, name.partition(".")[0]
        theirs, first_row = family.place(name, shapes)
        layers = {"encoder": depth.encoder, "decoder": depth.decoder}.get(side, ())
        return re.sub(r"(?<=^model\.layers\.)\d+", lambda number: str(layers[int(number[0])]), theirs), first_row

    places = {name: place(name) for name in shapes}
    expected: dict[str, tuple[int, ...]] = {}
    for name, (stored_name, first) in places.items():
        rows = max(first + shapes[name][0], *expected.get(stored_name, (0,))[:1])
        expected[stored_name] = (rows, *shapes[name][1:])
    source.check(expected)
    if origin is not None:
        source.refuse_others(expected, "model.layers.")
        if "lm_head.weight" not in shapes and "decoder.norm.weight" in shapes:  # an encoder may leave the head behind
            source.refuse_another_head(places["shared.weight"][0])

    def stored(name: str, rows: slice = slice(None), /) -> Tensor:
        stored_name, first = places[name]
        start, stop, _ = rows.indices(shapes[name][0])
        return source.tensor(stored_name, slice(first + start, first + max(start, stop)))

    return stored


def write_safetensors_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    weights: WeightSource,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write the parameters in `shapes` to `folder` in `dtype`, in order, with an index if sharded. Tensors are written
    in turn: peak memory is that of the largest one (and of what `weights` needs to make it). A shard holds at most
    `max_shard_bytes`, unless a single tensor is larger."""
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: dtype.itemsize * prod(shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for shard, names in split.filename_to_tensors.items():
        # Tensor by tensor: safetensors' own writer needs all of them in memory.
        offsets = pairwise(accumulate((dtype.itemsize * prod(shapes[name]) for name in names), initial=0))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}} | {
            name: {"dtype": _DTYPE_NAMES[dtype], "shape": list(shapes[name]), "data_offsets": list(begin_and_end)}
            for name, begin_and_end in zip(names, offsets, strict=True)
        }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / shard).open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name in names:
                tensor = weights(name).detach().to(dtype).contiguous()
                if tuple(tensor.shape) != tuple(shapes[name]):
                    raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, but the model has {shapes[name]}.")
                refuse_non_finite(name, tensor)
                file.write(tensor.view(torch.uint8).numpy().data)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
