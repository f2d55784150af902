"""The folder of a run's checkpoints: names, the commit, pointers, and which ones are kept. Rank 0 alone changes it.

    checkpoints/
      step-00001000/           committed: complete and hashed (manifest.py), never changed afterwards
      step-00002000.tmp/       being written
      latest, best, final -> step-…    our pointers (symbolic links)
      abandoned-step-…-DATE/   later than the step that the run went back to; not looked at again

A process killed at any moment leaves either no `step-N` or a whole one (whole_folder.py). `.replaced-…` and
`.removed-…` are names of a moment; `clear_leftovers` mends what a kill left under them.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_encdec.checkpoint.manifest import MANIFEST, Manifest, verify_checkpoint
from ds_encdec.checkpoint.whole_folder import clear_leftovers, delete, name_it
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.record import EngineRecord, read_record
from ds_encdec.launch.disk import DiskRefusedError, flush_folder, free_bytes, unused_path
from ds_encdec.memory.job import Job, checkpoint_bytes, checkpoints_at_once
from ds_encdec.types import CheckpointError

logger = logging.getLogger(__name__)

_REMOVED = ".removed-"
"""Prefix of a checkpoint that is being deleted."""
_POINTERS = ("latest", "best", "final")
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """The files of one run's checkpoints. `keep`: newest ones that stay; None for all."""

    def __init__(self, path: Path, *, keep: int | None) -> None:
        self.path = path
        self._keep = keep

    def at(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, once it is committed."""
        return self.path / f"step-{step:08d}"

    def commit(self, step: int, pointers: Sequence[str]) -> None:
        """Make `step-N.tmp`, which is sealed, visible; move `latest` and `pointers` to it; prune.

        Raises OSError; then an earlier checkpoint of the step is what it was. What goes wrong once the checkpoint is
        visible is only warned of.
        """
        final = self.at(step)
        # New links may need space; moving them over the old ones does not.
        links = {name: _new_link(self.path / name, final.name) for name in ("latest", *pointers)}
        replaced = name_it(final)
        self._point_all(links, final)
        self._prune(replaced)

    def go_back_to(self, step: int, best_step: int | None) -> None:
        """Put later checkpoints aside as `abandoned-…` and point at `step`, and at `best_step` if it is there.

        Of those put aside at any time no more are kept than of the others: a run that nobody watches may go back often.
        """
        for later, path in committed_steps(self.path).items():
            if later > step:
                aside = unused_path(path.with_name(f"abandoned-{path.name}-{time.strftime('%Y%m%dT%H%M%S')}"))
                path.rename(aside)
                logger.warning("Going back to step %d: %s is now %s.", step, path.name, aside.name)
        # By the moment at which they were put aside, which ends their names; then by step.
        abandoned = sorted(self.path.glob("abandoned-*"), key=lambda path: path.name.split("-", 3)[3:])
        for path in abandoned[: -self._keep] if self._keep else ():
            logger.warning("training.save_total_limit=%s: deleting %s.", self._keep, path.name)
            delete(path)
        final = self.path / "final"
        if not final.exists():  # it was later; where the run was complete at `step` or before, it still is
            final.unlink(missing_ok=True)
        if best_step is not None and (self.at(best_step)).exists():
            self._point("best", best_step)
        else:
            (self.path / "best").unlink(missing_ok=True)
        self._point("latest", step)

    def clear_leftovers(self) -> None:
        """Mend what a killed process left: give back what was being replaced, delete what was never committed."""
        clear_leftovers(self.path)
        for pattern in (f"{_REMOVED}*", ".probe-*"):
            for path in self.path.glob(pattern):
                delete(path)

    def _point(self, name: str, step: int) -> None:
        os.replace(_new_link(self.path / name, self.at(step).name), self.path / name)

    def _point_all(self, links: Mapping[str, Path], committed: Path) -> None:
        """Move new links over the pointers, for good. The checkpoint stands, whatever the disk says to this."""
        try:
            for name, link in links.items():
                os.replace(link, self.path / name)
            flush_folder(self.path)
        except OSError as error:
            logger.warning(
                "%s is saved, but not all of %s could be pointed at it: %s", committed.name, ", ".join(links), error
            )

    def _prune(self, replaced: Path) -> None:
        """Delete what is not kept. The new checkpoint stands: what cannot be deleted is no reason to doubt it."""
        try:
            delete(replaced)
            superfluous = self._superfluous()
            if len(superfluous) > 1:  # one makes room for each new one; more are due to a limit that was lowered
                names = ", ".join(path.name for path in superfluous)
                logger.warning("training.save_total_limit=%s: deleting %s.", self._keep, names)
            for path in superfluous:
                hidden = path.with_name(f"{_REMOVED}{path.name}")
                delete(hidden)
                os.rename(path, hidden)  # invisible in one step
                delete(hidden)
        except OSError as error:
            logger.warning("An old checkpoint could not be deleted (training.save_total_limit): %s", error)

    def _superfluous(self) -> list[Path]:
        if self._keep is None:
            return []
        pointed = {link.resolve() for name in _POINTERS if (link := self.path / name).exists()}
        paths = [path for _, path in sorted(committed_steps(self.path).items())]
        return [path for path in paths[: -self._keep] if path.resolve() not in pointed]


def committed_steps(folder: Path) -> dict[int, Path]:
    """Step number → path of every committed checkpoint under `folder`."""
    found = {}
    for path in folder.glob("step-*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and os.path.lexists(path / MANIFEST):
            found[int(match[1])] = path
    return found


def _new_link(link: Path, target: str) -> Path:
    """A link to `target` that can take the place of `link`."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    return temporary


def check_room(folder: Path, config: FullConfig, job: Job) -> None:
    """Warn where less is free in `folder` than the checkpoints take that are to come; those that are there count.

    Raises DiskRefusedError instead with `infra.require_disk_space`.
    """
    training = config.training
    size = checkpoint_bytes(job)
    most = checkpoints_at_once(training, math.ceil(training.num_train_steps / training.save_steps))
    needed = size * max(1, most - len(committed_steps(folder)))
    free = free_bytes(folder)
    if free is None or free >= needed:
        return
    problem = (
        f"infra.output_dir: {folder} has {free:,} bytes free, but {needed:,} are needed: the run has up to {most} "
        f"checkpoints of {size:,} bytes at a time (training.save_total_limit={training.save_total_limit}, the best, "
        "and the one that is written). Free space there, lower training.save_total_limit, or choose another folder."
    )
    if config.infra.require_disk_space:
        raise DiskRefusedError(f"{problem} (infra.require_disk_space=true)")
    logger.warning("%s A save that does not fit fails; infra.require_disk_space=true would refuse to start.", problem)


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
