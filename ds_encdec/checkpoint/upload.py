"""A run's outputs on another file system (`infra.upload_to`): what fsspec reaches, such as S3, GCS or a Hub repository.

Rank 0 copies, in a thread beside training: after each save the checkpoints that are not there yet, the newest first,
and the run's own small files; at the end what was exported, too. The manifest of a checkpoint, and the configuration of
a model folder, go last, so that half a copy is never taken for a whole one. What fails is a warning, and is tried again
at the next save and at the end. Nothing is deleted there but what is being replaced.

A launcher ends all ranks soon after one has left with an error code, so those of a run that was asked to stop wait for
rank 0's copies together. A run that fails does not wait: what was saved is in its folder.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_encdec.callbacks import Callback
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manifest import MANIFEST
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import Heartbeat
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.types import ConfigError, Preempted, TrainingState

logger = logging.getLogger(__name__)

_LAST = ("config.json", MANIFEST)
"""The files without which a folder is not taken for a whole one, in the order in which they are looked for."""


class Uploads(Callback):
    """Copies what `run` has saved to `url`; None: nothing, as on the ranks that do not copy."""

    def __init__(self, run: RunFolder, url: str | None) -> None:
        self._run, self._url = run, url
        self._shown = re.sub(r"(?<=://)[^@/\s]+(?=@)", "***", url or "")  # without a name and a password
        self._there: set[Path] = set()  # folders that this process has copied, or is copying
        self._wanted, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._begins = False  # a new run that has copied nothing yet

    def claim(self, resume: str | None) -> None:
        """Raise ConfigError where this run begins anew, and another's copies are there, which it would replace.

        `resume`: what the run was asked to go on from. A file system that does not answer is a warning.
        """
        if self._url is None or resume not in (None, "auto") or committed_steps(self._run.checkpoints):
            return
        self._begins = True
        try:
            self._refuse_others(*self._open())
        except ConfigError:
            raise
        except Exception as error:  # whatever a file system raises
            self._warn(error, "It is tried again after each save.")

    def after_save(self, state: TrainingState, checkpoint: Path) -> None:
        """Begin to copy what is new, or do so as soon as an earlier copy has ended; returns at once."""
        if self._url is None:
            return
        self._there.discard(checkpoint)  # a rollback saves a step again
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
            self._thread.start()

    @contextmanager
    def awaited_by_all(self, collectives: HostCollectives, heartbeat: Heartbeat) -> Iterator[None]:
        """Let no rank leave a run that is asked to stop before the rest is copied. One that fails does not wait."""
        try:
            yield
        except Preempted:
            self._end()
            with heartbeat.busy():
                try:
                    # In slices: no exchange of the ranks may take long.
                    while collectives.sum(self._is_copying())[0]:
                        pass
                except RuntimeError as error:
                    logger.warning("another rank has left before all was uploaded: %s", error)
            raise
        except Exception:
            if self._is_copying(0.0):
                logger.warning("%s may lack what was saved last: it is in %s", self._shown, self._run.root)
            raise

    def finish(self) -> None:
        """Copy the rest, where anything was saved. The second Ctrl-C ends the wait."""
        self._end()
        while self._is_copying():
            pass

    def _end(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._wanted.set()
            logger.info("uploading what is left to %s; all is saved, so this may be interrupted", self._shown)

    def _is_copying(self, seconds: float = 1.0) -> bool:
        """Return whether there is something to copy still, after so many seconds at most."""
        if self._thread is None:
            return False
        self._thread.join(seconds)
        return self._thread.is_alive()

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
                self._warn(error, again)

    def _warn(self, error: Exception, then: str) -> None:
        what = f"{type(error).__name__}: {error}".replace(str(self._url), self._shown)
        logger.warning("infra.upload_to=%s: %s. %s", self._shown, what, then)

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # late: few runs ask for it

        files, root = url_to_fs(self._url)
        return files, root

    def _refuse_others(self, files: Any, root: str) -> None:
        if self._begins and files.exists(self._target(root, self._run.run_json)):
            raise ConfigError(
                f"infra.upload_to: {self._shown} holds the copies of a run already (run.json). Name another folder for "
                "this one; or, to go on with that run, bring its checkpoints/step-N back and name it in `--resume`"
            )

    def _copy_new(self) -> None:
        files, root = self._open()
        self._refuse_others(files, root)  # once more: the other run may have begun since
        self._begins = False
        endings = (".json", ".jsonl", ".yaml")
        self._put(files, root, [path for path in self._run.root.iterdir() if path.suffix in endings])
        steps = committed_steps(self._run.checkpoints)
        exports = [path.parent for path in self._run.exports.glob("*/config.json")] if self._over.is_set() else []
        for folder in [*(path for _, path in sorted(steps.items(), reverse=True)), *exports]:
            if folder not in self._there:
                self._there.add(folder)  # first: a rollback that saves the step again meanwhile takes it out
                try:
                    self._copy(files, root, folder)
                except BaseException:
                    self._there.discard(folder)
                    raise

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
            if last.read_bytes() != content:  # the step was saved again meanwhile: what is there is of both
                return self._copy(files, root, folder)
            files.pipe_file(mark, content)
        except (FileNotFoundError, StopIteration):
            if folder.exists():
                raise
            logger.info("%s was deleted (training.save_total_limit) before it was uploaded", folder)
            return
        logger.info("uploaded %s to %s", folder.name, self._shown)

    def _put(self, files: Any, root: str, paths: list[Path]) -> None:
        targets = {str(path): self._target(root, path) for path in paths}
        for parent in {target.rpartition("/")[0] for target in targets.values()}:
            files.makedirs(parent, exist_ok=True)
        files.put([*targets], [*targets.values()])

    def _target(self, root: str, path: Path) -> str:
        return f"{root.rstrip('/')}/{path.relative_to(self._run.root).as_posix()}"
