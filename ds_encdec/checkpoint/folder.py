"""The folder of a run's checkpoints: names, the commit, pointers, and which ones are kept. Rank 0 alone changes it.

    checkpoints/
      step-00001000/           committed: complete and hashed (manifest.py), never changed afterwards
      step-00002000.tmp/       being written
      latest, best, final -> step-…    our pointers (symbolic links)
      abandoned-step-…-DATE/   later than the step that the run went back to; not looked at again

A process killed at any moment leaves either no `step-N` or a whole one. `.replaced-…` and `.removed-…` are names of
a moment; `clear_leftovers` mends what a kill left under them.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.launch.atomic_files import flush_folder

logger = logging.getLogger(__name__)

_REPLACED = ".replaced-"
"""Prefix of a checkpoint while another one of the same step takes its place."""
_REMOVED = ".removed-"
"""Prefix of a checkpoint that is being deleted."""
_POINTERS = ("latest", "best", "final")
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """The files of one run's checkpoints. `keep`: newest ones that stay; None for all."""

    def __init__(self, path: Path, *, keep: int | None) -> None:
        self.path = path
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty `step-N.tmp` to write into. Raises OSError."""
        temporary = self.temporary(step)
        _delete(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it is committed."""
        return self.path / f"{_name(step)}.tmp"

    def commit(self, step: int, pointers: Sequence[str]) -> None:
        """Make `step-N.tmp`, which is sealed, visible; move `latest` and `pointers` to it; prune.

        Raises OSError; then an earlier checkpoint of the step is what it was. What goes wrong once the checkpoint is
        visible is only warned of.
        """
        temporary, final = self.temporary(step), self.path / _name(step)
        # New links may need space; moving them over the old ones does not.
        links = {name: _new_link(self.path / name, final.name) for name in ("latest", *pointers)}
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        if final.exists():
            _delete(replaced)  # left where it could not be deleted before
            # The same step again (it was skipped since, or reached anew). Between these two renames the
            # older one has no name that counts; `clear_leftovers` gives it back after a crash.
            os.rename(final, replaced)
        try:
            os.rename(temporary, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        self._point_all(links, final)
        self._prune(replaced)

    def discard(self, step: int) -> None:
        """Remove what a failed save of `step` has written, as far as the file system lets us."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def go_back_to(self, step: int, best_step: int | None) -> None:
        """Put later checkpoints aside as `abandoned-…` and point at `step`, and at `best_step` if it is there.

        Of those put aside at any time no more are kept than of the others: a run that nobody watches may go back often.
        """
        for later, path in committed_steps(self.path).items():
            if later > step:
                aside = _unused(path.with_name(f"abandoned-{path.name}-{time.strftime('%Y%m%dT%H%M%S')}"))
                path.rename(aside)
                logger.warning("Going back to step %d: %s is now %s.", step, path.name, aside.name)
        for path in self._superfluous_abandoned():
            logger.warning("training.save_total_limit=%s: deleting %s.", self._keep, path.name)
            _delete(path)
        final = self.path / "final"
        if not final.exists():  # it was later; where the run was complete at `step` or before, it still is
            final.unlink(missing_ok=True)
        if best_step is not None and (self.path / _name(best_step)).exists():
            self._point("best", best_step)
        else:
            (self.path / "best").unlink(missing_ok=True)
        self._point("latest", step)

    def clear_leftovers(self) -> None:
        """Mend what a killed process left: give back what was being replaced, delete what was never committed."""
        for path in self.path.glob(f"{_REPLACED}*"):
            original = path.with_name(path.name.removeprefix(_REPLACED))
            if original.exists():
                _delete(path)
            else:
                path.rename(original)
        for pattern in ("*.tmp", ".*.tmp", f"{_REMOVED}*", ".probe-*"):
            for path in self.path.glob(pattern):
                _delete(path)

    def _point(self, name: str, step: int) -> None:
        os.replace(_new_link(self.path / name, _name(step)), self.path / name)

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
            _delete(replaced)
            superfluous = self._superfluous()
            if len(superfluous) > 1:  # one makes room for each new one; more are due to a limit that was lowered
                names = ", ".join(path.name for path in superfluous)
                logger.warning("training.save_total_limit=%s: deleting %s.", self._keep, names)
            for path in superfluous:
                hidden = path.with_name(f"{_REMOVED}{path.name}")
                _delete(hidden)
                os.rename(path, hidden)  # invisible in one step
                _delete(hidden)
        except OSError as error:
            logger.warning("An old checkpoint could not be deleted (training.save_total_limit): %s", error)

    def _superfluous_abandoned(self) -> list[Path]:
        if self._keep is None:
            return []
        # By the moment at which they were put aside, which ends their names; then by step.
        return sorted(self.path.glob("abandoned-*"), key=lambda path: path.name.split("-", 3)[3:])[: -self._keep]

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


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _unused(path: Path) -> Path:
    """`path`, or where there is one already, with the first number that is free."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def _new_link(link: Path, target: str) -> Path:
    """A link to `target` that can take the place of `link`."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    return temporary


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
