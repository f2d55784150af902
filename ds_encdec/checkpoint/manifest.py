"""The manifest of a checkpoint: every file with its size and SHA-256.

It is the last file written before a checkpoint becomes visible, so a folder without one is not a
checkpoint; and it is checked before anything in the folder is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_encdec.launch.run_folder import flush_folder, write_atomically
from ds_encdec.types import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
_BLOCK_BYTES = 1 << 22
_DESCRIPTION = re.compile(r"[^/]+\.(json|yaml)")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what its manifest says; an older one may be whole."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its path relative to the checkpoint, its size, and its SHA-256 in hex."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of, and what wrote it: `engine` is "deepspeed" or "fsdp"."""

    step: int
    world_size: int
    engine: str
    files: tuple[FileRecord, ...]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def num_bytes(self) -> int:
        """Size of the whole checkpoint."""
        return sum(record.num_bytes for record in self.files)

    def descriptions(self) -> tuple[FileRecord, ...]:
        """The small JSON and YAML files that say what the checkpoint is of; the others hold tensors or vocabulary."""
        return tuple(record for record in self.files if _DESCRIPTION.fullmatch(record.path))


def record_file(path: Path, root: Path) -> FileRecord:
    """Flush `path` to disk and describe it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest, size = _hash(file)
    return FileRecord(path.relative_to(root).as_posix(), size, digest)


def seal(folder: Path, *, step: int, world_size: int, engine: str, engine_files: Sequence[FileRecord]) -> Manifest:
    """Make a checkpoint's `folder` durable and write its manifest; the engine's files are recorded already.

    What is left is to give the folder its name and to flush its parent. Raises OSError.
    """
    known = {record.path for record in engine_files}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    rest = [record_file(path, folder) for path in files if path.relative_to(folder).as_posix() not in known]
    manifest = Manifest(step, world_size, engine, (*engine_files, *rest))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_folder(inner)
    write_atomically(folder / MANIFEST, manifest.to_json())
    return manifest


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a committed checkpoint. Raises DamagedCheckpointError naming what is wrong."""
    path = checkpoint / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        records = tuple(FileRecord(**record) for record in content.pop("files"))
        manifest = Manifest(**content, files=records)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(_no_checkpoint(checkpoint)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{path} is not a readable manifest: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise DamagedCheckpointError(
            f"{path} has format version {manifest.format_version}; this version of ds_encdec reads {FORMAT_VERSION}."
        )
    return manifest


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Check a whole checkpoint in this process: no file missing, foreign or changed. Returns its manifest.

    Reads every byte and unpickles nothing. Raises DamagedCheckpointError naming the first file that is wrong.
    """
    manifest = read_manifest(checkpoint)
    verify_listing(checkpoint, manifest)
    verify_files(checkpoint, manifest.files)
    return manifest


def verify_listing(checkpoint: Path, manifest: Manifest) -> None:
    """Check that the folder holds the manifest's files and no others; readers find some of them by pattern.

    Raises DamagedCheckpointError naming a file that is missing, foreign, or no plain file of this folder.
    """
    listed = {record.path for record in manifest.files}
    present = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if not _is_folder(path)}
    foreign = sorted(set(present) - listed - {MANIFEST})
    if foreign:
        raise DamagedCheckpointError(f"{checkpoint / foreign[0]}: not in the manifest; the checkpoint was changed.")
    if missing := sorted(listed - set(present)):
        raise DamagedCheckpointError(f"{checkpoint / missing[0]}: missing, but the manifest lists it.")
    if links := [path for path in present.values() if path.is_symlink()]:
        raise DamagedCheckpointError(f"{links[0]}: a symbolic link; a checkpoint holds plain files.")


def verify_files(checkpoint: Path, records: tuple[FileRecord, ...]) -> None:
    """Compare files with their records. Raises DamagedCheckpointError naming the first that differs."""
    for record in records:
        path = checkpoint / record.path
        try:
            size = path.stat().st_size
            if size != record.num_bytes:
                raise DamagedCheckpointError(f"{path}: {size} bytes, but the manifest says {record.num_bytes}.")
            with open(path, "rb") as file:
                digest, _ = _hash(file)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}, but the manifest lists it.") from error
        if digest != record.sha256:
            raise DamagedCheckpointError(f"{path}: its SHA-256 is not the manifest's; the file was changed or damaged.")


def _no_checkpoint(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such folder."
    for final in (path / "final", path / "checkpoints" / "final"):
        if final.exists():
            return f"{path} is not a checkpoint, but holds some: give {final} or one beside it."
    return f"{path} is not a complete checkpoint: it has no {MANIFEST}."


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _hash(file: Any) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size
