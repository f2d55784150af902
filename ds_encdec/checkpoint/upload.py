"""A run's outputs on another file system (`infra.upload_to`): what fsspec reaches, such as S3, GCS or a Hub repository.

Rank 0 copies, in a thread beside training: after each save the checkpoints that are not there yet, the newest first,
and the run's own small files; at the end what was exported, too. The manifest of a checkpoint, and the configuration of
a model folder, go last, so that half a copy is never taken for a whole one. What fails is a warning, and is tried again
at the next save and at the end. Nothing is deleted there but what is being replaced.
"""

import logging
import threading
from pathlib import Path
from typing import Any

from ds_encdec.callbacks import Callback
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.types import TrainingState

logger = logging.getLogger(__name__)

_LAST = ("config.json", MANIFEST)
"""The files without which a folder is not taken for a whole one, in the order in which they are looked for."""


class Uploads(Callback):
    """Copies what `run` has saved to `url`; None: nothing. A context manager around the run, which waits at its end."""

    def __init__(self, run: RunFolder, url: str | None) -> None:
        self._run, self._url = run, url
        self._there: set[Path] = set()  # folders that this process has copied
        self._wanted, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """Begin to copy what is new, or do so as soon as an earlier copy has ended; returns at once."""
        if self._url is None:
            return
        self._there.discard(checkpoint)  # a rollback saves a step again
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
            self._thread.start()

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Copy the rest, where anything was saved. The second Ctrl-C ends the wait."""
        if self._thread is None:
            return
        self._over.set()
        self._wanted.set()
        logger.info("uploading what is left to %s; the run is over, this may be interrupted", self._url)
        self._thread.join()

    def _work(self) -> None:
        over = False
        while not over:
            self._wanted.wait()
            self._wanted.clear()
            over = self._over.is_set()
            try:
                self._copy_new()
            except Exception as error:  # whatever a file system raises
                again = "Copy the run's folder there yourself." if over else "It is tried again after the next save."
                logger.warning("infra.upload_to=%s: %s: %s. %s", self._url, type(error).__name__, error, again)

    def _copy_new(self) -> None:
        from fsspec.core import url_to_fs  # late: few runs ask for it

        files, root = url_to_fs(self._url)
        endings = (".json", ".jsonl", ".yaml")
        self._put(files, root, [path for path in self._run.root.iterdir() if path.suffix in endings])
        steps = committed_steps(self._run.checkpoints)
        exports = [path.parent for path in self._run.exports.glob("*/config.json")] if self._over.is_set() else []
        for folder in [*(path for _, path in sorted(steps.items(), reverse=True)), *exports]:
            if folder not in self._there:
                self._copy(files, root, folder)
                self._there.add(folder)

    def _copy(self, files: Any, root: str, folder: Path) -> None:
        """Copy a folder whole, unless the same one is there. One that training deletes meanwhile is left out."""
        try:
            last = next(folder / name for name in _LAST if (folder / name).exists())
            mark, content = self._target(root, last), last.read_bytes()
            is_there = files.exists(mark)
            if is_there and last.name == MANIFEST and files.cat_file(mark) == content:  # it holds the others' hashes
                return
            if is_there:
                files.rm_file(mark)
            self._put(files, root, [path for path in folder.rglob("*") if path.is_file() and path != last])
            files.makedirs(mark.rpartition("/")[0], exist_ok=True)
            files.pipe_file(mark, content)
        except (FileNotFoundError, StopIteration):
            if folder.exists():
                raise
            logger.info("%s was deleted (training.save_total_limit) before it was uploaded", folder)
            return
        logger.info("uploaded %s to %s", folder.name, self._url)

    def _put(self, files: Any, root: str, paths: list[Path]) -> None:
        targets = {str(path): self._target(root, path) for path in paths}
        for parent in {target.rpartition("/")[0] for target in targets.values()}:
            files.makedirs(parent, exist_ok=True)
        files.put([*targets], [*targets.values()])

    def _target(self, root: str, path: Path) -> str:
        return f"{root.rstrip('/')}/{path.relative_to(self._run.root).as_posix()}"
