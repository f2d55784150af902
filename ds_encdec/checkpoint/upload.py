"""Copies a run's outputs to another file system (`infra.upload_to`) by fsspec, such as S3, GCS or a Hub repository.

Rank 0 copies, in a thread beside training: after each save the new checkpoints, the newest first, and the run's own
small files; at the end also the exports. The manifest of a checkpoint and the configuration of a model folder go last,
so that half a copy never counts as a whole one. A failed copy is a warning, and is tried again at the next save and at
the end. Only replaced files are deleted there.

A launcher ends all ranks soon after one exits with an error code, so the ranks of a run that is asked to stop wait
together for rank 0's copies. A run that fails does not wait: its folder has the saved files."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ds_encdec.base.types import Callback, ConfigError, Preempted, TrainingState
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import Heartbeat
from ds_encdec.launch.run_folder import RunFolder

logger = logging.getLogger(__name__)

_LAST = ("config.json", MANIFEST)  # files without which a folder does not count as whole, in the order of the search


class Uploads(Callback):
    """Copies the saved files of `run` to `url`; None: nothing, as on ranks that do not copy."""

    def __init__(self, run: RunFolder, url: str | None) -> None:
        self._run, self._url = run, url
        self._thread: threading.Thread | None = None

    def claim(self, resume: str | None) -> None:
        """Raise ConfigError if a new run would replace another's copies; an unreachable file system is a warning."""
        if self._url is None or resume not in (None, "auto") or committed_steps(self._run.checkpoints):
            return
        try:
            files, root = self._open()
            is_taken = files.exists(self._target(root, self._run.run_json))
        except Exception as error:  # whatever a file system raises
            self._warn(error, "It is tried again after each save.")
            return
        if is_taken:
            raise ConfigError(
                f"infra.upload_to: {self._url} already holds the copies of a run (run.json). Name another folder or, "
                "to continue that run, copy its checkpoints/step-N back and name it in `--resume`."
            )

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """Begin to copy new files, once an earlier copy has ended; returns at once."""
        if self._url is not None:
            self._begin(is_end=False)

    @contextmanager
    def awaited_by_all(self, collectives: HostCollectives, heartbeat: Heartbeat) -> Iterator[None]:
        """Keep every rank of a run that is asked to stop until the rest is copied. A failing run does not wait."""
        try:
            yield
        except Preempted:
            self._begin_end()
            with heartbeat.busy(), suppress(RuntimeError):  # another rank has left
                # In slices: no exchange of the ranks may take long.
                while collectives.sum(self._is_copying())[0]:
                    pass
            raise

    def finish(self) -> None:
        """Copy the rest, if anything was saved. The second Ctrl-C ends the wait."""
        self._begin_end()
        while self._is_copying():
            pass

    def _begin_end(self) -> None:
        if self._thread is not None:
            logger.info("uploading the rest to %s; all is saved, so this may be interrupted", self._url)
            self._begin(is_end=True)

    def _begin(self, *, is_end: bool) -> None:
        earlier = self._thread

        def work() -> None:
            if earlier is not None:
                earlier.join()
            try:
                files, root = self._open()
                found = [*self._run.root.iterdir(), *self._run.reference.glob("*")]
                small = [path for path in found if path.suffix in (".json", ".jsonl", ".yaml", ".npy")]
                self._put(files, root, small)
                steps = sorted(committed_steps(self._run.checkpoints).items(), reverse=True)
                exports = [path.parent for path in self._run.exports.glob("*/config.json")] if is_end else []
                for folder in [*(path for _, path in steps), *exports]:
                    self._copy(files, root, folder)
            except Exception as error:  # whatever a file system raises
                self._warn(
                    error,
                    "Copy the run's folder there yourself." if is_end else "It is tried again after the next save.",
                )

        self._thread = threading.Thread(target=work, name="upload", daemon=True)
        self._thread.start()

    def _is_copying(self) -> bool:
        if self._thread is None:
            return False
        self._thread.join(1.0)  # a second at most
        return self._thread.is_alive()

    def _warn(self, error: Exception, then: str) -> None:
        logger.warning("infra.upload_to=%s: %s: %s. %s", self._url, type(error).__name__, error, then)

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # late: few runs ask for it

        return url_to_fs(self._url)

    def _copy(self, files: Any, root: str, folder: Path) -> None:
        # Unless the same folder is there. If training deletes it meanwhile, it is left out.
        try:
            last = next(folder / name for name in _LAST if (folder / name).exists())
            mark, content = self._target(root, last), last.read_bytes()
            is_there = files.exists(mark)
            if is_there and last.name == MANIFEST and files.cat_file(mark) == content:
                return  # a manifest holds the hashes of the other files
            if is_there:
                files.rm_file(mark)
            self._put(files, root, [path for path in folder.rglob("*") if path.is_file() and path != last])
            files.makedirs(mark.rpartition("/")[0], exist_ok=True)
            if last.read_bytes() != content:  # the step was saved again meanwhile: the copy is of both
                return self._copy(files, root, folder)
            files.pipe_file(mark, content)
            logger.info("uploaded %s to %s", folder.name, self._url)
        except (FileNotFoundError, StopIteration):
            if folder.exists():
                raise
            logger.info("%s was deleted (training.save_total_limit) before it was uploaded", folder)

    def _put(self, files: Any, root: str, paths: list[Path]) -> None:
        targets = {str(path): self._target(root, path) for path in paths}
        for parent in {target.rpartition("/")[0] for target in targets.values()}:
            files.makedirs(parent, exist_ok=True)
        files.put([*targets], [*targets.values()])

    def _target(self, root: str, path: Path) -> str:
        return f"{root.rstrip('/')}/{path.relative_to(self._run.root).as_posix()}"
