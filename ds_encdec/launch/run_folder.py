"""Defines the folder of a run (docs/checkpoints.md lists its files): its paths, its lock against a second run, and
`run.json` with the facts of the run."""

import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

from ds_encdec.base.terminal import SECRET, without_url_secrets
from ds_encdec.base.types import (
    CheckpointError,
    ConfigError,
    HangError,
    LostRankError,
    OutputLockedError,
    Preempted,
)
from ds_encdec.launch.disk import NO_SPACE, cpu_line, flush_folder, installed_versions, make_folder, write_atomically
from ds_encdec.launch.preemption import BY_FILE
from ds_encdec.launch.world import World

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_REASON_ON_A_FULL_DISK = 1000  # characters that keep `run.json` within the block that it has


class RunFolderGoneError(CheckpointError):
    """The folder of a run was deleted, or is another's by now."""


class RunFolder:
    """The paths of a run, and on rank 0 its exclusive ownership. `earlier`: the content of `run.json` when this start
    claimed the folder; rank 0 sends it to the others."""

    def __init__(self, output_dir: str) -> None:
        self.root = Path(output_dir).expanduser().absolute()
        self.checkpoints = self.root / "checkpoints"
        self.exports = self.root / "export"
        self.averaged = self.exports / "averaged"
        self.metrics = self.root / "metrics.jsonl"
        self.abandoned_metrics = self.root / "metrics.abandoned.jsonl"
        self.samples = self.root / "samples.jsonl"
        self.events = self.root / "ledger.jsonl"
        self.reference = self.root / "reference"  # see data/reference.py
        self.profile = self.root / "profile"
        self.stacks = self.root / "stacks"
        self.config_yaml = self.root / "config.yaml"
        self.run_json = self.root / "run.json"
        self.stop_file = self.root / "stop"
        self.earlier: dict[str, Any] = {}
        self._lock: IO[str] | None = None

    def claim(self, *, resume: bool) -> dict[str, Any]:
        """Take the folder for this process (rank 0 only), and return `earlier`; a failure changes nothing in it. Raises
        OutputLockedError if another live process has it, or without `resume` if a run is in it; ConfigError if it
        cannot be written; Preempted if torchrun restarts ranks that `ds-encdec stop` has ended, or if that verb was
        used when the run had just been lost, and another start was to follow."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and BY_FILE in self.read_status().get("reason", ""):
            raise Preempted(f"{BY_FILE} has ended this run, so torchrun's --max-restarts does not start it again")
        self._lock = take_folder(self.root, "infra.output_dir")
        if not resume and self.is_used():
            self.release()
            state = self.read_status().get("state")
            raise OutputLockedError(
                f"infra.output_dir: {self.root} already holds a run ({f'state {state}' if state else 'no run.json'}). "
                "Continue it with `--resume auto`, or choose another infra.output_dir; nothing was changed."
            )
        try:
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"infra.output_dir: {self.checkpoints}: {error.strerror}; use another folder.") from error
        with suppress(OSError):
            status = self.read_status()
            if resume and self.stop_file.exists() and self._may_start_by_itself(status):
                why = f"{BY_FILE} was used before this start, so it ends, too; the next one goes on"
                self.write_status("preempted", reason=why, exit_code=Preempted.exit_code)
                self.stop_file.unlink()
                self.release()
                raise Preempted(f"{self.root}: {why}.")
            self.stop_file.unlink(missing_ok=True)
            if not resume:
                self.run_json.unlink(missing_ok=True)
            elif status.get("state") == "running":
                self.write_status(
                    "failed",
                    reason="ended without a word: killed, or its machine went down",
                    exit_code=LostRankError.exit_code,
                )
        self.earlier = self.read_status()
        return self.earlier

    def require_present(self) -> bool:
        """Return whether the folder that this process has claimed still has its `checkpoints/`, without which the next
        save makes it again. Raises RunFolderGoneError if the folder itself was deleted or replaced."""
        if self._lock is None:
            return True
        try:
            is_here = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.root / ".lock"))
        except OSError as error:  # if the file system does not answer now, the next save reports it
            is_here = not isinstance(error, FileNotFoundError)
        if not is_here:
            raise RunFolderGoneError(
                f"infra.output_dir: {self.root} was deleted or replaced while this run was writing into it, so no "
                "checkpoint can be saved. Restore a copy of it and continue with `--resume auto`, or start again."
            )
        return self.checkpoints.exists()

    def flush_record(self) -> None:
        """Make the lines written so far durable, and the names of their files; a refusal is logged, never raised."""
        for path in (self.metrics, self.abandoned_metrics, self.samples, self.events, self.root):
            try:
                if path.exists():
                    flush_folder(path)
            except OSError as error:
                logger.error("%s: its last lines may not be on the disk: %s", path, error)

    def release(self) -> None:
        """Release the folder, which also happens when the process ends, however it ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_status(self, state: str, *, reason: str = "", exit_code: int | None = None, **facts: Any) -> None:
        """Replace `run.json`, but keep its earlier facts; any rank may call this. Raises OSError. Once this start of
        the run has ended, `failed` is ignored: the first reason explains, and a rank that goes after a good end has not
        failed. On a full disk an ending is written over the old text in place."""
        reason = without_url_secrets(reason)
        with open(self.root / ".run.json.lock", "a") as lock:
            with suppress(ConfigError):  # a host that cannot lock writes without
                lock_file(lock, wait=True)
            previous = self.read_status()
            if state == "failed" and previous != self.earlier and previous.get("state") not in (None, "running"):
                return
            if state != "running":
                self.flush_record()
            record = {
                **previous,
                **facts,
                "state": state,
                "reason": reason,
                "exit_code": exit_code,
                "updated_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
            try:
                write_atomically(self.run_json, json.dumps(record, indent=2) + "\n")
            except OSError as error:
                if error.errno not in NO_SPACE or state == "running":
                    raise
                record["reason"] = reason[:_REASON_ON_A_FULL_DISK]
                with open(self.run_json, "r+") as file:  # over the old text, which takes no more space
                    file.write(json.dumps(record, indent=2) + "\n")
                    file.truncate()
                flush_folder(self.run_json)

    def read_status(self) -> dict[str, Any]:
        """Return the content of `run.json`, or {} unless a run has written it."""
        kinds = {"state": str, "reason": str, "exit_code": int | None}
        with suppress(OSError, ValueError, RecursionError):
            status = json.loads(self.run_json.read_text())  # `read_json` takes more memory than a full one has left
            if isinstance(status, dict) and all(isinstance(status.get(name), kind) for name, kind in kinds.items()):
                return status
        return {}

    def ask_to_stop(self) -> str:
        """Request that the run save and end, from any host that sees this folder; return the message about it. A run
        that has ended is a message, and no error. Raises ConfigError if no run is in the folder."""
        status = self.read_status()
        if not status:
            raise ConfigError(f"{self.root} is not a run's folder: it has no run.json that a run has written")
        has_ended = f"the run has ended: {status['state']}, exit code {status.get('exit_code')}"
        if not self._may_start_by_itself(status):
            return f"{self.root}: nothing to stop, {has_ended}"
        try:
            self.stop_file.touch()
        except OSError as error:
            raise ConfigError(f"{self.stop_file} cannot be written ({error.strerror})") from error
        if status["state"] != "running":
            return f"{self.root}: {has_ended}; if it is started again, that start ends at once"
        with suppress(OSError, ConfigError), open(self.root / ".lock", "a+") as lock:
            if lock_file(lock):
                return (
                    f"{self.root}: no process seen from here runs it; if it is started again, that start ends at once"
                )
        return f"{self.root}: the run saves after its step, and ends with exit code 75"

    @staticmethod
    def _may_start_by_itself(status: dict[str, Any]) -> bool:
        """Return whether the run goes on, or a supervisor or queue starts it again (scripts/supervise.sh)."""
        ended_by = status.get("exit_code") in (Preempted.exit_code, HangError.exit_code, LostRankError.exit_code)
        return status.get("state") == "running" or (ended_by and BY_FILE not in status["reason"])

    def is_used(self) -> bool:
        """Return whether a run has left something to lose; one that failed before its first step has not."""
        return any(self.checkpoints.glob("step-*")) or (self.metrics.exists() and self.metrics.stat().st_size > 0)


def take_folder(folder: Path, field: str) -> IO[str]:
    """Make `folder`, and lock it for this process until the returned file is closed; `field` names it in messages.
    Raises ConfigError if it cannot be written or locked, OutputLockedError if another process has it."""
    try:
        make_folder(folder)
        lock = open(folder / ".lock", "a+")  # noqa: SIM115  the caller closes it
    except OSError as error:
        raise ConfigError(f"{field}: cannot write to {folder} ({error.strerror}); choose another folder.") from error
    if not lock_file(lock):
        lock.seek(0)
        raise OutputLockedError(
            f"{field}: {folder} is in use by {lock.read().strip() or 'another process'}. Wait for that to end, or "
            "choose another folder; nothing was changed."
        )
    with suppress(OSError):  # a full disk: the lock holds without this text
        lock.truncate(0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def lock_file(file: IO[str], *, wait: bool = False) -> bool:
    """Lock `file` until it is closed; return False if another process holds it, unless `wait` is set. Raises
    ConfigError if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ConfigError(
            f"infra.output_dir: {file.name} cannot be locked ({error.strerror}), so a second run could write there. "
            "Mount its file system with locks (Lustre: `-o flock`; NFS: with its lock daemon, or `-o "
            "local_lock=flock`), or choose an infra.output_dir on another file system."
        ) from error
    return True


def start_facts(world: World) -> dict[str, Any]:
    """Return when and how a run starts: its ranks, command, commit, host, devices, and the versions that decide its
    numbers. Facts that are missing here, such as the commit of an installed wheel, are left out."""
    import torch  # not needed by a report

    cpu = cpu_line("model name").partition(": ")[2] or platform.machine()
    facts = {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world_size": world.world_size,
        "launcher": world.launcher,
        "command": masked(sys.argv),
        **git_state(_PACKAGE),
        "code": code_hash(),
        "host": socket.gethostname(),
        "device": cpu,
        "cpu": f"{os.cpu_count()} × {cpu}",
        "host_memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **installed_versions("ds_encdec", "torch", "transformers", "deepspeed"),
    }
    if torch.cuda.is_available():
        facts |= {
            "device": torch.cuda.get_device_name(),
            "device_count": torch.cuda.device_count(),
            "cuda": torch.version.cuda or "none",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        }
    return facts


_SECRET = rf"[\w.-]*(?:{SECRET})[\w.-]*"
_SECRETS = re.compile(
    rf"""(?is)({_SECRET}=).+|({_SECRET}["']?\s*:\s*)(?:"[^"]*"|'(?:''|[^'])*'|[^,}}]+)|(?<=://)[^@\s]+(?=@)"""
)


def masked(words: Sequence[str]) -> str:
    """Return the command line without the values of options named like a secret (`SECRET` in base/terminal.py), as in
    `--token X`, `name.token=X`, `{"api_key": "X"}` and `https://user:X@host`."""

    def shown(before: str, word: str) -> str:
        alone = before.startswith("-") and "=" not in before and re.fullmatch(f"(?i){_SECRET}", before)
        return "***" if alone else _SECRETS.sub(lambda match: f"{match[1] or match[2] or ''}***", word)

    return shlex.join([*words[:1], *itertools.starmap(shown, itertools.pairwise(words))])


@cache
def code_hash(package: Path = _PACKAGE) -> str:
    """Return the SHA-256 of the names and texts of all Python files of ds_encdec, in which uncommitted changes count,
    too. They are read once: a file that is edited during a run is not the code that runs."""
    texts = {str(file.relative_to(package)): file.read_text(errors="replace") for file in package.rglob("*.py")}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


@cache
def code_facts() -> dict[str, Any]:
    """Return the `code_hash` as `code`, and the `commit` (with `-dirty` if tracked files have changed) or None."""
    git = git_state(_PACKAGE)
    return {"code": code_hash(), "commit": git["git_commit"] + "-dirty" * git["git_dirty"] if git else None}


@cache
def git_state(folder: Path) -> dict[str, Any]:
    """Return the `git_commit` that tracks `folder`, and `git_dirty` if tracked files have changed; {} if none does."""
    git = ("git", "-C", str(folder))
    if not _output(*git, "ls-files", "."):
        return {}  # installed, perhaps into another repository
    return {
        "git_commit": _output(*git, "rev-parse", "HEAD"),
        "git_dirty": bool(_output(*git, "status", "--porcelain", "--untracked-files=no")),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
