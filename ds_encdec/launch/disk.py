"""Writes files that appear whole or not at all, keeps the user's cache, and reports file systems that refuse a file.
The cache holds texts that every process needs and that take a second to make, and DeepSpeed's compiled operators."""

import errno
import hashlib
import itertools
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from ds_encdec.base.quantities import disk_size
from ds_encdec.base.types import CheckpointError, DsEncDecError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = {
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f).",
    errno.EROFS: "Make its file system writable again.",
    errno.EISDIR: "Move that folder away: it has the name of a file.",
}
_LOOK = "Check that its file system is mounted, healthy, and writable for this user."


class DiskRefusedError(CheckpointError):
    """A file system refuses the files of a checkpoint or model."""


def disk_error(error: BaseException | None) -> OSError | None:
    """Return the OSError of a file system that `error` is or comes from; None for others, including those of a network.
    A RuntimeError while an OSError was handled counts: torch.save raises that if it cannot close its file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or (error.__context__ if type(error) is RuntimeError else None)
    return None if isinstance(error, ConnectionError | TimeoutError) else error


def free_bytes(folder: Path) -> int | None:
    """Return the free space of the file system of `folder`; None if it reports none (some network ones: 0 in all)."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


@dataclass(slots=True)
class Writing:
    """Files that are being written into `folder`, with the words of the error if its file system refuses them. `what`:
    the files ("The checkpoint"). `make_room`: how to free space. `rank`: the writer. `num_bytes`: 0 if unknown."""

    folder: Path
    what: str
    make_room: str
    rank: int | None = None
    num_bytes: int = 0

    @contextmanager
    def explain_refusals(self) -> Iterator[None]:
        """Raise DiskRefusedError if the wrapped block or function raises a file system's error."""
        try:
            yield
        except Exception as error:
            refusal = None if isinstance(error, DsEncDecError) else disk_error(error)  # ours explains itself
            if refusal is None:
                raise
            # Ranks that write together all raise the error of one, which names its rank.
            named = self.rank is None or (refusal.strerror or "").startswith("rank ")
            advice = self.make_room if refusal.errno in NO_SPACE else _ADVICE.get(refusal.errno or 0, _LOOK)
            with suppress(OSError):
                if refusal.errno in NO_SPACE and (there := os.statvfs(self.folder)).f_files and not there.f_favail:
                    advice = f"No inode is left there: delete files, however small. {advice}"
            raise self._refused(f"{'' if named else f'rank {self.rank}: '}{refusal}", advice) from error

    def require_space(self, num_bytes: int) -> None:
        """Record the size of the files. Raises DiskRefusedError if less is free."""
        self.num_bytes = num_bytes
        if (free := free_bytes(self.folder)) is not None and free < num_bytes:
            raise self._refused("too little space is free", self.make_room)

    def _refused(self, cause: str, advice: str) -> DiskRefusedError:
        takes = f"takes about {disk_size(self.num_bytes)} and " if self.num_bytes else ""
        has = "an unknown amount" if (free := free_bytes(self.folder)) is None else disk_size(free)
        return DiskRefusedError(f"{cause}. {self.what} {takes}has {has} free in {self.folder}. {advice}")


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` if the block succeeds, and is removed if it raises. A reader, or a crash,
    sees the old content or the new, and no mixture; only a kill leaves the temporary file behind. `mode`: its
    permissions, before the umask. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path`, text in UTF-8, through an `atomic_file`. Raises OSError."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, under durable names. Raises OSError."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        with suppress(PermissionError):  # one may write into a folder that one may not list
            flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Make the names in a folder, or the content of a file, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused_path(path: Path) -> Path:
    """Return `path`, or if it exists, `path` with the first free number behind it."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/ds_encdec`, which may not exist. Raises RuntimeError without that variable and a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ds_encdec")


def cached(name: str, made_from: Iterable[bytes], make: Callable[[], str]) -> str:
    """Return the text of `make`, from the cache if an earlier call with this `name` and `made_from` has stored it
    there. The file is `$XDG_CACHE_HOME/ds_encdec/NAME-DIGEST.json`. A damaged one is replaced. Without a home, after an
    OSError from `made_from`, or if the file cannot be written, `make` is called every time."""
    path = None
    with suppress(OSError, RuntimeError, ValueError):  # the last two: no home; no JSON
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_from)).hexdigest()[:32]
        path = cache_folder() / f"{name}-{digest}.json"
        if isinstance(text := json.loads(path.read_text()), str):
            return text
    text = make()
    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(text))
    return text


def build_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for compiled operators: the user's TORCH_EXTENSIONS_DIR, or a private, stable one. The private
    name hashes what the binaries depend on (versions, instruction set), so that neither an upgrade nor another kind of
    node with the same home folder loads binaries that do not fit."""
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/tmp")) / ".cache")
    parts = [
        platform.python_version(),
        platform.machine(),
        cpu_line("flags", "Features"),  # operators are compiled with -march=native
        *installed_versions("torch", "deepspeed").values(),  # FSDP2 does without deepspeed
    ]
    fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return cache / "ds_encdec" / f"torch_extensions-{fingerprint}"


def cpu_line(*beginnings: str) -> str:
    """Return the first line of /proc/cpuinfo with one of these beginnings; empty if no line has, as outside Linux."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.rstrip("\n") for line in lines if line.startswith(beginnings)), "")
    return ""


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those of `packages` that are installed, by name."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
