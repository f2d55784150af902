"""When a checkpoint becomes visible, and which one a run resumes from. How its folder looks: folder.py.

A save has two parts. On the main thread every rank makes its staging copy (`Engine.stage`); that holds training up.
Then each rank writes, flushes and hashes its own files, rank 0 gathers the records, writes the rest and the manifest,
and renames `step-N.tmp`. The second part runs in a thread of every rank while training goes on, or at once; it is the
same code, and talks to the other ranks through a gloo group that nothing else uses.

A disk that does not take the files is no reason to end a run: the save fails, alike on all ranks, what it wrote is
removed, and earlier checkpoints are what they were.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_encdec.checkpoint.folder import CheckpointFolder, committed_steps
from ds_encdec.checkpoint.manifest import (
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
    record_file,
    verify_files,
    verify_listing,
)
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch.agreement import Agreement
from ds_encdec.launch.run_folder import disk_error
from ds_encdec.types import CheckpointError, TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")

Stage = Callable[..., StagedSave]
"""`Engine.stage`."""
WriteRest = Callable[[Path], None]
"""Writes what a checkpoint holds beside the engine's files under a folder; called on rank 0, in any thread."""

_ADVICE = {
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f).",
    errno.EROFS: "Make its file system writable again.",
}
_FREE_SPACE = "Free space there, or lower training.save_total_limit."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed, verified checkpoint."""

    path: Path
    manifest: Manifest

    def read_json(self, name: str) -> Any:
        """The content of one of its JSON files."""
        return json.loads((self.path / name).read_text())


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended; equal on all ranks but for the seconds.

    `state`: the one that was saved. `num_bytes`: of all files. `blocked_seconds`: how long this rank's training was
    held up; `seconds`: from the staging copy to the commit. `problem`: None, or why there is no such checkpoint.
    """

    state: TrainingState
    num_bytes: int
    blocked_seconds: float
    seconds: float
    problem: str | None


class _DiskRefusedError(CheckpointError):
    """A file system does not take a checkpoint. A save fails by it, a run does not."""


@dataclass
class _SaveUnderWay:
    """A save between its staging copy and `CheckpointManager.collect`."""

    state: TrainingState
    began: float
    ended: float = 0.0
    blocked_seconds: float = 0.0
    num_bytes: int = 0
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def run(self, write: Callable[[], int]) -> None:
        """Call `write`, which returns the bytes written, and keep what comes of it."""
        try:
            self.num_bytes = write()
        except BaseException as error:  # raised by collect(); torch's CheckpointException is no Exception
            self.error = error
        self.ended = time.monotonic()


class CheckpointManager:
    """Saves and finds the checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, agreement: Agreement, *, engine_name: str, keep: int | None) -> None:
        """A collective: makes a group of its own. `keep`: `training.save_total_limit`."""
        self.folder = folder
        self._files = CheckpointFolder(folder, keep=keep)
        self._agreement = agreement
        self._background = agreement.twin()
        self._engine_name = engine_name
        self._save: _SaveUnderWay | None = None

    def prepare(self) -> None:
        """Check that all ranks see one folder that can be written, and clear what a killed save left behind."""
        name = self._agreement.on_rank_zero(lambda: _touch(self.folder / f".probe-{os.getpid()}"))
        seen = self._agreement.gather((self.folder / name).exists())
        if not all(seen):
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            raise CheckpointError(
                f"infra.output_dir: {self.folder} is not shared: ranks {blind} do not see what rank 0 writes there. "
                "Use a folder on a file system that all nodes mount."
            )
        self._agreement.on_every_rank(lambda: _touch(self.folder / f"{name}-{self._agreement.rank}"))
        self._agreement.on_rank_zero(self._files.clear_leftovers)

    def save(
        self,
        state: TrainingState,
        stage: Stage,
        write_rest: WriteRest,
        *,
        pointers: tuple[str, ...],
        in_background: bool,
    ) -> None:
        """Begin to save `state`: commit `step-N`, then move `pointers` to it. Its outcome comes from `collect`.

        The outcome of an earlier save must have been collected. Not in the background, it is all done on return.
        """
        assert self._save is None, "a save is under way"
        save = self._save = _SaveUnderWay(state, began=time.monotonic())
        step = state.global_step
        try:
            folder = self._agreement.on_rank_zero(lambda: self._on_disk(lambda: self._files.begin(step), 0))
        except _DiskRefusedError as error:
            save.error, save.ended = error, time.monotonic()
            return
        staged = stage(folder, copy=in_background)

        def write() -> int:
            return self._write_and_commit(step, staged, write_rest, pointers)

        if in_background:
            save.thread = threading.Thread(target=save.run, args=(write,), name=f"save-{step}", daemon=True)
            save.thread.start()
        else:
            save.run(write)
        save.blocked_seconds = time.monotonic() - save.began

    @property
    def save_is_over(self) -> bool:
        """Whether this rank's part of a save has ended. Collect it once all ranks say so."""
        return self._save is not None and (self._save.thread is None or not self._save.thread.is_alive())

    def collect(self) -> SaveOutcome | None:
        """Wait for the save under way and say how it ended; None where there is none.

        Raises what went wrong other than on the disk.
        """
        if self._save is None:
            return None
        began = time.monotonic()
        if self._save.thread is not None:
            self._save.thread.join()
            self._save.blocked_seconds += time.monotonic() - began
        save, self._save = self._save, None
        if save.error is not None and not isinstance(save.error, _DiskRefusedError):
            raise save.error
        problem = None if save.error is None else str(save.error)
        return SaveOutcome(save.state, save.num_bytes, save.blocked_seconds, save.ended - save.began, problem)

    def close(self) -> None:
        """Wait for a save that nobody will collect, because training raised, and log how it ended."""
        try:
            outcome = self.collect()
        except Exception:
            logger.exception("The save under way failed.")
            return
        if outcome is None or self._agreement.rank != 0:
            return
        if outcome.problem:
            logger.error("step %d was not saved: %s", outcome.state.global_step, outcome.problem)
        else:
            logger.info("saved step %d", outcome.state.global_step)

    def find(self, resume: str | None, accept: Callable[[Checkpoint], None] = lambda _: None) -> Checkpoint | None:
        """The checkpoint to resume from, verified by all ranks; None where there is none to resume.

        `resume`: None, `auto` (the newest whole one; damaged ones are passed over with a warning), or a path. `accept`
        is called on every rank with a checkpoint of which only the manifest and the small files have been verified,
        and raises where this run cannot go on from it: that ends the search, before gigabytes are hashed.

        Raises CheckpointError where the named one is damaged, or another run's while this folder has some of its own;
        and where under `auto` all are damaged: starting anew would then write over what may still be saved.
        """
        if resume is None:
            return None
        candidates = self._agreement.on_rank_zero(self._candidates)
        if resume != "auto":
            path = Path(resume).expanduser().resolve()
            self._agreement.on_every_rank(lambda: read_manifest(path))  # what is no checkpoint is called that
            if candidates and path not in candidates:
                raise CheckpointError(
                    f"{path} is not one of this run's checkpoints, of which {self.folder} holds {len(candidates)} "
                    f"(newest: {candidates[0].name}). Two runs in one folder would be mixed up: choose another "
                    "infra.output_dir to go on from it, or resume one of this folder's own."
                )
            return self._verified(path, accept)
        for path in candidates:
            try:
                return self._verified(path, accept)
            except DamagedCheckpointError as error:
                if self._agreement.rank == 0:
                    logger.warning("Passing over a damaged checkpoint: %s", error)
        if candidates:
            raise CheckpointError(
                f"{self.folder}: none of its {len(candidates)} checkpoints is whole (the warnings above say why). "
                "Restore one, or start a new run in another infra.output_dir."
            )
        return None

    def adopt(self, checkpoint: Checkpoint, state: TrainingState) -> TrainingState:
        """Make `checkpoint`, which the run goes on from, the newest of this folder; returns its state here.

        Later steps are put aside as `abandoned-…`, so that the run's history is one line again. Where the
        checkpoint is another run's, its best one is not here, and the first evaluated one will be.
        """
        if checkpoint.path.parent == self.folder.resolve():
            self._agreement.on_rank_zero(lambda: self._files.go_back_to(checkpoint.manifest.step, state.best_step))
        has_best = self._agreement.on_rank_zero(lambda: (self.folder / "best").exists())
        return state if has_best else dataclasses.replace(state, best_eval_loss=None, best_step=None)

    def _verified(self, path: Path, accept: Callable[[Checkpoint], None]) -> Checkpoint:
        """Each rank checks its share of the large files; all agree."""
        rank, world_size = self._agreement.rank, self._agreement.world_size

        def described() -> Checkpoint:
            manifest = read_manifest(path)
            verify_listing(path, manifest)
            verify_files(path, manifest.descriptions())
            checkpoint = Checkpoint(path, manifest)
            accept(checkpoint)
            return checkpoint

        checkpoint = self._agreement.on_every_rank(described)
        self._agreement.on_every_rank(lambda: verify_files(path, checkpoint.manifest.files[rank::world_size]))
        return checkpoint

    def _candidates(self) -> list[Path]:
        return [path.resolve() for _, path in sorted(committed_steps(self.folder).items(), reverse=True)]

    def _write_and_commit(self, step: int, staged: StagedSave, write_rest: WriteRest, pointers: tuple[str, ...]) -> int:
        """The part of a save that may run in the background; returns the bytes of the checkpoint.

        Raises the same error on all ranks, _DiskRefusedError where a disk did not take the files.
        """
        talk, folder = self._background, self._files.temporary(step)

        def write_own() -> list[FileRecord]:
            return [record_file(path, folder) for path in staged.write()]

        def commit(records: list[FileRecord]) -> int:
            manifest = self._describe(step, folder, records, write_rest)
            self._files.commit(step, manifest, pointers)
            return manifest.num_bytes

        needed = sum(talk.gather(staged.num_bytes))
        try:
            talk.on_rank_zero(lambda: self._require_space(needed))
            own = talk.on_every_rank(lambda: self._on_disk(write_own, needed))
            records = [record for rank_records in talk.gather(own) for record in rank_records]
            return talk.on_rank_zero(lambda: self._on_disk(lambda: commit(records), needed))
        except _DiskRefusedError:
            talk.on_rank_zero(lambda: self._files.discard(step))
            raise

    def _describe(self, step: int, folder: Path, records: list[FileRecord], write_rest: WriteRest) -> Manifest:
        """Write the files that are not the engine's; the manifest of all."""
        write_rest(folder)
        known = {record.path for record in records}
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        rest = [record_file(path, folder) for path in files if path.relative_to(folder).as_posix() not in known]
        return Manifest(step, self._agreement.world_size, self._engine_name, tuple(records + rest))

    def _require_space(self, needed_bytes: int) -> None:
        usage = shutil.disk_usage(self.folder)
        if usage.total and usage.free < needed_bytes:  # some network file systems report 0 for everything
            raise self._refused("too little space is free", _FREE_SPACE, needed_bytes)

    def _on_disk(self, action: Callable[[], T], needed_bytes: int) -> T:
        """What `action` returns. Raises _DiskRefusedError where the file system refuses it."""
        try:
            return action()
        except Exception as error:
            refusal = disk_error(error)
            if refusal is None:
                raise
            cause = f"rank {self._agreement.rank}: {refusal}"
            raise self._refused(cause, _ADVICE.get(refusal.errno or 0, _FREE_SPACE), needed_bytes) from error

    def _refused(self, cause: str, advice: str, needed_bytes: int) -> _DiskRefusedError:
        """The error, with the space that is free now: some more will be when what was written is removed."""
        free_bytes = shutil.disk_usage(self.folder).free
        takes = f"takes about {needed_bytes:,} bytes and " if needed_bytes else ""
        return _DiskRefusedError(f"{cause}. The checkpoint {takes}has {free_bytes:,} free in {self.folder}. {advice}")


def _touch(path: Path) -> str:
    try:
        path.touch()
    except OSError as error:
        raise CheckpointError(
            f"infra.output_dir: cannot write to {path.parent} ({error.strerror}); choose another folder."
        ) from error
    return path.name
