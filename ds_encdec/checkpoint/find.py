"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    read_manifest,
    verify_files,
    verify_listing,
)
from ds_encdec.config.plain_files import read_json
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.types import CheckpointError, TrainingState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed, verified checkpoint."""

    path: Path
    manifest: Manifest

    def read_json(self, name: str) -> Saved:
        """See `Saved`."""
        return Saved(self.path / name)

    def training_state(self) -> TrainingState:
        """See `read_training_state`."""
        return read_training_state(self.path)


class Saved(dict[str, Any]):
    """The content of a JSON file of a checkpoint. Raises DamagedCheckpointError for a key that it lacks."""

    def __init__(self, path: Path) -> None:
        """Raises DamagedCheckpointError where the file at `path` cannot be read, or holds no mapping."""
        self._path = path
        try:
            content = read_json(path, None)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
        if not isinstance(content, dict):
            raise DamagedCheckpointError(f"{path} holds no mapping: it is not what ds_encdec writes.")
        super().__init__(content)

    def __missing__(self, key: str) -> Any:
        raise DamagedCheckpointError(f"{self._path} has no {key!r}: it is not what ds_encdec writes.")


def read_training_state(checkpoint: Path) -> TrainingState:
    """The counters that a checkpoint was saved with. Raises DamagedCheckpointError."""
    path = checkpoint / "trainer.json"
    saved = Saved(path)
    try:
        return TrainingState(**saved["state"])
    except TypeError as error:
        raise DamagedCheckpointError(f"{path}: `state` is not what ds_encdec writes: {error}.") from error


Accept = Callable[[Checkpoint], None]
"""Raises where this run cannot go on from a checkpoint."""


def find_checkpoint(
    folder: Path,
    collectives: HostCollectives,
    resume: str | None,
    accept: Accept = lambda _: None,
    *,
    at_most: int | None = None,
) -> Checkpoint | None:
    """The checkpoint to resume from, verified by all ranks, each calling this; None for a new run.

    `folder`: the run's own checkpoints. `resume`: None, `auto` (the newest whole one there; damaged ones are passed
    over with a warning), or a path. `accept` is called on every rank with a checkpoint of which only the manifest and
    the small files have been verified; what it raises ends the search, before gigabytes are hashed. `at_most`: under
    `auto`, the latest step that counts.

    Raises CheckpointError where the named one is damaged, or another run's while this folder has some of its own;
    and where under `auto` all are damaged: starting anew would then write over what may still be saved.
    """
    if resume is None:
        return None
    newest_first = collectives.on_rank_zero(lambda: sorted(committed_steps(folder).items(), reverse=True))
    candidates = [path.resolve() for step, path in newest_first if at_most is None or step <= at_most]
    if resume != "auto":
        path = Path(resume).expanduser().resolve()
        collectives.on_every_rank(lambda: read_manifest(path))  # what is no checkpoint is called that
        if candidates and path not in candidates:
            raise CheckpointError(
                f"{path} is not one of this run's checkpoints, of which {folder} holds {len(candidates)} "
                f"(newest: {candidates[0].name}). Two runs in one folder would be mixed up: choose another "
                "infra.output_dir to go on from it, or resume one of this folder's own."
            )
        return _verified(path, collectives, accept)
    for path in candidates:
        try:
            return _verified(path, collectives, accept)
        except DamagedCheckpointError as error:
            if collectives.rank == 0:
                logger.warning("Passing over a damaged checkpoint: %s", error)
    if candidates:
        raise CheckpointError(
            f"{folder}: none of its {len(candidates)} checkpoints is whole (the warnings above say why). "
            "Restore one, or start a new run in another infra.output_dir."
        )
    return None


def _verified(path: Path, collectives: HostCollectives, accept: Accept) -> Checkpoint:
    """Each rank checks its share of the large files; all agree."""

    def described() -> Checkpoint:
        manifest = read_manifest(path)
        verify_listing(path, manifest)
        verify_files(path, manifest.descriptions())
        checkpoint = Checkpoint(path, manifest)
        if manifest.doubt and collectives.rank == 0:
            logger.warning("%s: %s; an earlier version of ds_encdec saved it.", path, manifest.doubt)
        accept(checkpoint)
        return checkpoint

    checkpoint = collectives.on_every_rank(described)
    share = checkpoint.manifest.files[collectives.rank :: collectives.world_size]
    collectives.on_every_rank(lambda: verify_files(path, share))
    return checkpoint
