"""The table of what the reference model thinks of each pair, which a run of preferences makes once, and then reads.

A row has the digest of a pair's token ids and the log-probabilities of both answers: documents, order, passes and ranks
do not matter. `table.json` names the reference, and is written last: a table without it is not finished."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_encdec.base.types import CheckpointError, DataError, Example
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.launch.disk import write_atomically

_ROW = np.dtype([("pair", "<u8"), ("log_probs", "<f4", (2,))])
_FACTS, _ROWS = "table.json", "table.npy"


def pair_digest(example: Example) -> int:
    """Return a number of 64 bits for the token ids of all segments."""
    digest = hashlib.blake2b(digest_size=8)
    for ids in (ids for segment in example.segments for ids in segment):
        digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, "<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True)
class ReferenceTable:
    """The finished table in `folder`. `rows`: memory-mapped, sorted by pair. `facts` decide its content, and `digest`
    names it."""

    folder: Path
    rows: np.ndarray
    facts: dict[str, Any]
    digest: str

    @classmethod
    def read(cls, folder: Path) -> "ReferenceTable | None":
        """Return the table, or None if it is not there. Raises CheckpointError for a damaged one."""
        try:
            record = read_json(folder / _FACTS)
            if _digest((folder / _ROWS).read_bytes()) != record["digest"]:
                raise ValueError(f"{_ROWS} is not the one that {_FACTS} was written for")
            return cls(folder, np.load(folder / _ROWS, mmap_mode="r"), record["facts"], record["digest"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder}: the table of the reference is damaged ({error}); restore a copy"
            ) from error

    @cached_property
    def _pairs(self) -> np.ndarray:  # each search would copy them
        return np.ascontiguousarray(self.rows["pair"])

    def __call__(self, examples: Sequence[Example]) -> torch.Tensor:
        """Return the log-probabilities, float32 [examples, 2]. Raises DataError for a pair that is not there."""
        pairs = np.array([pair_digest(one) for one in examples], "<u8")
        places = np.searchsorted(self._pairs, pairs)
        found = self.rows[np.minimum(places, len(self.rows) - 1)]
        if lost := [one.document for one, there in zip(examples, found["pair"] == pairs, strict=True) if not there]:
            raise DataError(
                f"{self.folder}: the reference's log-probabilities of {lost[0]} are not there, so the data has changed "
                "since the run's first start. Restore it, or start a new run from an export"
            )
        return torch.from_numpy(found["log_probs"].copy())


def write_table(folder: Path, log_probs: Mapping[int, Sequence[float]], facts: dict[str, Any]) -> None:
    """Write the table of each pair's two log-probabilities, by its digest. Raises OSError, and CheckpointError for a
    model whose log-probabilities are not finite."""
    rows = np.array([(pair, tuple(log_probs[pair])) for pair in sorted(log_probs)], _ROW)
    if not np.isfinite(rows["log_probs"]).all():
        raise CheckpointError(
            "model.model_name_or_path: this model gives answers log-probabilities that are not finite, so it is no "
            "reference. Check its weights, or take training.bf16 instead of fp16"
        )
    buffer = io.BytesIO()
    np.save(buffer, rows)
    folder.mkdir(exist_ok=True)
    (folder / _FACTS).unlink(missing_ok=True)
    write_atomically(folder / _ROWS, buffer.getvalue())
    record = {"facts": facts, "digest": _digest(buffer.getvalue())}
    write_atomically(folder / _FACTS, json.dumps(record, indent=1) + "\n")


def copy_table(table: ReferenceTable, folder: Path) -> None:
    """Copy a table to another run's folder. Raises OSError."""
    folder.mkdir(exist_ok=True)
    for name in (_ROWS, _FACTS):
        write_atomically(folder / name, (table.folder / name).read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
