"""How a run ends, in its `run.json` and as the error that its process leaves with."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_encdec.launch.memory_errors import is_out_of_memory, out_of_memory
from ds_encdec.launch.peers import Peers
from ds_encdec.launch.run_folder import RunFolder, RunFolderGoneError
from ds_encdec.launch.world import World
from ds_encdec.types import DsEncDecError, LostRankError, OutOfMemoryError, Preempted

logger = logging.getLogger(__name__)


@contextmanager
def ending_recorded(folder: RunFolder, world: World, peers: Peers, *, spare: bool) -> Iterator[Callable[[], None]]:
    """Keep `run.json` true: running once the function it yields is called, then completed, preempted or failed.

    What goes wrong before that is recorded too, unless `spare`: a resume that is refused leaves the good end of the
    earlier start alone, but no failure, which a supervisor would act on once more. Any rank may be the one that
    fails; the folder keeps the first reason. Every error leaves as a DsEncDecError, and none is replaced by one of the
    recording.
    """
    began = False

    def begin() -> None:
        nonlocal began
        began = True
        if world.is_main:
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            record(
                folder,
                "running",
                started_at=started,
                world_size=world.world_size,
                launcher=world.launcher,
                **environment_facts(),
            )

    try:
        yield begin
    except BaseException as error:
        named = named_error(error, world.rank, peers)
        refused = spare and not began and not isinstance(named, LostRankError)
        spared = refused and folder.earlier.get("state") in ("completed", "preempted")
        if not spared and not isinstance(named, RunFolderGoneError):
            state = "preempted" if isinstance(named, Preempted) else "failed"
            record(folder, state, reason=str(named), exit_code=named.exit_code)
        if named is error:
            raise
        raise named from error
    if world.is_main:
        record(folder, "completed", exit_code=0)


def record(folder: RunFolder, state: str, **facts: Any) -> None:
    """Write `run.json`, or log why that cannot be: it is no reason for a run to end otherwise than it does."""
    try:
        folder.write_status(state, **facts)
    except Exception as error:
        logger.error(
            "%s could not be written, so it does not say that the run is %s: %s", folder.run_json, state, error
        )


def environment_facts() -> dict[str, Any]:
    """The command and its commit, this host and its devices, and the versions that decide a run's numbers.

    Facts that cannot be had here, such as the commit of an installed wheel, are left out.
    """
    versions = {}
    for name in ("ds_encdec", "torch", "transformers", "deepspeed"):
        with suppress(PackageNotFoundError):  # deepspeed is not needed, and a checkout may not be installed
            versions[name] = version(name)
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):  # Linux names the model here; elsewhere the architecture has to do
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    facts = {
        "command": masked(sys.argv),
        **git_state(Path(__file__).resolve().parent),
        "host": socket.gethostname(),
        "device": cpu,
        "cpu": f"{os.cpu_count()} × {cpu}",
        "host_memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        **versions,
    }
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(), "device_count": torch.cuda.device_count()}
        facts |= {"cuda": torch.version.cuda or "none", "driver": _output("nvidia-smi", *_DRIVER).partition("\n")[0]}
    return facts


_DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")
_SECRET = (
    r"[\w.-]*(?:secret|passw|passphrase|pass(?![a-z])|pwd|credential|auth(?!or(?!iz))|bearer|token(?!s|iz)"
    r"|key(?:[_-]?(?:id|file|path))?(?![\w.-]))[\w.-]*"
)
_SECRETS = re.compile(
    rf"""(?is)({_SECRET}=).+|({_SECRET}["']?\s*:\s*)(?:"[^"]*"|'(?:''|[^'])*'|[^,}}]+)|(?<=://)[^@\s]+(?=@)"""
)


def masked(words: Sequence[str]) -> str:
    """The command line without the values of options whose names hold token, secret, key or password.

    `--token X`, `name.token=X`, `{"api_key": "X"}` and `https://user:X@host` are known; `num_tokens` and tokenizers
    are no secrets.
    """
    shown = [words[0]] if words else []
    for before, word in pairwise(words):
        alone = before.startswith("-") and "=" not in before and re.fullmatch(f"(?i){_SECRET}", before)
        shown.append("***" if alone else _SECRETS.sub(lambda match: f"{match[1] or match[2] or ''}***", word))
    return shlex.join(shown)


def git_state(folder: Path) -> dict[str, Any]:
    """`git_commit` of the checkout that tracks `folder`, and `git_dirty`: tracked files have changed; {} for none."""
    git = ("git", "-C", str(folder))
    if not _output(*git, "ls-files", "."):
        return {}  # installed, perhaps into somebody else's repository
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": _output(*git, "rev-parse", "HEAD"), "git_dirty": bool(changed)}


def _output(*command: str) -> str:
    """The output of a program; empty where it is absent, fails, or does not answer within seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def named_error(error: BaseException, rank: int, peers: Peers | None = None) -> DsEncDecError:
    """The error as one of ours, with an exit code. Where there are `peers`, one of theirs that is gone is named."""
    if isinstance(error, DsEncDecError) and type(error) is not DsEncDecError:
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"{out_of_memory(error, rank)} A GPU needs less with training.activation_checkpointing=full, "
            "a higher infra.sharding_stage or infra.offload_optimizer=cpu, and in a new run with a smaller "
            "training.per_device_train_batch_size; the host with infra.pin_memory=false, training.async_save=false "
            "or infra.offload_optimizer=none."
        )
    if peers is not None and (lost := peers.explain(error)) is not None:
        return lost
    if isinstance(error, DsEncDecError):
        return error
    return DsEncDecError(f"rank {rank}: {type(error).__name__}: {error}")
