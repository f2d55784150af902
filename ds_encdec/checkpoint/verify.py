"""`ds-encdec verify`: are the checkpoints of a run, or one of them, what their manifests say?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST, Manifest, verify_checkpoint
from ds_encdec.engine.record import EngineRecord, read_record
from ds_encdec.types import CheckpointError


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose every file is as it was written; as text, the line to show."""

    path: Path
    manifest: Manifest
    record: EngineRecord

    def __str__(self) -> str:
        ranks = f"{self.record.world_size} rank" + "s" * (self.record.world_size > 1)
        return (
            f"{self.path}: whole; step {self.manifest.step:,}, {self.manifest.engine} {self.record.sharding_stage} on "
            f"{ranks}, {len(self.manifest.files)} files, {self.manifest.num_bytes / 1e9:.3f} GB"
            + (f" ({self.manifest.doubt})" if self.manifest.doubt else "")
        )


def verify_checkpoints(path: Path) -> Iterator[VerifiedCheckpoint]:
    """Check the checkpoint at `path`, or every one of the run (or folder of checkpoints) there, by step.

    Yields the whole ones, each after all its files were read and hashed. Raises CheckpointError in the end for those
    that are damaged, naming a file of each, and at once where there is no checkpoint.
    """
    damage = []
    for checkpoint in _checkpoints_at(path.expanduser().resolve()):
        try:
            yield VerifiedCheckpoint(checkpoint, verify_checkpoint(checkpoint), read_record(checkpoint))
        except CheckpointError as error:
            damage.append(str(error))
    if damage:
        raise CheckpointError("\n".join(damage))


def _checkpoints_at(path: Path) -> list[Path]:
    """`path` itself unless it is a run or a folder of checkpoints: what it should be is for its manifest to say."""
    if not os.path.lexists(path / MANIFEST):
        for folder in (path / "checkpoints", path):
            if found := committed_steps(folder):
                return [found[step] for step in sorted(found)]
    return [path]
