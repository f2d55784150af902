"""When a checkpoint becomes visible, which ones are kept, and which one a run resumes from.

    checkpoints/
      step-00001000/      complete and hashed (manifest.py), never changed afterwards
        manifest.json     every file with size and SHA-256, written last
        trainer.json      counters, monitor windows, metrics not yet logged
        data.json         one record per lane: where in the data it is
        config.yaml, model/   what is needed to export without the run's folder
        zero/, latest, zero_to_fp32.py   the engine's own files
      latest, best, final -> step-...    our pointers (symbolic links)

A save writes into `step-N.tmp`; each rank flushes and hashes its own files; rank 0 gathers the records,
writes the manifest, renames the folder and flushes its parent. A process killed at any moment leaves
either no `step-N` or a whole one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_encdec.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    read_manifest,
    record_file,
    verify_files,
    verify_listing,
)
from ds_encdec.launch.agreement import Agreement
from ds_encdec.launch.run_folder import flush_folder, write_atomically
from ds_encdec.types import CheckpointError, TrainingState

logger = logging.getLogger(__name__)

_REPLACED = ".replaced-"
"""Prefix of a checkpoint while another one of the same step takes its place."""

_STEP_FOLDER = re.compile(r"step-(\d{8,})")

EngineWriter = Callable[[Path], list[Path]]
"""Writes the engine's files under a folder and returns those this rank wrote (`Engine.save`)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed, verified checkpoint."""

    path: Path
    manifest: Manifest

    def read_json(self, name: str) -> Any:
        """The content of one of its JSON files."""
        return json.loads((self.path / name).read_text())


class CheckpointManager:
    """Saves, prunes and finds the checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, agreement: Agreement, *, engine_name: str, keep: int | None) -> None:
        self.folder = folder
        self._agreement = agreement
        self._engine_name = engine_name
        self._keep = keep

    def prepare(self) -> None:
        """Check that all ranks see one folder, and clear what a killed save left behind."""
        name = self._agreement.on_rank_zero(lambda: _touch(self.folder / f".probe-{os.getpid()}"))
        seen = self._agreement.gather((self.folder / name).exists())
        self._agreement.on_rank_zero(lambda: (self.folder / name).unlink())
        if not all(seen):
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            raise CheckpointError(
                f"infra.output_dir: {self.folder} is not shared: ranks {blind} do not see what rank 0 writes there. "
                "Use a folder on a file system that all nodes mount."
            )
        self._agreement.on_rank_zero(self._clear_leftovers)

    def save(
        self, step: int, write_engine: EngineWriter, write_rest: Callable[[Path], None], *, pointers: tuple[str, ...]
    ) -> float:
        """Commit `step-N` and move `pointers` to it; returns the seconds training was held up.

        `write_engine` runs on every rank, `write_rest` on rank 0 alone.
        """
        started = time.monotonic()
        final = self.folder / _name(step)
        temporary = final.with_name(final.name + ".tmp")
        self._agreement.on_rank_zero(lambda: _fresh_folder(temporary))
        own_files = write_engine(temporary)
        records = self._agreement.on_every_rank(lambda: [record_file(path, temporary) for path in own_files])
        all_records = [record for rank_records in self._agreement.gather(records) for record in rank_records]
        self._agreement.on_rank_zero(lambda: self._commit(step, temporary, final, all_records, write_rest, pointers))
        return time.monotonic() - started

    def find(self, resume: str | None) -> Checkpoint | None:
        """The checkpoint to resume from, verified by all ranks; None where there is none to resume.

        `resume`: None, `auto` (the newest whole one; damaged ones are passed over with a warning), or
        a path. Raises CheckpointError where the named one is damaged, or under `auto` all are: starting
        anew would then write over what may still be saved.
        """
        if resume is None:
            return None
        if resume != "auto":
            return self._verified(Path(resume).expanduser().resolve())
        candidates = self._agreement.on_rank_zero(self._candidates)
        for path in candidates:
            try:
                return self._verified(path)
            except CheckpointError as error:
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
            self._agreement.on_rank_zero(lambda: self._abandon_after(checkpoint.manifest.step, state.best_step))
        has_best = self._agreement.on_rank_zero(lambda: (self.folder / "best").exists())
        return state if has_best else dataclasses.replace(state, best_eval_loss=None, best_step=None)

    def _abandon_after(self, step: int, best_step: int | None) -> None:
        for later, path in committed_steps(self.folder).items():
            if later > step:
                aside = path.with_name(f"abandoned-{path.name}-{time.strftime('%Y%m%dT%H%M%S')}")
                path.rename(aside)
                logger.warning("Going back to step %d: %s is now %s.", step, path.name, aside.name)
        (self.folder / "final").unlink(missing_ok=True)
        (self.folder / "best").unlink(missing_ok=True)
        if best_step is not None and (best := self.folder / _name(best_step)).exists():
            _move_pointer(self.folder / "best", best.name)
        _move_pointer(self.folder / "latest", _name(step))

    def _verified(self, path: Path) -> Checkpoint:
        """Each rank checks its share of the files; all agree."""
        rank, world_size = self._agreement.rank, self._agreement.world_size

        def check() -> Checkpoint:
            manifest = read_manifest(path)
            verify_listing(path, manifest)
            verify_files(path, manifest.files[rank::world_size])
            return Checkpoint(path, manifest)

        return self._agreement.on_every_rank(check)

    def _candidates(self) -> list[Path]:
        return [path for _, path in sorted(committed_steps(self.folder).items(), reverse=True)]

    def _commit(
        self,
        step: int,
        temporary: Path,
        final: Path,
        engine_records: list[FileRecord],
        write_rest: Callable[[Path], None],
        pointers: tuple[str, ...],
    ) -> None:
        write_rest(temporary)
        known = {record.path for record in engine_records}
        rest = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        records = engine_records + [
            record_file(path, temporary) for path in rest if path.relative_to(temporary).as_posix() not in known
        ]
        manifest = Manifest(step, self._agreement.world_size, self._engine_name, tuple(records))
        for folder in {temporary, *(path.parent for path in rest)}:
            flush_folder(folder)
        write_atomically(temporary / MANIFEST, manifest.to_json())
        flush_folder(temporary)
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        if final.exists():
            # The same step again (it was skipped since, or reached anew). Between these two renames the
            # older one has no name that counts; `prepare` gives it back after a crash.
            os.rename(final, replaced)
        os.rename(temporary, final)
        flush_folder(self.folder)
        _delete(replaced)
        for name in ("latest", *pointers):
            _move_pointer(self.folder / name, final.name)
        self._prune()

    def _prune(self) -> None:
        if self._keep is None:
            return
        pointed = {link.resolve() for name in ("latest", "best", "final") if (link := self.folder / name).exists()}
        paths = [path for _, path in sorted(committed_steps(self.folder).items())]
        for path in paths[: -self._keep]:
            if path.resolve() not in pointed:
                _remove(path)

    def _clear_leftovers(self) -> None:
        for path in self.folder.glob(f"{_REPLACED}*"):
            original = path.with_name(path.name.removeprefix(_REPLACED))
            if original.exists():
                _delete(path)
            else:
                path.rename(original)
        for pattern in ("*.tmp", ".*.tmp", ".removed-*", ".probe-*"):
            for path in self.folder.glob(pattern):
                _delete(path)


def committed_steps(folder: Path) -> dict[int, Path]:
    """Step number → path of every committed checkpoint under `folder`."""
    found = {}
    for path in folder.glob("step-*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[1])] = path
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One of a checkpoint's JSON files (the checkpoint's commit makes it durable)."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def _touch(path: Path) -> str:
    path.touch()
    return path.name


def _fresh_folder(path: Path) -> None:
    _delete(path)
    path.mkdir(parents=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _remove(path: Path) -> None:
    """Make a folder invisible in one step, then delete it."""
    hidden = path.with_name(f".removed-{path.name}")
    _delete(hidden)
    os.rename(path, hidden)
    _delete(hidden)


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move_pointer(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
