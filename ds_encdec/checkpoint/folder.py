"""Folders that appear under their names only when completely written; the folder of a run's checkpoints.

`NAME.tmp` is being written; `.replaced-NAME` is the earlier folder, while `NAME.tmp` takes its name. A process killed
at any moment leaves the earlier folder or the new one, and `clear_leftovers` repairs the rest.

    checkpoints/
      step-00001000/           committed: complete and hashed (manifest.py), never changed afterwards
      step-00002000.tmp/       being written, or deleted
      latest, best, final -> step-…    our pointers (symbolic links)
      abandoned-step-…-DATE/   later than the step to which the run went back; never read again

Only rank 0 changes it."""

import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_encdec.base.quantities import count
from ds_encdec.base.types import CheckpointError, TrainingState
from ds_encdec.checkpoint.manifest import MANIFEST, DamagedCheckpointError, Manifest, verify_checkpoint
from ds_encdec.config.yaml.plain_files import read_json
from ds_encdec.engine.protocol import read_record
from ds_encdec.launch.disk import Writing, flush_folder, make_folder, unused_path

logger = logging.getLogger(__name__)

_REPLACED = ".replaced-"
_POINTERS = ("latest", "best", "final")
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def unfinished(final: Path) -> Path:
    """Return the folder in which `final` is written."""
    return final.with_name(f"{final.name}.tmp")


def begin(final: Path) -> Path:
    """Create `unfinished(final)` as an empty folder. Raises OSError."""
    delete(unfinished(final))
    make_folder(final.parent)
    unfinished(final).mkdir()
    return unfinished(final)


def rename_into_place(final: Path) -> Path:
    """Rename `unfinished(final)`, whose content is durable, and flush the name; return an earlier folder's new path.
    Raises OSError; then an earlier folder has its name again."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    delete(replaced)  # an earlier deletion may have failed
    if final.exists():
        # A kill between these two renames leaves the earlier one without its name; `clear_leftovers` restores it.
        os.rename(final, replaced)
    try:
        os.rename(unfinished(final), final)
        flush_folder(final.parent)
    except OSError:
        if final.exists():  # its name may be lost with the power: nothing may rely on it
            os.rename(final, unfinished(final))
        if replaced.exists():
            os.rename(replaced, final)
        raise
    return replaced


def clear_leftovers(folder: Path, name: str = "*") -> None:
    """Repair leftovers of killed processes for `name` in `folder`: restore replaced folders, delete the rest."""
    for replaced in folder.glob(f"{_REPLACED}{name}"):
        original = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if original.exists():
            delete(replaced)
        else:
            replaced.rename(original)
    for path in folder.glob(f"{name}.tmp"):
        delete(path)


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def written_whole(out: Path, *, replace: bool = False) -> Iterator[tuple[Path, Writing]]:
    """Yield an empty folder, which is named `out` at the end or removed after an error, and its Writing. Call its
    `require_space` with the bytes to come. The next attempt repairs the leftovers of a kill. Raises CheckpointError if
    `out` exists and is not empty, unless it is to be replaced, and DiskRefusedError if the file system takes no
    more."""
    parent = out.absolute().parent
    writing = Writing(parent, str(out), "Free space there, or name a folder on another file system.")
    with writing.explain_refusals():
        clear_leftovers(parent, glob.escape(out.name))
        if not replace:
            refuse_existing(out)
        try:
            yield begin(out), writing
            for path in (unfinished(out), *unfinished(out).rglob("*")):
                flush_folder(path)  # a network's file system may refuse only now
            delete(rename_into_place(out))
        except BaseException:
            shutil.rmtree(unfinished(out), ignore_errors=True)
            raise


def refuse_existing(out: Path) -> None:
    """Raise CheckpointError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: nothing was written. Name another folder")


class CheckpointFolder:
    """The files of one run's checkpoints. `keep`: number of newest ones that stay; None: all."""

    def __init__(self, path: Path, *, keep: int | None) -> None:
        self.path = path
        self._keep = keep

    def at(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, once it is committed."""
        return self.path / f"step-{step:08d}"

    def commit(self, step: int, pointers: Sequence[str]) -> None:
        """Make the sealed `step-N.tmp` visible, point `latest` and `pointers` at it, delete checkpoints beyond `keep`:
        each of the three is durable before the next begins. Raises OSError if the first is not; then an earlier
        checkpoint of the step is unchanged. Later errors are only warnings."""
        final = self.at(step)
        # New links may need space; moving them over the old ones does not.
        links = {name: _new_link(self.path / name, final.name) for name in ("latest", *pointers)}
        replaced = rename_into_place(final)
        try:
            for name, link in links.items():
                self._clear_for_link(name)
                os.replace(link, self.path / name)
            flush_folder(self.path)
        except OSError as error:
            logger.warning("%s is saved, but not all of %s point at it: %s", final.name, ", ".join(links), error)
            return
        try:
            delete(replaced)
            pointed = {link.resolve() for name in _POINTERS if (link := self.path / name).exists()}
            older = [path for _, path in sorted(committed_steps(self.path).items())]
            superfluous = [path for path in older[: -self._keep] if path.resolve() not in pointed] if self._keep else []
            for path in superfluous:
                delete(unfinished(path))
                os.rename(path, unfinished(path))  # invisible in one step
                delete(unfinished(path))
        except OSError as error:
            logger.warning("An old checkpoint could not be deleted (training.save_total_limit): %s", error)

    def clear_leftovers(self) -> None:
        """Repair leftovers of killed processes, remove links to nothing, and put aside folders named as pointers."""
        clear_leftovers(self.path)
        for name in _POINTERS:
            self._clear_for_link(name)
            if not (self.path / name).exists():  # a power loss may have kept the link alone
                delete(self.path / name)

    def _clear_for_link(self, name: str) -> None:
        if (self.path / name).is_dir() and not (self.path / name).is_symlink():  # as in a copy that followed links
            self._abandon(self.path / name, "It is no link")

    def _abandon(self, path: Path, why: str) -> None:
        aside = unused_path(path.with_name(f"abandoned-{path.name}-{time.strftime('%Y%m%dT%H%M%S')}"))
        path.rename(aside)
        logger.warning("%s: %s is now %s.", why, path.name, aside.name)

    def is_final(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is the one that has completed the run."""
        return (self.path / "final").resolve() == self.at(step).resolve()

    def go_back_to(self, step: int, best_step: int | None) -> None:
        """Point at `step` and `best_step`, then rename later checkpoints to `abandoned-…` (`keep` of these stay)."""
        for name, pointed in (("best", best_step), ("latest", step)):
            if pointed is not None and self.at(pointed).exists():
                os.replace(_new_link(self.path / name, self.at(pointed).name), self.path / name)
            else:
                (self.path / name).unlink(missing_ok=True)
        flush_folder(self.path)
        for later, path in committed_steps(self.path).items():
            if later > step:
                self._abandon(path, f"Going back to step {step}")
        # Their names end with the moment of the rename, which sorts them, and then the step.
        abandoned = sorted(self.path.glob("abandoned-step-*"), key=lambda path: path.name.split("-", 3)[3:])
        for path in abandoned[: -self._keep] if self._keep else ():
            logger.warning("training.save_total_limit=%s: deleting %s.", self._keep, path.name)
            delete(path)
        final = self.path / "final"
        if not final.exists():  # it was later; a run that was complete at `step` or before still is
            final.unlink(missing_ok=True)


def committed_steps(folder: Path) -> dict[int, Path]:
    """Return step number → path of every committed checkpoint under `folder`."""
    return {
        int(match[1]): path
        for path in folder.glob("step-*")
        if (match := _STEP_FOLDER.fullmatch(path.name)) and os.path.lexists(path / MANIFEST)
    }


def _new_link(link: Path, target: str) -> Path:
    temporary = link.with_name(f".{link.name}.tmp")
    delete(temporary)
    temporary.symlink_to(target)
    return temporary


class CheckpointJson(dict[str, Any]):
    """The content of a JSON file of a checkpoint. Raises DamagedCheckpointError for a key that it lacks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = read_json(path, None)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
        super().__init__(content)

    def __missing__(self, key: str) -> Any:
        raise DamagedCheckpointError(f"{self._path} has no {key!r}, so ds_encdec did not write it.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed, verified checkpoint."""

    path: Path
    manifest: Manifest

    def read_json(self, name: str) -> CheckpointJson:
        """Return the content of a JSON file of the checkpoint."""
        return CheckpointJson(self.path / name)

    def __str__(self) -> str:
        record, manifest = read_record(self.path), self.manifest
        return (
            f"{self.path}: whole; step {manifest.step:,}, {manifest.engine} {record.sharding_stage} on "
            f"{count(record.world_size, 'rank')}, {len(manifest.files)} files, {manifest.num_bytes / 1e9:.3f} GB"
        )

    def training_state(self) -> TrainingState:
        """Return the saved counters. Raises DamagedCheckpointError."""
        try:
            return TrainingState.from_dict(self.read_json("trainer.json")["state"])
        except (TypeError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{self.path / 'trainer.json'}: `state` was not written by ds_encdec: {error}."
            ) from error


def verify_checkpoints(path: Path) -> Iterator[Checkpoint]:
    """Yield every whole checkpoint at `path` (one, or those of a run or folder) by step, after hashing all its files.
    Raises CheckpointError at the end for damaged ones, naming a file of each, and at once without a checkpoint."""
    path = path.expanduser().resolve()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run's folder, or one of its checkpoints.")
    damage = []
    found = {} if os.path.lexists(path / MANIFEST) else committed_steps(path / "checkpoints") or committed_steps(path)
    # A path that is neither a run nor a folder of checkpoints should be a checkpoint: its manifest has the problem.
    for _, checkpoint in sorted(found.items()) or [(0, path)]:
        try:
            manifest = verify_checkpoint(checkpoint)
            read_record(checkpoint)
            yield Checkpoint(checkpoint, manifest)
        except CheckpointError as error:
            damage.append(str(error))
    if damage:
        raise CheckpointError("\n".join(damage))
