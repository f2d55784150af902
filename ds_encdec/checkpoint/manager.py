"""Saves checkpoints, and finds the one from which a run continues. folder.py has their folder. A save has two parts. On
the main thread every rank makes its staging copy (`Engine.stage`), which pauses training. Then each rank judges its
copy, writes, flushes and hashes its own files, rank 0 gathers the records, writes the rest and the manifest, and
renames `step-N.tmp`. This part runs in a thread of every rank or at once, with a gloo group that nothing else uses. If
the state is not finite, or a disk refuses the files, the save fails alike on all ranks, and the run goes on with its
earlier checkpoints."""

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from ds_encdec.base.types import CheckpointError, NonFiniteStateError, TrainingState
from ds_encdec.checkpoint.folder import (
    Checkpoint,
    CheckpointFolder,
    begin,
    committed_steps,
    unfinished,
)
from ds_encdec.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileRecord,
    read_manifest,
    record_file,
    seal,
    verify_files,
    verify_listing,
)
from ds_encdec.engine.protocol import StagedSave
from ds_encdec.launch.agreement import ranks_in_words
from ds_encdec.launch.disk import DiskRefusedError, Writing
from ds_encdec.launch.host import machine
from ds_encdec.launch.host_collectives import HostCollectives

logger = logging.getLogger(__name__)

MAKE_ROOM = "Free space there, or lower training.save_total_limit."  # advice if a disk is too small for checkpoints

Stage = Callable[..., StagedSave]  # `Engine.stage`


@dataclass
class SaveOutcome:
    """A save and, once it is collected, its outcome; equal on all ranks but for the seconds. `ended`: its end's time,
    or its error. `blocked_seconds`: how long this rank's training was paused. `seconds`: from the staging copy to the
    commit, or 0. `problem`: why there is no such checkpoint, or None. `failures`: saves in a row that the disk
    refused."""

    state: TrainingState
    began: float = field(default_factory=time.monotonic)
    ended: Future[float] = field(default_factory=Future)
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    problem: DiskRefusedError | NonFiniteStateError | None = None
    failures: int = 0


class CheckpointManager:
    """Saves the checkpoints of one run. Every rank calls every method."""

    def __init__(self, folder: Path, collectives: HostCollectives, *, engine_name: str, keep: int | None) -> None:
        """A collective. `keep`: `training.save_total_limit`."""
        self.folder = folder
        self.files = CheckpointFolder(folder, keep=keep)
        self._collectives = collectives
        self._background = collectives.background
        self._engine_name = engine_name
        self._save: SaveOutcome | None = None  # under way
        self._failures = 0
        self.newest_step: int | None = None  # of the newest checkpoint from which the run can continue

    def prepare(self) -> None:
        """Check that all ranks see one folder and can write there, and clear leftovers of a killed save."""
        name = self._collectives.on_rank_zero(lambda: _touch(self.folder / f".probe-{os.getpid()}.tmp"))
        seen = self._collectives.gather((machine(), (self.folder / name).exists()))
        if blind := [rank for rank, (_, sees) in enumerate(seen) if not sees]:
            who = ranks_in_words(blind, {rank: where.partition(" ")[0] for rank, (where, _) in enumerate(seen)})
            raise CheckpointError(
                f"infra.output_dir: {self.folder} is not shared: {who} cannot see the files of rank 0. "
                "Use a folder on a file system that all nodes mount."
            )
        # One rank of each machine tries to write, for all of that machine.
        rank, machines = self._collectives.rank, [where for where, _ in seen]
        self._collectives.on_every_rank(
            lambda: machines.index(machines[rank]) == rank and _touch(self.folder / f".probe-{rank}.tmp")
        )
        self._collectives.on_rank_zero(self.files.clear_leftovers)

    def save(
        self,
        state: TrainingState,
        stage: Stage,
        write_rest: Callable[[Path], None],
        *,
        pointers: tuple[str, ...],
        in_background: bool,
    ) -> None:
        """Begin to save `state`, after an earlier save was collected: commit `step-N`, then point `pointers` at it.
        `write_rest` writes all files but the engine's into a folder; it is called on rank 0, in any thread."""
        assert self._save is None, "a save is under way"
        save = SaveOutcome(state)
        step = state.global_step
        make_folder = self._writing().explain_refusals()(lambda: begin(self.files.at(step)))
        try:
            folder = self._collectives.on_rank_zero(make_folder)
            staged = stage(folder, copy=in_background)
        except DiskRefusedError as error:
            save.ended.set_exception(error)
            self._save = save
            return

        def write() -> None:
            try:
                self._write_and_commit(step, staged, write_rest, pointers)
                save.ended.set_result(time.monotonic())
            except BaseException as error:  # raised by collect(); torch's CheckpointException is no Exception
                save.ended.set_exception(error)

        self._save = save
        if in_background:
            threading.Thread(target=write, name=f"save-{step}", daemon=True).start()
        else:
            write()
        save.blocked_seconds = time.monotonic() - save.began

    @property
    def save_is_over(self) -> bool:
        """True once this rank's part of a save has ended. Collect it once this is true on all ranks."""
        return self._save is not None and self._save.ended.done()

    def collect(self) -> SaveOutcome | None:
        """Wait for the save under way and return its outcome, or None. Raises errors other than the disk's."""
        save = self._save
        if save is None:
            return None
        began = time.monotonic()
        error = save.ended.exception()
        self._save = None  # not before: an interrupted wait leaves it to `close`
        save.blocked_seconds += time.monotonic() - began
        if error is None:
            save.seconds = save.ended.result() - save.began
            self._failures, self.newest_step = 0, save.state.global_step
        elif isinstance(error, DiskRefusedError | NonFiniteStateError):
            self._failures += isinstance(error, DiskRefusedError)
            save.problem = error
        else:
            raise error
        save.failures = self._failures
        return save

    def close(self) -> None:
        """Wait for a save that nobody will collect, because training raised, and log its outcome."""
        try:
            outcome = self.collect()
            if outcome is not None and self._collectives.rank == 0:
                if outcome.problem:
                    logger.error("step %d was not saved: %s", outcome.state.global_step, outcome.problem)
                else:
                    logger.info("saved step %d", outcome.state.global_step)
        except Exception:
            logger.exception("The save under way failed.")

    def adopt(self, checkpoint: Checkpoint, state: TrainingState) -> TrainingState:
        """Make `checkpoint`, from which the run continues, the newest of this folder; return its state here. Later
        steps become `abandoned-…`. Another run's best is not here: the first evaluated one becomes the best."""
        self.newest_step = checkpoint.manifest.step

        def go_back() -> bool:
            if checkpoint.path in committed_steps(self.folder.resolve()).values():  # an `abandoned-…` is not
                self.files.go_back_to(checkpoint.manifest.step, state.best_step)
            return (self.folder / "best").exists()

        return state if self._collectives.on_rank_zero(go_back) else replace(state, best_value=None, best_step=None)

    def _write_and_commit(
        self, step: int, staged: StagedSave, write_rest: Callable[[Path], None], pointers: tuple[str, ...]
    ) -> None:
        # May run in the background. All ranks raise the same error.
        folder, writing, ranks = unfinished(self.files.at(step)), self._writing(), self._background

        def judge() -> None:
            if (bad := staged.first_non_finite()) is not None:
                raise NonFiniteStateError(f"rank {ranks.rank} ({socket.gethostname()}): {bad}")

        @writing.explain_refusals()
        def write() -> list[FileRecord]:
            return [record_file(path, folder) for path in staged.write()]

        @writing.explain_refusals()
        def commit() -> None:
            write_rest(folder)
            seal(
                folder,
                step=step,
                world_size=self._collectives.world_size,
                engine=self._engine_name,
                engine_files=records,
            )
            self.files.commit(step, pointers)

        try:
            ranks.on_every_rank(judge)
            writing.num_bytes = ranks.sum(staged.num_bytes)[0]
            ranks.on_rank_zero(lambda: writing.require_space(writing.num_bytes))
            records = list(chain.from_iterable(ranks.gather_to_zero(ranks.on_every_rank(write))))
            ranks.on_rank_zero(commit)
        except (DiskRefusedError, NonFiniteStateError):
            ranks.on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True))
            raise

    def _writing(self) -> Writing:
        return Writing(self.folder, "The checkpoint", MAKE_ROOM, self._collectives.rank)


def _touch(path: Path) -> str:
    try:
        path.touch()
    except OSError as error:
        raise CheckpointError(
            f"infra.output_dir: cannot write to {path.parent} ({error.strerror}); choose another folder."
        ) from error
    return path.name


def find_checkpoint(
    folder: Path,
    collectives: HostCollectives,
    resume: str | None,
    accept: Callable[[Checkpoint], None] = lambda _: None,
    *,
    at_most: int | None = None,
) -> Checkpoint | None:
    """Return the checkpoint to resume from, verified by all ranks (a collective: every rank calls it), or None.
    `folder`: the run's own checkpoints. `resume`: None, `auto` (the newest whole one there; damaged ones are skipped
    with a warning), or a path. Rank 0 calls `accept` once the manifest and the small files are verified; its error ends
    the search, before gigabytes are hashed. `at_most`: under `auto`, the latest step that counts. Raises
    CheckpointError if the named one is damaged, or another run's while this folder has some of its own; and if under
    `auto` all are damaged: a new run would overwrite them."""
    if resume is None:
        return None
    newest_first = collectives.on_rank_zero(lambda: sorted(committed_steps(folder).items(), reverse=True))
    candidates = [path.resolve() for step, path in newest_first if at_most is None or step <= at_most]
    if resume != "auto":
        path = Path(resume).expanduser().resolve()
        collectives.on_rank_zero(lambda: read_manifest(path) and None)  # raises for anything but a checkpoint
        if candidates and path not in candidates:
            raise CheckpointError(
                f"{path} is not one of this run's checkpoints, of which {folder} holds {len(candidates)} "
                f"(newest: {candidates[0].name}). Choose another infra.output_dir, or resume one of these."
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
            f"{folder}: none of its checkpoints ({len(candidates)}) is whole; see the warnings above. Restore one, or "
            "start a new run in another infra.output_dir."
        )
    return None


def _verified(path: Path, collectives: HostCollectives, accept: Callable[[Checkpoint], None]) -> Checkpoint:
    # Rank 0 verifies the folder and the small files, then each rank its share of the large ones; all agree.
    def described() -> Checkpoint:
        manifest = read_manifest(path)
        verify_listing(path, manifest)
        # Small ones describe the checkpoint; folders hold tensors or vocabulary.
        small = (one for one in manifest.files if one.path.endswith((".json", ".yaml")) and "/" not in one.path)
        verify_files(path, tuple(small))
        checkpoint = Checkpoint(path, manifest)
        accept(checkpoint)
        return checkpoint

    checkpoint = collectives.on_rank_zero(described)

    def verify_share() -> None:
        if not os.path.lexists(path / MANIFEST):
            read_manifest(path)  # its error describes a folder that this machine does not see
        verify_files(path, checkpoint.manifest.files[collectives.rank :: collectives.world_size])

    collectives.on_every_rank(verify_share)
    return replace(checkpoint, path=path)  # this rank may see the folder under another path
