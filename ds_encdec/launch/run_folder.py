"""The folder of a run: its paths, the lock that keeps a second run out, and `run.json`.

OUTPUT_DIR/
  checkpoints/step-00001000/   see checkpoint/folder.py
  export/averaged/             the mean of the last checkpoints as a Hugging Face model, at the end of a run
  logs/                        TensorBoard and W&B files
  config.yaml  ds_config.json  what the run was started with; the latter where DeepSpeed runs
  metrics.jsonl                one JSON object per logging interval
  metrics.abandoned.jsonl      the lines that rollbacks took back
  ledger.jsonl                 what happened to the run, and what it did about it (monitor/ledger.py)
  stacks/                      what every rank was doing when the run stood still (launch/watchdog.py)
  run.json                     running | completed | preempted | failed, with reason and exit code
  .lock                        held by rank 0 as long as it lives
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from ds_encdec.types import ConfigError, OutputLockedError


class RunFolder:
    """Paths of a run, and on rank 0 its exclusive ownership."""

    def __init__(self, output_dir: str) -> None:
        self.root = Path(output_dir).expanduser().absolute()
        self.checkpoints = self.root / "checkpoints"
        self.averaged = self.root / "export" / "averaged"
        self.metrics = self.root / "metrics.jsonl"
        self.abandoned_metrics = self.root / "metrics.abandoned.jsonl"
        self.ledger = self.root / "ledger.jsonl"
        self.stacks = self.root / "stacks"
        self.config_yaml = self.root / "config.yaml"
        self.ds_config_json = self.root / "ds_config.json"
        self.run_json = self.root / "run.json"
        self._lock: IO[str] | None = None

    def claim(self, *, resume: bool) -> None:
        """Take the folder for this process (rank 0 only); nothing in it is touched when this fails.

        Raises OutputLockedError where another live process holds it, or where an earlier run is in it
        and `resume` is False; ConfigError where the folder cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "a+")  # noqa: SIM115  held open for the life of the process
        except OSError as error:
            raise ConfigError(
                f"infra.output_dir: cannot write to {self.root} ({error.strerror}); choose another folder."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown process"
            lock.close()
            raise OutputLockedError(
                f"infra.output_dir: {self.root} is in use by {holder}. "
                "Wait for that run to end, or choose another infra.output_dir; nothing was changed."
            ) from error
        if not resume and self.is_used():
            lock.close()
            raise OutputLockedError(
                f"infra.output_dir: {self.root} already holds a run ({self._describe_previous()}). "
                "Continue it with `--resume auto`, or choose another infra.output_dir; nothing was changed."
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        """Give the folder back (also happens by itself when the process ends, however it ends)."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_status(self, state: str, *, reason: str = "", exit_code: int | None = None, **facts: Any) -> None:
        """Replace `run.json`; facts given earlier are kept.

        Any rank may call it. Once a run has failed, what other ranks say of it (mostly that a peer is
        gone) is not taken: the first reason is the one that explains.
        """
        with open(self.root / ".run.json.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            previous = self.read_status()
            if state == "failed" and previous.get("state") == "failed":
                return
            record = {**previous, **facts, "state": state, "reason": reason, "exit_code": exit_code}
            record["updated_at"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            write_atomically(self.run_json, json.dumps(record, indent=2) + "\n")

    def read_status(self) -> dict[str, Any]:
        """The content of `run.json`, or {} where there is none."""
        try:
            return json.loads(self.run_json.read_text())
        except (OSError, ValueError):
            return {}

    def is_used(self) -> bool:
        """Whether a run has left something to lose; one that failed before its first step has not."""
        return any(self.checkpoints.glob("step-*")) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def _describe_previous(self) -> str:
        status = self.read_status()
        return f"state {status['state']}" if "state" in status else "no run.json"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old content or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Make the names in a folder, or the content of a file, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Make `folder` and all files in it durable."""
    for path in (folder, *folder.rglob("*")):
        flush_folder(path)
